// Tries the functions of the page under node: each line on stdin is `[name, ...arguments]`, each on stdout the result.

import { createInterface } from "node:readline";
import { MarkdownView } from "../../gateway/page/static/elements.mjs";
import { ChatHistory, titleOf } from "../../gateway/page/static/history.mjs";
import * as markdown from "../../gateway/page/static/markdown.mjs";
import * as page from "../../gateway/page/static/requests.mjs";
import * as tables from "../../gateway/page/static/tables.mjs";

// A document that only takes elements and text.
class Element {
  constructor(tag) {
    this.tag = tag;
    this.children = [];
  }
  append(...nodes) {
    for (const node of nodes) {
      node.parent = this;
      this.children.push(node);
    }
  }
  remove() {
    this.parent.children.splice(this.parent.children.indexOf(this), 1);
  }
  addEventListener() {}
  set innerHTML(_) {
    throw new Error("HTML");
  }
}
globalThis.document = { createElement: (tag) => new Element(tag), createTextNode: (text) => ({ text }) };

// A node as text, or as `[tag, href or class, ...children]`.
function plain({ tag, text, textContent, href, className, children }) {
  if (tag === undefined) return text;
  return [tag, href ?? className ?? "", ...(textContent === undefined ? children.map(plain) : [textContent])];
}

// A browser's storage with space for `size` characters.
function newStorage(size) {
  const kept = new Map();
  return {
    getItem: (key) => kept.get(key) ?? null,
    setItem(key, value) {
      if (value.length > size) throw new Error("full");
      kept.set(key, value);
    },
    removeItem: (key) => kept.delete(key),
  };
}

const functions = {
  ...page,
  ...tables,
  ...markdown,
  titleOf,
  // What a text becomes that comes in pieces.
  shown: (pieces) => {
    const place = new Element("div");
    const view = new MarkdownView(place);
    for (const end of pieces.keys()) view.show(pieces.slice(0, end + 1).join(""));
    return place.children.map(plain);
  },
  // How many blocks a pattern makes that is repeated until it is long.
  numBlocks: (pattern, length) => markdown.blocksOf(pattern.repeat(length / pattern.length)).length,
  // Whether each chat was kept, and those that are there afterwards. Without a size the browser has no storage.
  kept: (chats, size, stored = null) => {
    const storage = size === null ? null : newStorage(size);
    if (stored !== null) storage.setItem("penstock-chats", stored);
    const history = new ChatHistory(storage);
    const done = chats.map((chat) => history.keep(chat));
    const left = history.chats().map(({ id }) => id);
    history.clear();
    return { done, left, cleared: history.chats() };
  },
  failureOf: (...given) => {
    const { field, message } = page.failureOf(...given);
    return { field, message };
  },
  // The data of the events in pieces of text.
  events: (pieces) => {
    const reader = new page.EventReader();
    return pieces.flatMap((piece) => reader.feed(piece));
  },
  // How far a long prompt is, as comments in these pieces say.
  prefills: (pieces) => {
    const told = [];
    const reader = new page.EventReader((...prefill) => told.push(prefill));
    for (const piece of pieces) reader.feed(piece);
    return told;
  },
  // An answer and its message, out of the data of events.
  answer: (datas) => {
    const answer = page.newAnswer();
    for (const data of datas) page.addTo(answer, data);
    return { ...answer, message: page.messageOf(answer) };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...given] = JSON.parse(line);
  try {
    console.log(JSON.stringify(functions[name](...given)));
  } catch (error) {
    console.log(JSON.stringify({ error: error.message }));
  }
}
