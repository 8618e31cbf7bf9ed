// The page to chat on: what is typed becomes requests, and what comes back is shown and kept in the browser.

import { newElement } from "./elements.mjs";
import { ChatHistory, titleOf } from "./history.mjs";
import { newAnswerItem, newItem, perFrame } from "./messages.mjs";
import {
  addTo, answeredOf, askedOf, curlOf, EventReader, failureOf, FieldError, messageOf, newAnswer, NO_WORKER, requestOf, speedOf,
} from "./requests.mjs";

const FIELDS = ["model", "system", "temperature", "top_p", "max_tokens", "seed", "more"];
const KEY = "penstock-api-key";

const at = (id) => document.getElementById(id);
const urlOf = (path) => new URL(path, document.baseURI).href;
const CHAT = urlOf("v1/chat/completions");

const history = new ChatHistory(browserStorage());
let chat = newChat();
let running = null; // the AbortController of the answer that comes
let timesForgotten = 0;

function newChat() {
  return { id: `${Date.now()}-${Math.random()}`, model: "", system: "", messages: [] };
}

function browserStorage() {
  try {
    return localStorage;
  } catch {
    return null; // cookies are blocked
  }
}

// What is in the form. Browsers give what they cannot read as a number as nothing.
function fields() {
  const unread = FIELDS.find((name) => at(name).validity.badInput);
  if (unread) throw new FieldError(unread, "This is no number.");
  return Object.fromEntries(FIELDS.map((name) => [name, at(name).value]));
}

function headers() {
  const key = at("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

// Says at once whether there is a model to ask; what stands in the way is said at its field.
async function loadModels() {
  const chosen = at("model").value || chat.model;
  let ids = [];
  try {
    const response = await reach("v1/models", { headers: headers() });
    ids = (await response.json()).data.map(({ id }) => id);
    tell(ids.length ? null : new FieldError("model", NO_WORKER));
  } catch (error) {
    tell(error);
  }
  at("model").replaceChildren(...ids.map((id) => new Option(id, id, false, id === chosen)));
  showRequest();
  return ids.length > 0;
}

async function reach(path, options) {
  let response;
  try {
    response = await fetch(urlOf(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The gateway cannot be reached.");
  }
  if (!response.ok) throw failureOf(response.status, await response.text(), at("key").value.trim() !== "");
  return response;
}

// Says what is wrong at its field, or below the messages. Null: nothing is.
function tell(error) {
  for (const name of [...FIELDS, "key"]) sayAt(name, name === error?.field ? error.message : "");
  say(error === null || error.field ? "" : error.message, "trouble");
}

function sayAt(name, text) {
  const field = at(name);
  let note = field.parentElement.querySelector(".problem");
  if (note === null) {
    note = newElement("small", { className: "problem", role: "alert" });
    field.parentElement.append(note);
  }
  note.textContent = text;
  note.hidden = text === "";
  field.setAttribute("aria-invalid", String(text !== ""));
}

function say(text, kind = "") {
  at("status").textContent = text;
  at("status").dataset.kind = kind;
}

function showRequest() {
  const typed = at("text").value;
  const messages = answeredOf(chat.messages);
  try {
    const body = requestOf(fields(), typed ? [...messages, { role: "user", content: typed }] : messages);
    at("json").textContent = `POST ${CHAT}\n\n${JSON.stringify(body, null, 2)}`;
    at("curl").textContent = curlOf(CHAT, body, at("key").value.trim() !== "");
  } catch (error) {
    at("json").textContent = at("curl").textContent = error.message;
  }
}

function showChat() {
  at("messages").replaceChildren();
  for (const { role, content, reasoning = "", tool_calls: calls = [], note = "" } of chat.messages) {
    if (role === "user") newItem(at("messages"), "user", content);
    else newAnswerItem(at("messages")).end({ text: content, reasoning, calls }, note);
  }
  showState();
}

// What can be done now, and which chats there are.
function showState() {
  const isNew = chat.messages.length === 0;
  at("begin").hidden = !isNew;
  at("stop").disabled = running === null;
  at("send").disabled = running !== null;
  at("retry").disabled = running !== null || isNew;
  const chats = history.chats();
  const shown = isNew || !chats.some(({ id }) => id === chat.id) ? [chat, ...chats] : chats;
  at("chats").replaceChildren(
    ...shown.map((each) => new Option(each.messages.length ? titleOf(each) : "New chat", each.id, false, each.id === chat.id)),
  );
  at("forget").disabled = chats.length === 0;
  showRequest();
}

async function read(body, onEvent, onPrefill) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader(onPrefill);
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const data of events.feed(value)) onEvent(data);
  }
}

async function ask(body, signal) {
  const answer = newAnswer();
  const item = newAnswerItem(at("messages"));
  const show = perFrame(() => item.show(answer));
  const askedAt = performance.now();
  let firstAt = null;
  let failure = null;
  try {
    const sent = { method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body), signal };
    const response = await reach(CHAT, sent);
    await read(response.body, (data) => {
      addTo(answer, data);
      if (firstAt === null && messageOf(answer) !== null) firstAt = performance.now();
      show();
    }, item.tellPrefill);
    if (!answer.isWhole) throw new Error("the connection broke before the end of the answer");
  } catch (error) {
    failure = error;
  }
  const message = messageOf(answer);
  const note = signal.aborted ? "stopped" : speedOf(answer, askedAt, firstAt, performance.now());
  item.end(answer, message === null && !signal.aborted ? null : note);
  return { message: message && { ...message, note }, failure: signal.aborted ? null : failure };
}

// The body of a request. Null: something is missing, which is said at its field, or something else is under way.
async function bodyFor(messages) {
  const asked = chat;
  if (running !== null) return null;
  if (at("model").value === "" && !(await loadModels())) return null;
  if (running !== null || chat !== asked) return null;
  try {
    const body = requestOf(fields(), messages);
    tell(null);
    return body;
  } catch (error) {
    tell(error);
    at(error.field).focus();
    return null;
  }
}

async function send() {
  const text = at("text").value;
  if (text.trim() === "") return;
  const messages = [...answeredOf(chat.messages), { role: "user", content: text }];
  const body = await bodyFor(messages);
  if (body === null) return;
  at("text").value = "";
  await answer(messages, body);
}

async function retry() {
  const messages = askedOf(chat.messages);
  const body = await bodyFor(messages);
  if (body !== null) await answer(messages, body);
}

// Whoever opens another chat meanwhile finds what came so far in this one.
async function answer(messages, body) {
  const [mine, forgotten, controller] = [chat, timesForgotten, new AbortController()];
  running = controller;
  Object.assign(mine, { model: at("model").value, system: at("system").value, messages });
  keep(mine);
  showChat();
  const { message, failure } = await ask(body, controller.signal);
  if (message !== null) mine.messages = [...messages, message];
  if (forgotten === timesForgotten) keep(mine);
  if (running !== controller) return;
  running = null;
  showState();
  if (failure === null) return;
  if (failure.field) tell(failure);
  else newItem(at("messages"), "error", failure.message);
}

function keep(kept) {
  if (!history.keep(kept)) say("This browser has no space for the chat: it is gone when the page is closed.");
}

function openChat(opened) {
  running?.abort();
  running = null;
  chat = opened;
  at("system").value = chat.system;
  if ([...at("model").options].some(({ value }) => value === chat.model)) at("model").value = chat.model;
  tell(null);
  showChat();
}

function forget() {
  if (!confirm("Delete all chats that this browser keeps?")) return;
  timesForgotten += 1;
  history.clear();
  openChat(newChat());
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
at("retry").addEventListener("click", retry);
at("fresh").addEventListener("click", () => openChat(newChat()));
at("forget").addEventListener("click", forget);
at("chats").addEventListener("change", ({ target }) => openChat(history.chats().find(({ id }) => id === target.value) ?? newChat()));
at("begin").addEventListener("click", ({ target }) => {
  if (target.tagName !== "BUTTON") return;
  at("text").value = target.textContent;
  send();
});
addEventListener("storage", showState); // another tab has written
at("reload").addEventListener("click", loadModels);
at("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, at("key").value);
  loadModels();
});
document.addEventListener("input", showRequest);

at("key").value = sessionStorage.getItem(KEY) ?? "";
openChat(history.chats()[0] ?? newChat());
loadModels();
