// The page: what is typed becomes requests, and what comes back is shown. All of it is text, and never HTML.

import { addTo, curlOf, EventReader, messageOf, newAnswer, requestOf, speedOf } from "./requests.mjs";

const FIELDS = ["model", "system", "temperature", "top_p", "max_tokens", "seed", "more"];
const KEY = "penstock-api-key";

const at = (id) => document.getElementById(id);
const urlOf = (path) => new URL(path, document.baseURI).href;
const CHAT = urlOf("v1/chat/completions");

let messages = [];
let running = null; // the AbortController of the answer that comes

function fields() {
  return Object.fromEntries(FIELDS.map((name) => [name, at(name).value]));
}

function headers() {
  const key = at("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function failureOf(response) {
  const text = await response.text();
  try {
    return new Error(JSON.parse(text).error.message);
  } catch {
    return new Error(`${response.status} ${text.slice(0, 200)}`);
  }
}

async function loadModels() {
  const chosen = at("model").value;
  try {
    const response = await fetch(urlOf("v1/models"), { headers: headers() });
    if (!response.ok) throw await failureOf(response);
    const { data } = await response.json();
    at("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
    say(data.length ? "" : "No worker serves a model yet.");
  } catch (error) {
    at("model").replaceChildren();
    say(error.message);
  }
  showRequest();
}

function say(text) {
  at("status").textContent = text;
}

function showRequest() {
  const typed = at("text").value;
  const shown = typed ? [...messages, { role: "user", content: typed }] : messages;
  try {
    const body = requestOf(fields(), shown);
    at("json").textContent = `POST ${CHAT}\n\n${JSON.stringify(body, null, 2)}`;
    at("curl").textContent = curlOf(CHAT, body, at("key").value.trim() !== "");
  } catch (error) {
    at("json").textContent = at("curl").textContent = error.message;
  }
}

function newItem(kind, text = "") {
  const item = document.createElement("li");
  item.className = kind;
  item.textContent = text;
  at("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

// An item that is written while its answer comes: reasoning folded, text, calls, and how fast it was.
function newAnswerItem() {
  const item = newItem("assistant");
  const [details, summary, reasoning, text, footer] = ["details", "summary", "div", "div", "footer"].map((tag) =>
    document.createElement(tag),
  );
  summary.textContent = "Reasoning";
  details.append(summary, reasoning);
  details.hidden = true;
  item.append(details, text, footer);
  return {
    show(answer) {
      const list = at("messages");
      const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      details.hidden = answer.reasoning === "";
      reasoning.textContent = answer.reasoning;
      const calls = answer.calls.map(({ function: { name, arguments: given } }) => `${name}(${given})`);
      text.textContent = [answer.text, ...calls].filter(Boolean).join("\n");
      if (isAtEnd) list.scrollTop = list.scrollHeight;
    },
    end(note) {
      footer.textContent = note;
    },
  };
}

// Shows an answer once per frame, however many chunks come in it.
function perFrame(show) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      show();
    });
  };
}

async function read(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const data of events.feed(value)) onEvent(data);
  }
}

async function ask(body, signal) {
  const answer = newAnswer();
  const item = newAnswerItem();
  const show = perFrame(() => item.show(answer));
  const askedAt = performance.now();
  let firstAt = null;
  let failure = null;
  try {
    const sent = { method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body), signal };
    const response = await fetch(CHAT, sent);
    if (!response.ok) throw await failureOf(response);
    await read(response.body, (data) => {
      addTo(answer, data);
      if (firstAt === null && messageOf(answer) !== null) firstAt = performance.now();
      show();
    });
    if (!answer.isWhole) throw new Error("the connection broke before the end of the answer");
  } catch (error) {
    failure = error;
  }
  item.show(answer);
  item.end(signal.aborted ? "stopped" : speedOf(answer, askedAt, firstAt, performance.now()));
  if (failure !== null && !signal.aborted) newItem("error", failure.message);
  return answer;
}

async function send() {
  const text = at("text").value;
  if (running !== null || text.trim() === "") return;
  let body;
  try {
    body = requestOf(fields(), [...messages, { role: "user", content: text }]);
  } catch (error) {
    say(error.message);
    return;
  }
  say("");
  messages.push({ role: "user", content: text });
  newItem("user", text);
  at("text").value = "";
  const controller = new AbortController();
  setRunning(controller);
  const answer = await ask(body, controller.signal);
  if (running !== controller) return; // a new chat has begun
  const message = messageOf(answer);
  if (message !== null) messages.push(message);
  else messages.pop(); // as if it had not been asked
  setRunning(null);
  showRequest();
}

function setRunning(controller) {
  running = controller;
  at("stop").disabled = controller === null;
  at("send").disabled = controller !== null;
}

function clear() {
  running?.abort();
  setRunning(null);
  messages = [];
  at("messages").replaceChildren();
  say("");
  showRequest();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", clear);
at("reload").addEventListener("click", loadModels);
at("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, at("key").value);
  loadModels();
});
document.addEventListener("input", showRequest);

at("key").value = sessionStorage.getItem(KEY) ?? "";
loadModels();
