// What all programs are asked, and how their checks are run. Each is started as `node NAME.mjs URL`.
import assert from "node:assert/strict";

export const url = process.argv[2];
export const base = `${url}/v1`;
export const model = "chats";
export const key = "none";
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
export { assert };

// For programs without a place for fields of other servers: the model must not think, and draws the same each time.
export function fetchSeeded(place, init) {
  const body = init?.body ? JSON.stringify({ ...JSON.parse(init.body), seed: 5, ...noThinking }) : undefined;
  return fetch(place, { ...init, body });
}

export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    await check();
    console.log("passed:", name);
  }
}
