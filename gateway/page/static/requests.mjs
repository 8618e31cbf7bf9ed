// What the page sends and how it reads what comes back. Nothing here knows the page: node runs it in the tests.

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

// The body of a request. `fields` has what is in the form, as text. Throws an Error that says what is wrong.
export function requestOf(fields, messages) {
  const body = { model: fields.model, messages: [], stream: true, stream_options: { include_usage: true } };
  if (fields.system) body.messages.push({ role: "system", content: fields.system });
  body.messages.push(...messages);
  for (const name of NUMBERS) {
    if (fields[name].trim() === "") continue;
    const number = Number(fields[name]);
    if (!Number.isFinite(number)) throw new Error(`${name} ${fields[name]} is no number`);
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
    throw new Error(`more fields: ${error.message}`);
  }
  if (more === null || typeof more !== "object" || Array.isArray(more)) throw new Error("more fields are no JSON object");
  if ("stream" in more && more.stream !== true) throw new Error("more fields: the page reads streams only");
  return more;
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
