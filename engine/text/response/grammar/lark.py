"""Writes a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from llguidance import regex_to_lark

from penstock.engine.text.response.syntax import is_inside

_ASCII_CLASSES = "dw"  # \d and \w, as in ECMAScript; \s has all white space there, too
ANY = "/(?s:.*)/"  # text of any kind and length; special tokens are not text


class GrammarWriter:
    """Collects rules. An expression is text in Lark's syntax; a rule's name is one."""

    def __init__(self, special_token_ids: Mapping[str, int]) -> None:
        """Starts a grammar. `special_token_ids` has the tokens that are not text, by their spelling."""
        self._special_token_ids = special_token_ids
        self._rules: dict[str, str] = {}  # head to body
        self._names: dict[str, str] = {}  # body to name
        self._grammars: list[dict[str, str]] = []
        self.num_chars = 0  # of all rules requested so far, repeated ones included

    def rule(self, body: str) -> str:
        return self._named("r", "", body)

    def lazy(self, body: str) -> str:
        """Adds a rule that ends as soon as it matches; its body is one lexeme."""
        return self._named("l", "[lazy]", body)

    def terminal(self, body: str) -> str:
        """Adds one lexeme."""
        return self._named("T", "", body)

    def json(self, schema: Mapping[str, object]) -> str:
        return self.rule(f"%json {json.dumps(schema)}")

    def forward(self) -> tuple[str, Callable[[str], None]]:
        """Adds a rule whose body may refer to it; returns its name and a function that sets the body."""
        name = f"f{len(self._names)}"
        self._names[name] = name  # no body equals a name
        return name, partial(self._rules.__setitem__, name)

    def lark(self, grammar: str) -> str:
        """Adds a grammar from elsewhere, with names of its own."""
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    def spell(self, pieces: Iterable[str]) -> str:
        """Returns text whose pieces are special tokens, or ordinary text that may have special tokens inside."""
        return sequence(self._spell(part) for piece in pieces for part in self._parts(piece))

    def is_special(self, piece: str) -> bool:
        return piece in self._special_token_ids

    def until(self, piece: str, text: str = ANY, gap: str = "") -> str:
        """Returns `text` up to and including the first `piece`; `gap` may come between them."""
        between = f"({literal(gap)})?" if gap else ""
        first, *rest = self._parts(piece)
        if self.is_special(first):
            return sequence([self.terminal(text), between, self.spell([piece])])
        if rest:  # text before a special token takes all there is, so what the piece begins with is a part of it
            return sequence([self.terminal(sequence([f"({text})", between, literal(first)])), self.spell(rest)])
        return self.lazy(sequence([self.terminal(text), between, literal(piece)]))

    def source(self, start: str) -> str:
        """Returns the whole grammar for llguidance: Lark text, or JSON if it includes grammars from elsewhere."""
        lines = [f"start: {start}", *(f"{head}: {body}" for head, body in self._rules.items())]
        main = "\n".join(lines) + "\n"
        if not self._grammars:
            return main
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self._grammars]})

    def _parts(self, piece: str) -> list[str]:
        """Splits a piece of syntax at the special tokens that it is, or has inside."""
        inside = [token for token in self._special_token_ids if token == piece or is_inside(token, piece)]
        if not inside or piece in inside:
            return [piece]
        pattern = "|".join(map(re.escape, sorted(inside, key=len, reverse=True)))
        return [part for part in re.split(f"({pattern})", piece) if part]

    def _spell(self, part: str) -> str:
        return f"<[{self._special_token_ids[part]}]>" if self.is_special(part) else literal(part)

    def _named(self, kind: str, options: str, body: str) -> str:
        self.num_chars += len(body)
        key = kind + body
        if key not in self._names:
            self._names[key] = f"{kind}{len(self._names)}"
            self._rules[self._names[key] + options] = body
        return self._names[key]


def literal(text: str) -> str:
    return json.dumps(text) if text else ""


def regex(pattern: str) -> str:
    """Returns a user's pattern as a regex that matches the whole text. Its classes are those of patterns in schemas."""
    return f"/{regex_to_lark(pattern, _ASCII_CLASSES)}/"


def without(part: str) -> str:
    """Returns text in which `part` does not occur."""
    return f"{ANY} & ~({ANY} {literal(part)} {ANY})"


def sequence(parts: Iterable[str]) -> str:
    return " ".join(part for part in parts if part)


def either(alternatives: Iterable[str]) -> str:
    return f"({' | '.join(alternatives)})"


def separated(writer: GrammarWriter, members: Sequence[tuple[str, bool]], separator: str, more: str = "") -> str:
    """Returns members in order, the optional ones present or not, followed by any number of `more`."""
    tail = f"({sequence([separator, more])})*" if more else ""
    whole = f"({sequence([more, tail])})?" if more else ""
    for member, is_required in reversed(members):
        with_it = sequence([member, tail])
        whole = with_it if is_required else either([with_it, whole]) if whole else f"({with_it})?"
        part = sequence([separator, member])
        tail = writer.rule(sequence([part if is_required else f"({part})?", tail]))
        whole = writer.rule(whole)
    return whole
