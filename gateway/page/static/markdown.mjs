// The part of Markdown that models write, as a tree of plain objects. What is not Markdown here is text, HTML as well.
// Whatever the text, the work grows with its length alone: each step looks ahead by a bounded part or once.

const MAX_DEPTH = 8; // of lists in lists; and twice that of emphasis in emphasis

const FENCE = /^[ \t]*(`{3,}|~{3,})(?![`~])([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+([^]*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:([ \t]+)([^]*)|$)/;

// Blocks: a paragraph or heading with spans, code with a language, a list with items of blocks, a rule.
export function blocksOf(text) {
  return blocksIn(text.split(/\r\n|\r|\n/), 0);
}

function blocksIn(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const read = line.trim() === "" ? skip : FENCE.test(line) ? code : HEADING.test(line) ? heading : RULE.test(line) ? rule
      : depth < MAX_DEPTH && ITEM.test(line) ? list : paragraph;
    const [block, next] = read(lines, at, depth);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

const skip = (_, at) => [null, at + 1];
const rule = (_, at) => [{ kind: "rule" }, at + 1];

function heading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]);
  return [{ kind: "heading", level: marks.length, spans: spansOf(text.trim()) }, at + 1];
}

// A fence that nothing closes goes on to the end: so it looks while it comes.
function code(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]);
  const indent = indentOf(lines[at]);
  const text = [];
  let next = at + 1;
  for (; next < lines.length && !closes(lines[next], fence); next += 1) text.push(dedented(lines[next], indent));
  return [{ kind: "code", language: info.trim().split(/\s/, 1)[0], text: text.join("\n") }, next + 1];
}

function closes(line, fence) {
  const bare = line.trim();
  return bare.length >= fence.length && bare === fence[0].repeat(bare.length);
}

// Items with marks of one kind. Lines of an item are indented, or go on with its paragraph.
function list(lines, at, depth) {
  const isOrdered = (mark) => /\d/.test(mark);
  const first = ITEM.exec(lines[at])[2];
  const items = [];
  let next = at;
  for (;;) {
    let sought = next;
    while (sought < lines.length && lines[sought].trim() === "") sought += 1;
    const found = sought < lines.length && !RULE.test(lines[sought]) && ITEM.exec(lines[sought]);
    if (!found || isOrdered(found[2]) !== isOrdered(first)) break;
    const [item, end] = itemLines(lines, sought, found);
    items.push(blocksIn(item, depth + 1));
    next = end;
  }
  return [{ kind: "list", start: isOrdered(first) ? parseInt(first, 10) : null, items }, next];
}

function itemLines(lines, at, [, before, mark, space = " ", text = ""]) {
  const outer = indentOf(before);
  const inner = outer + mark.length + (space.length > 4 ? 1 : space.length);
  const item = [text];
  let next = at + 1;
  let blank = 0; // lines that belong to the item only if something of it follows
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (line.trim() === "") blank += 1;
    else {
      const isInside = indentOf(line) >= Math.min(inner, outer + 2);
      if (!isInside && (blank || startsBlock(line) || ITEM.test(line))) break;
      for (; blank > 0; blank -= 1) item.push("");
      item.push(dedented(line, inner));
    }
  }
  return [item, next - blank];
}

function paragraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && lines[next].trim() !== "" && !startsBlock(lines[next])) next += 1;
  return [{ kind: "paragraph", spans: spansOf(lines.slice(at, next).join("\n").trimEnd()) }, next];
}

// Whether it ends a paragraph. A number does so only as the first of a list: years begin lines, too.
function startsBlock(line) {
  const item = ITEM.exec(line);
  const isItem = item !== null && (item[4] ?? "") !== "" && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return isItem || FENCE.test(line) || HEADING.test(line) || RULE.test(line);
}

function indentOf(line) {
  let width = 0;
  for (const character of line) {
    if (character === " ") width += 1;
    else if (character === "\t") width += 4 - (width % 4);
    else break;
  }
  return width;
}

function dedented(line, width) {
  const kept = Math.max(0, indentOf(line) - width);
  return " ".repeat(kept) + line.replace(/^[ \t]+/, "");
}

const ESCAPE = /\\([!-/:-@[-`{-~])/y;
const TARGET = /\]\(([^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)?)(?:[ \t]+"[^"\n]*")?\)/y;
const BARE_LINK = /https?:\/\/[^\s<>"[\]`*]{1,2000}/y;
const TEXT = /[^\\`*_[\]!h]+/y;

// Spans: text and code; strong, em and links, which have spans of their own.
export function spansOf(text) {
  return new SpanReader(text).read();
}

class SpanReader {
  #text;
  #at = 0;
  #open = [{ mark: "", spans: [] }]; // what has begun, the outermost first
  #ticks = new Map(); // the length of runs of backticks, to where those begin that are not yet passed

  constructor(text) {
    this.#text = text;
    for (const { 0: { length }, index } of text.matchAll(/`+/g)) {
      if (!this.#ticks.has(length)) this.#ticks.set(length, []);
      this.#ticks.get(length).push(index);
    }
    for (const places of this.#ticks.values()) places.reverse();
  }

  read() {
    while (this.#at < this.#text.length) this.#step();
    while (this.#open.length > 1) this.#giveUp();
    return this.#open[0].spans;
  }

  #step() {
    const character = this.#text[this.#at];
    const found = this.#match(TEXT);
    if (found) this.#add(found[0]);
    else if (character === "\\") this.#add(this.#match(ESCAPE)?.[1] ?? this.#take(1));
    else if (character === "`") this.#code();
    else if (character === "*" || character === "_") this.#emphasis(character);
    else if (character === "[") this.#begin(this.#take(1));
    else if (character === "!" && this.#text[this.#at + 1] === "[") this.#begin(this.#take(2)); // a picture is shown as a link
    else if (character === "]") this.#link();
    else this.#bareLink();
  }

  #match(pattern) {
    pattern.lastIndex = this.#at;
    const found = pattern.exec(this.#text);
    if (found) this.#at += found[0].length;
    return found;
  }

  #take(length) {
    this.#at += length;
    return this.#text.slice(this.#at - length, this.#at);
  }

  #add(text) {
    const { spans } = this.#open.at(-1);
    const last = spans.at(-1);
    if (last?.kind === "text") last.text += text;
    else if (text) spans.push({ kind: "text", text });
  }

  #runLength(character) {
    let end = this.#at;
    while (this.#text[end] === character) end += 1;
    return end - this.#at;
  }

  #code() {
    const length = this.#runLength("`");
    const places = this.#ticks.get(length);
    while (places.length && places.at(-1) <= this.#at) places.pop();
    if (!places.length) return this.#add(this.#take(length));
    const inner = this.#text.slice(this.#at + length, places.at(-1)).replaceAll("\n", " ");
    const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    this.#open.at(-1).spans.push({ kind: "code", text: isPadded ? inner.slice(1, -1) : inner });
    this.#at = places.at(-1) + length;
  }

  // A run of marks closes what it can, and begins what is left. An underscore inside of a word is one.
  #emphasis(character) {
    const before = this.#text[this.#at - 1] ?? " ";
    let length = this.#runLength(character);
    const after = this.#text[this.#at + length] ?? " ";
    const isWord = (each) => /[\p{L}\p{N}]/u.test(each);
    const isInWord = character === "_" && isWord(before) && isWord(after);
    const mayBegin = /\S/.test(after) && !isInWord && (character === "*" || !isWord(before));
    const mayEnd = /\S/.test(before) && !isInWord && (character === "*" || !isWord(after));
    this.#at += length;
    if (length > 3) return this.#add(character.repeat(length));
    while (mayEnd && length) {
      const place = this.#open.findLastIndex(({ mark }) => mark[0] === character && mark.length <= length);
      if (place < 1) break;
      length -= this.#open[place].mark.length;
      this.#end(place, { kind: this.#open[place].mark.length === 2 ? "strong" : "em" });
    }
    if (!mayBegin) return this.#add(character.repeat(length));
    if (length % 2) this.#begin(character);
    if (length > 1) this.#begin(character.repeat(2));
  }

  #begin(mark) {
    if (this.#open.length > 2 * MAX_DEPTH) this.#add(mark);
    else this.#open.push({ mark, spans: [] });
  }

  #end(place, span) {
    while (this.#open.length > place + 1) this.#giveUp();
    const { spans } = this.#open.pop();
    this.#open.at(-1).spans.push({ ...span, spans: span.kind === "link" ? withoutLinks(spans) : spans });
  }

  // What nothing ends is text.
  #giveUp() {
    const { mark, spans } = this.#open.pop();
    this.#add(mark);
    this.#addAll(spans);
  }

  #addAll(spans) {
    for (const span of spans) {
      if (span.kind === "text") this.#add(span.text);
      else this.#open.at(-1).spans.push(span);
    }
  }

  #link() {
    const place = this.#open.findLastIndex(({ mark }) => mark.endsWith("["));
    const start = this.#at;
    const target = place > 0 && this.#match(TARGET);
    const href = target ? hrefOf(target[1]) : null;
    if (href !== null) {
      this.#end(place, { kind: "link", href });
      return;
    }
    while (place > 0 && this.#open.length > place) this.#giveUp();
    this.#at = start;
    this.#add(target ? this.#take(target[0].length) : this.#take(1));
  }

  #bareLink() {
    const isInside = /\w/.test(this.#text[this.#at - 1] ?? "");
    BARE_LINK.lastIndex = this.#at;
    let shown = (!isInside && BARE_LINK.exec(this.#text)?.[0]) || "";
    while (/[.,;:!?')]$/.test(shown) && !(shown.endsWith(")") && shown.includes("("))) shown = shown.slice(0, -1);
    const href = shown && hrefOf(shown);
    const text = this.#take(href ? shown.length : 1);
    if (href) this.#open.at(-1).spans.push({ kind: "link", href, spans: [{ kind: "text", text }] });
    else this.#add(text);
  }
}

// The address of a link that may be followed: http and https, and nothing that runs or that is of this site.
function hrefOf(target) {
  if (!/^https?:[/]{2}/i.test(target)) return null;
  try {
    return new URL(target).href;
  } catch {
    return null;
  }
}

function withoutLinks(spans) {
  return spans.flatMap((span) => {
    const inner = span.spans && withoutLinks(span.spans);
    return span.kind === "link" ? inner : [inner ? { ...span, spans: inner } : span];
  });
}
