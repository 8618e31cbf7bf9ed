// What the page sends and how it reads what comes back. Nothing here knows the page: node runs it in the tests.

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

// What is wrong with a field of the form, or with what the gateway says about it.
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

// The body of a request. `fields` has what is in the form, as text. Throws an Error that says what is wrong.
export function requestOf(fields, messages) {
  const body = { model: fields.model, messages: [], stream: true, stream_options: { include_usage: true } };
  if (fields.system) body.messages.push({ role: "system", content: fields.system });
  for (const { note: _, ...message } of messages) body.messages.push(message); // a note is the page's own
  for (const name of NUMBERS) {
    if (fields[name].trim() === "") continue;
    const number = Number(fields[name]);
    if (!Number.isFinite(number)) throw new FieldError(name, `${fields[name]} is no number`);
    body[name] = number;
  }
  return { ...body, ...moreOf(fields.more) };
}

function moreOf(text) {
  if (text.trim() === "") return {};
  let more;
  try {
    more = JSON.parse(text);
  } catch (error) {
    throw new FieldError("more", error.message);
  }
  if (more === null || typeof more !== "object" || Array.isArray(more)) throw new FieldError("more", "This is no JSON object.");
  if ("stream" in more && more.stream !== true) throw new FieldError("more", "This page reads streams only.");
  return more;
}

export const NO_WORKER = "No worker serves a model yet. Start one, then reload the models.";
const OF_MODEL = {
  no_worker: "No worker serves this model now. Start one, or reload the models.",
  model_not_found: "This model is not served, or not for this key. Reload the models.",
};

// The error of an answer that is none, at the field that it is about.
export function failureOf(status, text, hasKey) {
  let error;
  try {
    ({ error } = JSON.parse(text));
  } catch {
    error = null;
  }
  if (status === 401 && !hasKey) return new FieldError("key", "This gateway needs an API key. `penstock keys create` makes one.");
  if (typeof error?.message !== "string") return new Error(`${status} ${text.slice(0, 200)}`);
  if (status === 401) return new FieldError("key", error.message);
  if (error.code in OF_MODEL) return new FieldError("model", OF_MODEL[error.code]);
  if (["model", ...NUMBERS].includes(error.param)) return new FieldError(error.param, error.message);
  return new Error(error.message);
}

// A chat up to its last answer. A question that got none is left out: templates refuse two in a row.
export function answeredOf(messages) {
  return messages.at(-1)?.role === "user" ? messages.slice(0, -1) : messages;
}

// A chat up to its last question, which is to be answered anew.
export function askedOf(messages) {
  return messages.slice(0, messages.findLastIndex(({ role }) => role === "user") + 1);
}

// The same as a command. A key is taken from the environment, so that it ends up in no history.
export function curlOf(url, body, hasKey) {
  const lines = [`curl --no-buffer ${quoted(url)}`, `-H 'Content-Type: application/json'`];
  if (hasKey) lines.push('-H "Authorization: Bearer $PENSTOCK_API_KEY"');
  lines.push(`--data-raw ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

// Server-sent events, as the HTML standard has them, out of text that comes in pieces, cut anywhere.
export class EventReader {
  #rest = "";
  #data = [];
  #endedWithCR = false;
  #onPrefill;

  // `onPrefill` is called where a comment says how many tokens of a long prompt are computed, and of how many.
  constructor(onPrefill = () => {}) {
    this.#onPrefill = onPrefill;
  }

  // The data of the events that are complete with this piece.
  feed(piece) {
    if (this.#endedWithCR && piece.startsWith("\n")) piece = piece.slice(1);
    this.#endedWithCR = piece.endsWith("\r");
    const lines = (this.#rest + piece).split(/\r\n|\r|\n/);
    this.#rest = lines.pop();
    return lines.flatMap((line) => this.#line(line));
  }

  #line(line) {
    if (line === "") {
      const data = this.#data.splice(0);
      return data.length ? [data.join("\n")] : [];
    }
    const prefill = /^: prefill (\d+)\/(\d+)$/.exec(line);
    if (prefill !== null) this.#onPrefill(Number(prefill[1]), Number(prefill[2]));
    if (line === "data") this.#data.push("");
    else if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    return [];
  }
}

// An answer while it comes. `end` is why it ended, `usage` what it took.
export function newAnswer() {
  return { text: "", reasoning: "", calls: [], end: null, usage: null, isWhole: false };
}

// Adds the data of one event. Throws an Error where that says that something went wrong.
export function addTo(answer, data) {
  if (data === "[DONE]") {
    answer.isWhole = true;
    return;
  }
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message ?? "the answer broke off");
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.find((each) => each.index === 0);
  if (choice === undefined) return;
  answer.text += choice.delta?.content ?? "";
  answer.reasoning += choice.delta?.reasoning ?? "";
  for (const call of choice.delta?.tool_calls ?? []) addCall(answer.calls, call);
  if (choice.finish_reason) answer.end = choice.finish_reason;
}

function addCall(calls, { index, id, function: { name, arguments: part = "" } }) {
  calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
  calls[index].function.arguments += part;
}

// As a message for the next request. Null: there is nothing in it.
export function messageOf(answer) {
  if (!answer.text && !answer.reasoning && !answer.calls.length) return null;
  const message = { role: "assistant", content: answer.text };
  if (answer.reasoning) message.reasoning = answer.reasoning;
  if (answer.calls.length && answer.end === "tool_calls") message.tool_calls = answer.calls;
  return message;
}

// How fast it was: times in milliseconds, of the question, the first token and the end.
export function speedOf(answer, askedAt, firstAt, endedAt) {
  const parts = [];
  if (firstAt !== null) parts.push(`first token after ${Math.round(firstAt - askedAt)} ms`);
  const numTokens = answer.usage?.completion_tokens;
  if (numTokens !== undefined) {
    parts.unshift(`${numTokens} tokens`);
    if (numTokens > 1 && endedAt > firstAt) parts.push(`${((1000 * (numTokens - 1)) / (endedAt - firstAt)).toFixed(1)} tokens/s`);
  }
  if (answer.end) parts.push(answer.end);
  return parts.join(", ");
}
