// How a queue stands, as rows of text. Nothing here knows the page: node runs it in the tests.

export const HISTORY = 240; // looks that the sparkline shows

// As short as people read it.
export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}

const count = (number) => Math.round(number).toLocaleString("en-US");
const orNothing = (value, form) => (value === null || value === undefined ? "" : form(value));

// Each table has titles and rows. A row has cells; perhaps the state of what it is about, why it is so, which is too long for a
// cell, and an action with a question.
export function tablesOf(snapshot) {
  return { workers: workersOf(snapshot), lanes: lanesOf(snapshot), requests: requestsOf(snapshot), letters: lettersOf(snapshot) };
}

function workersOf({ workers }) {
  const rows = workers.map((worker) => {
    const model = [worker.model?.split("/").pop(), worker.digest?.slice(0, 12)].filter(Boolean).join(" ");
    const slots = worker.slots ? `${count(worker.running_sequences)}/${count(worker.slots)}` : "";
    const more = worker.waiting_sequences ? ` +${count(worker.waiting_sequences)}` : "";
    const used = worker.pages - worker.free_pages - worker.cached_pages;
    let state = worker.state;
    if (state === "silent") state += ` ${duration(worker.reported_s)}`;
    return {
      state: worker.state,
      why: worker.unready ?? "",
      cells: [
        worker.name, state, model, worker.version ?? "", worker.device ?? "", count(worker.num_taken), slots + more,
        worker.pages ? `${count(used)}/${count(worker.pages)}` : "", worker.slots ? count(worker.tokens_per_s) : "",
        orNothing(worker.heartbeat_s, duration),
      ],
      action: worker.heartbeat_left_ms === null ? null : {
        deed: "drain",
        body: { worker: worker.name },
        question: `Drain worker ${worker.name}? It takes nothing new, and what it does not finish goes on elsewhere.`,
      },
    };
  });
  return { titles: ["worker", "state", "model", "version", "device", "requests", "slots", "pages", "tokens/s", "heartbeat"], rows };
}

function lanesOf({ lanes }) {
  const rows = lanes.flatMap((lane) => [
    {
      state: "lane",
      cells: [`priority ${lane.priority}, ${lane.num_tenants === 1 ? "1 tenant" : `${count(lane.num_tenants)} tenants`}`,
        count(lane.num_requests), count(lane.tokens), duration(lane.oldest_s), ""],
    },
    ...lane.tenants.filter((tenant) => tenant.num_waiting).map((tenant) => ({
      cells: [tenant.name || "(none)", count(tenant.num_waiting), "", "", count(tenant.served)],
    })),
  ]);
  return { titles: ["lane", "waiting", "tokens", "oldest", "served"], rows };
}

function requestsOf({ running }) {
  const rows = running.map((each) => ({
    cells: [
      each.id, each.worker, each.tenant ?? "", each.phase, duration(each.age_s), duration(each.running_s),
      (each.prefilled ? `${count(Math.min(each.prefilled, each.prompt_tokens))}/` : "") + count(each.prompt_tokens),
      count(each.tokens), each.takeovers ? String(each.takeovers) : "",
    ],
    action: { deed: "cancel", body: { id: each.id }, question: `Cancel request ${each.id}? Its reply ends with the text so far.` },
  }));
  return { titles: ["request", "worker", "tenant", "phase", "age", "here for", "prompt", "tokens", "takeovers"], rows };
}

function lettersOf({ letters }) {
  const rows = letters.map((letter) => ({
    cells: [letter.id, letter.request_id, letter.code, letter.worker, `${duration(letter.age_s)} ago`, orNothing(letter.crashes, String)],
    action: {
      deed: "replay",
      body: { letter: letter.id },
      question: `Send the request of dead letter ${letter.id} again, under a new id?`,
    },
  }));
  return { titles: ["dead letter", "request", "code", "worker", "given up", "crashes"], rows };
}

// The queue in one line.
export function summaryOf(snapshot) {
  const states = {};
  for (const { state } of snapshot.workers) states[state] = (states[state] ?? 0) + 1;
  const fleet = Object.keys(states).sort().map((state) => `${states[state]} ${state}`).join(", ") || "no workers";
  const oldest = snapshot.num_waiting && snapshot.oldest_s !== null ? `, oldest ${duration(snapshot.oldest_s)}` : "";
  const slots = snapshot.slots ? ` on ${count(snapshot.slots)} slots` : "";
  const dead = snapshot.num_dead === 1 ? "1 dead letter" : `${count(snapshot.num_dead)} dead letters`;
  const malformed = snapshot.num_malformed ? `, ${count(snapshot.num_malformed)} malformed` : "";
  const parts = [fleet, `${count(snapshot.num_waiting)} waiting${oldest}`, `${count(snapshot.num_running)} running${slots}`];
  return [...parts, dead + malformed].join(" \u00b7 ");
}

// The points of a line of `width` by `height`, the last value at the right.
export function pointsOf(values, width, height) {
  const most = Math.max(1e-9, ...values);
  const step = width / Math.max(1, HISTORY - 1);
  const left = width - step * (values.length - 1);
  return values.map((value, place) => `${(left + place * step).toFixed(1)},${(height * (1 - value / most)).toFixed(1)}`).join(" ");
}
