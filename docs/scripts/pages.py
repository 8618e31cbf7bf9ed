"""The project's pages as parsed Markdown: headings, links, code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")
_LINKING = ("href", "src", "srcset", "id", "name")


@dataclass(frozen=True, slots=True)
class Link:
    line: int  # where its paragraph begins, from 1
    target: str


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced or indented block of code; `language` is empty if it names none."""

    line: int
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of a table: its text, and the inline code in it."""

    text: str
    codes: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    path: Path
    tokens: tuple[Token, ...]

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def anchors(self) -> frozenset[str]:
        """Anchors that GitHub makes of headings, and those in HTML."""
        found = {value for _, key, value in self._html() if key in ("id", "name")}
        earlier: Counter[str] = Counter()
        for opening, inline in pairwise(self.tokens):
            if opening.type == "heading_open":
                name = _NOT_IN_ANCHORS.sub("", _text(inline).lower()).replace(" ", "-")
                found.add(f"{name}-{earlier[name]}" if earlier[name] else name)
                earlier[name] += 1
        return frozenset(found)

    @property
    def links(self) -> list[Link]:
        """Links of text and of images, written as Markdown or as HTML."""
        found = [Link(line, value) for line, key, value in self._html() if key in ("href", "src", "srcset")]
        for line, token in self._inline():
            target = token.attrGet({"link_open": "href", "image": "src"}.get(token.type, ""))
            if target is not None:
                found.append(Link(line, str(target)))
        return found

    @property
    def blocks(self) -> list[Block]:
        kinds = ("fence", "code_block")
        return [
            Block(line_of(token), token.info.strip(), token.content) for token in self.tokens if token.type in kinds
        ]

    @property
    def spans(self) -> list[Link]:
        """Inline code."""
        return [Link(line, token.content) for line, token in self._inline() if token.type == "code_inline"]

    def table(self, heading: str) -> list[list[Cell]]:
        """Returns the rows of the first table under a heading, without the header row."""
        at = next(i for i, token in enumerate(self.tokens) if token.type == "inline" and _text(token) == heading)
        begin = next(i for i in range(at, len(self.tokens)) if self.tokens[i].type == "tbody_open")
        end = next(i for i in range(begin, len(self.tokens)) if self.tokens[i].type == "tbody_close")
        rows: list[list[Cell]] = []
        for token in self.tokens[begin:end]:
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline":
                codes = tuple(child.content for child in token.children or () if child.type == "code_inline")
                rows[-1].append(Cell(_text(token), codes))
        return rows

    def printed_after(self, block: Block) -> str:
        """Returns the indented block right after a fenced one: the output of its code."""
        at = next(i for i, token in enumerate(self.tokens) if token.type == "fence" and line_of(token) == block.line)
        behind = self.tokens[at + 1]
        if behind.type != "code_block":
            raise ValueError(f"{self}:{block.line} does not say what it prints")
        return behind.content

    def _inline(self) -> Iterator[tuple[int, Token]]:
        for token in self.tokens:
            for child in token.children or ():
                yield line_of(token), child

    def _html(self) -> Iterator[tuple[int, str, str]]:
        pieces = [(line_of(token), token.content) for token in self.tokens if token.type == "html_block"]
        pieces += [(line, token.content) for line, token in self._inline() if token.type == "html_inline"]
        for line, text in pieces:
            reader = _Attributes()
            reader.feed(text)
            for key, value in reader.found:
                yield line, key, value


class _Attributes(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(key, value) for key, value in attrs if key in _LINKING and value]


def line_of(token: Token) -> int:
    return 1 + (token.map[0] if token.map is not None else 0)


def _text(inline: Token) -> str:
    return "".join(child.content for child in inline.children or ())


@cache
def page(name: str) -> Page:
    """Returns a page by its path from the root."""
    path = ROOT / name
    return Page(path, tuple(_MARKDOWN.parse(path.read_text())))


def all_pages() -> list[str]:
    """Returns the pages for people: those of the root, of docs/ and its folders, and those beside their subject."""
    found = [*ROOT.glob("*.md")]
    folders = ("docs", "deploy", "examples", "benchmarks", "tests")
    found += [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)
