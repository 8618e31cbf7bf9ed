// The page for operators: looks at a queue once a second, and does what was asked and answered with yes. All of it is text,
// and never HTML. The key travels in a header, and is kept for as long as the tab is open.

import { HISTORY, pointsOf, summaryOf, tablesOf } from "./tables.mjs";

const KEY = "penstock-admin-key";
const INTERVAL_MS = 1000;
const LOOKS_PER_LIST = 10;

const at = (id) => document.getElementById(id);
const urlOf = (path) => new URL(path, document.baseURI).href;

let history = [];
let timer = null;
let looks = 0; // a look that was overtaken by another queue or key shows nothing
let sinceListed = 0; // looks since queues were listed

async function ask(path, options = {}) {
  const headers = { authorization: `Bearer ${at("key").value.trim()}`, ...options.headers };
  const response = await fetch(urlOf(`operations/${path}`), { ...options, headers, credentials: "omit", cache: "no-store" });
  const text = await response.text();
  let answer;
  try {
    answer = JSON.parse(text);
  } catch {
    throw new Error(`${response.status} ${text.slice(0, 200)}`);
  }
  if (!response.ok) throw new Error(answer.error?.message ?? String(response.status));
  return answer;
}

function say(text, kind = "") {
  at("status").textContent = text;
  at("status").dataset.kind = kind;
}

async function begin() {
  clearTimeout(timer);
  looks += 1;
  history = [];
  if (at("key").value.trim() === "") {
    say("An admin key is needed: penstock keys create --admin makes one.", "trouble");
    return;
  }
  const mine = looks;
  try {
    await loadQueues();
    if (mine === looks) await look();
  } catch (error) {
    say(error.message, "trouble");
    if (mine === looks) timer = setTimeout(begin, 5 * INTERVAL_MS);
  }
}

async function loadQueues() {
  const { queues } = await ask("queues");
  sinceListed = 0;
  const shown = [...at("queue").options].map(({ value }) => value);
  if (queues.join() !== shown.join()) {
    const chosen = at("queue").value;
    at("queue").replaceChildren(...queues.map((name) => new Option(name, name, false, name === chosen)));
  }
  if (at("status").dataset.kind !== "done") say(queues.length ? "" : "No queue is served.");
}

async function look() {
  clearTimeout(timer);
  const mine = looks;
  try {
    sinceListed += 1;
    if (sinceListed > LOOKS_PER_LIST && !document.hidden) await loadQueues();
    const queue = at("queue").value;
    if (queue !== "" && !document.hidden) {
      const snapshot = await ask(`queues/${encodeURIComponent(queue)}`);
      if (mine !== looks) return;
      history = [...history, snapshot.tokens_per_s].slice(-HISTORY);
      show(snapshot);
      if (at("status").dataset.kind === "trouble") say("");
    }
  } catch (error) {
    if (mine !== looks) return;
    say(`No newer look: ${error.message}`, "trouble");
  }
  timer = setTimeout(look, INTERVAL_MS);
}

function show(snapshot) {
  at("view").hidden = false;
  at("summary").textContent = summaryOf(snapshot);
  at("rate").textContent = `${Math.round(snapshot.tokens_per_s).toLocaleString("en-US")} tokens/s`;
  at("sparkline").setAttribute("points", pointsOf(history, 240, 40));
  for (const [id, table] of Object.entries(tablesOf(snapshot))) showTable(at(id), table);
}

// A button that has the focus keeps it: whoever uses the keyboard would lose it each second. One that is just being pressed
// stays, or the click would be lost.
function showTable(table, { titles, rows }) {
  if (table.querySelector("button:active")) return;
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.target : null;
  const head = newRow("th", [...titles, ""]); // the last one is above the buttons
  const body = rows.flatMap(({ cells, state, why, action }) => {
    const row = newRow("td", cells);
    if (state) row.dataset.state = state;
    const last = document.createElement("td");
    if (action) last.append(newButton(action));
    row.append(last);
    return why ? [row, newReason(why, row.cells.length)] : [row];
  });
  table.replaceChildren(...(rows.length ? [head, ...body] : [newRow("td", ["none"])]));
  if (focused) [...table.querySelectorAll("button")].find(({ dataset }) => dataset.target === focused)?.focus();
}

function newRow(tag, cells) {
  const row = document.createElement("tr");
  for (const text of cells) {
    const cell = document.createElement(tag);
    cell.textContent = cell.title = text; // where a long one is cut, pointing at it shows all of it
    row.append(cell);
  }
  return row;
}

// A line beneath a row, as wide as the row and no wider than the window.
function newReason(text, width) {
  const row = newRow("td", [""]);
  const line = document.createElement("div");
  line.textContent = text;
  row.className = "why";
  row.cells[0].colSpan = width;
  row.cells[0].append(line);
  return row;
}

function newButton(action) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = action.deed;
  button.dataset.target = Object.values(action.body)[0];
  button.addEventListener("click", () => askAndDo(action, at("queue").value));
  return button;
}

async function askAndDo({ deed, body, question }, queue) {
  if (!(await isSure(question))) {
    say(`${deed}: not done.`, "done");
    return;
  }
  try {
    const sent = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
    const { target, new_id: newId } = await ask(`queues/${encodeURIComponent(queue)}/${deed}`, sent);
    say(newId ? `Sent again as ${newId}.` : `${deed}: ${target} was told.`, "done");
  } catch (error) {
    say(`${deed}: ${error.message}`, "done");
  }
}

function isSure(question) {
  const dialog = at("sure");
  at("question").textContent = question;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

at("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, at("key").value);
  begin();
});
at("queue").addEventListener("change", () => {
  looks += 1;
  history = [];
  look();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && timer !== null) look();
});

at("key").value = sessionStorage.getItem(KEY) ?? "";
begin();
