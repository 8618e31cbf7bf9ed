// Elements for what markdown.mjs reads. Text gets into them as text alone, so nothing in it is ever HTML.

import { blocksOf } from "./markdown.mjs";

export function newElement(tag, properties = {}, children = []) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const child of children) element.append(child); // one by one: a call has only so many arguments
  return element;
}

// Shows a text that grows in `place`. Blocks that stay as they were keep their elements, and so what is selected in them.
export class MarkdownView {
  #place;
  #shown = []; // the blocks as JSON

  constructor(place) {
    this.#place = place;
  }

  show(text) {
    const blocks = blocksOf(text);
    const wanted = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < wanted.length && wanted[same] === this.#shown[same]) same += 1;
    for (const element of [...this.#place.children].slice(same)) element.remove();
    for (const block of blocks.slice(same)) this.#place.append(elementOf(block));
    this.#shown = wanted;
  }
}

const BLOCKS = {
  rule: () => newElement("hr"),
  paragraph: ({ spans }) => newElement("p", {}, spans.map(nodeOf)),
  heading: ({ level, spans }) => newElement(`h${Math.min(6, level + 1)}`, {}, spans.map(nodeOf)),
  code: newCodeBlock,
  list: ({ start, items }) => {
    const shown = items.map((blocks) => newElement("li", {}, blocks.map(elementOf)));
    return start === null ? newElement("ul", {}, shown) : newElement("ol", { start }, shown);
  },
};

const SPANS = {
  text: ({ text }) => document.createTextNode(text),
  code: ({ text }) => newElement("code", { textContent: text }),
  strong: ({ spans }) => newElement("strong", {}, spans.map(nodeOf)),
  em: ({ spans }) => newElement("em", {}, spans.map(nodeOf)),
  link: ({ href, spans }) =>
    newElement("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, spans.map(nodeOf)),
};

function elementOf(block) {
  return BLOCKS[block.kind](block);
}

function nodeOf(span) {
  return SPANS[span.kind](span);
}

function newCodeBlock({ language, text }) {
  const pre = newElement("pre", { tabIndex: 0 }, [newElement("code", { textContent: text })]);
  const button = newElement("button", { type: "button", textContent: "Copy" });
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text, pre)) ? "Copied" : "Selected: press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  const header = newElement("header", {}, [newElement("span", { textContent: language }), button]);
  return newElement("figure", { className: "code" }, [header, pre]);
}

// Browsers give the clipboard to pages of HTTPS and of this machine alone. Elsewhere the code is selected, and copied if
// the browser still has the older way.
async function copied(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}
