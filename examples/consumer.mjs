// Sends a prompt and prints the reply as it is written: Node without any package, Redis spoken over a socket.
//
//   REDIS_URL=redis://localhost:6379 PENSTOCK_QUEUE=default node examples/consumer.mjs 'What is 12 + 30?' [field value ...]
//
// PENSTOCK_FIELD=messages takes a chat in place of a prompt, as JSON. The text goes to stdout, and so do tool calls, each
// on a line of its own at the end; reasoning goes to stderr.
import net from "node:net";
import tls from "node:tls";

const url = new URL(process.env.REDIS_URL ?? "redis://localhost:6379");
const queue = process.env.PENSTOCK_QUEUE ?? "default";
const field = process.env.PENSTOCK_FIELD ?? "prompt";
const [prompt = "What is 12 + 30?", ...more] = process.argv.slice(2);

const options = { host: url.hostname || "localhost", port: Number(url.port || 6379), servername: url.hostname };
const socket = url.protocol === "rediss:" ? tls.connect(options) : net.connect(options);
const answers = parseAnswers(socket);

async function redis(...parts) {
  const command = parts.map((part) => `$${Buffer.byteLength(String(part))}\r\n${part}\r\n`).join("");
  socket.write(`*${parts.length}\r\n${command}`);
  const { value, done } = await answers.next();
  if (done) throw new Error("the connection was closed");
  if (value instanceof Error) throw value;
  return value;
}

// The Redis protocol: +text, -error, :integer, $length of a string that follows, *length of an array that follows.
async function* parseAnswers(stream) {
  let data = Buffer.alloc(0);
  for await (const piece of stream) {
    data = Buffer.concat([data, piece]);
    for (let parsed; (parsed = parse(data, 0)); data = data.subarray(parsed.next)) yield parsed.value;
  }
}

function parse(data, at) {
  const lineEnd = data.indexOf("\r\n", at);
  if (lineEnd < 0) return null; // more is on its way
  const kind = String.fromCharCode(data[at]);
  const line = data.toString("utf8", at + 1, lineEnd);
  let next = lineEnd + 2;
  if (kind === "-") return { value: new Error(line), next };
  if (kind === "+" || kind === ":") return { value: line, next };
  const length = Number(line);
  if (length < 0) return { value: null, next };
  if (kind === "$") {
    if (data.length < next + length + 2) return null;
    return { value: data.toString("utf8", next, next + length), next: next + length + 2 };
  }
  const items = [];
  while (items.length < length) {
    const item = parse(data, next);
    if (!item) return null;
    items.push(item.value);
    next = item.next;
  }
  return { value: items, next };
}

function show(chunk) {
  process.stderr.write(chunk.reasoning ?? "");
  process.stdout.write(chunk.text);
  for (const part of JSON.parse(chunk.tool_calls ?? "[]")) {
    const key = `${chunk.index}/${part.index}`;
    if (part.id) calls.set(key, part);
    else calls.get(key).arguments += part.arguments;
  }
}

const toObject = (pairs) => Object.fromEntries(pairs.flatMap((_, at) => (at % 2 ? [] : [[pairs[at], pairs[at + 1]]])));

if (url.password) {
  const user = url.username ? [decodeURIComponent(url.username)] : [];
  await redis("AUTH", ...user, decodeURIComponent(url.password));
}
if (url.pathname.length > 1) await redis("SELECT", url.pathname.slice(1));

const id = await redis("XADD", `penstock:{${queue}}:requests`, "*", field, prompt, ...more);
const reply = `penstock:${queue}:{${id}}:reply`;
let last = "0-0";
let end = null;
const calls = new Map(); // by choice and index: parts are joined, the first one has the name
while (!end) {
  const streams = await redis("XREAD", "BLOCK", 5000, "STREAMS", reply, last);
  for (const [entryId, pairs] of streams?.[0][1] ?? []) {
    const entry = toObject(pairs);
    if (entry.type === "chunk") show(entry);
    if (entry.type === "end") end = entry;
    last = entryId;
  }
}
process.stdout.write("\n");
for (const { name, arguments: text } of calls.values()) console.log(`${name}(${text})`);
console.error(end.finish_reason, end.code ?? "", end.message ?? "");
process.exitCode = end.finish_reason === "error" ? 1 : 0;
socket.end();
