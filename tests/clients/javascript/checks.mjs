// What all programs are asked, and how their checks are run. Each is started as `node NAME.mjs URL KEY`.
import assert from "node:assert/strict";
import { createInterface } from "node:readline";

export const [url, key] = process.argv.slice(2);
export const base = `${url}/v1`;
export const model = "chats";
export const question = "Is it noon?";
export const asked = [{ role: "user", content: question }];
export const noThinking = { chat_template_kwargs: { enable_thinking: false } };
export const cities = ["Oslo", "Rome"];
export const schema = {
  type: "object",
  properties: { city: { type: "string", enum: cities } },
  required: ["city"],
  additionalProperties: false,
};
const whole = 100; // more tokens than the answer has
export { assert };

// For programs without a place for fields of other servers: the model must not think, and draws the same each time.
export function fetchSeeded(place, init) {
  const body = init?.body ? JSON.stringify({ ...JSON.parse(init.body), seed: 5, ...noThinking }) : undefined;
  return fetch(place, { ...init, body });
}

// Has the harness do something; resolves once it has.
const said = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
async function have(what) {
  console.log("have:", what);
  assert.equal((await said.next()).value, "done");
}

const common = {
  async chat_and_stream({ ask, stream }) {
    const text = await ask(asked, whole);
    assert.ok(text);
    assert.equal(await stream(asked, whole), text);
  },
  async cut_and_continued({ ask }) {
    const [text, cut] = [await ask(asked, whole), await ask(asked, 5)];
    assert.ok(text.startsWith(cut) && cut.length < text.length, cut);
    const turns = [...asked, { role: "assistant", content: cut }, { role: "user", content: "Go on." }];
    assert.ok(await ask(turns, 40));
  },
  async worker_killed({ ask, stream }) {
    const text = await ask(asked, whole);
    await have("worker killed");
    assert.equal(await stream(asked, whole), text);
    await have("looked");
  },
  async gateway_killed({ ask }) {
    const text = await ask(asked, whole);
    await have("gateway killed");
    assert.equal(await ask(asked, whole), text);
    await have("looked");
  },
};

// `apis`: by name, what a program's call of an API returns as text, in one piece (`ask`, with its own retries) and
// joined (`stream`), for turns and a number of tokens; and whether an answer that was cut is an error (`refusesCut`).
// Each goes through the checks of every program, then come `checks`.
export async function run(apis, checks) {
  for (const [name, check] of Object.entries(common)) {
    const taking = Object.keys(apis).filter((each) => check !== common.cut_and_continued || !apis[each].refusesCut);
    for (const each of taking) await check(apis[each]);
    console.log("passed:", name, taking.length === Object.keys(apis).length ? "" : `(${taking.join(", ")})`);
  }
  for (const [name, check] of Object.entries(checks)) {
    await check();
    console.log("passed:", name);
  }
  console.log("apis:", Object.keys(apis).join(", "));
  process.stdin.destroy();
}
