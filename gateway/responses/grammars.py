"""Converts Lark grammars of custom tools to regular expressions.

A custom tool's text is a string in a call's arguments, which each model's format spells in its own way. Workers hold
such a string to a regular expression in all formats, but not to a grammar. A grammar without recursive rules has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

MAX_CHARS = 65_536
"""Longest expression: rules that are used often make it longer than the grammar."""


class NotRegular(ValueError):
    """A grammar has a recursive rule, or something that has no regular expression here."""


@lru_cache(maxsize=64)
def regex_of(grammar: str) -> str | None:
    """Returns the regular expression of all texts that follow the grammar, from its rule `start`; None: it has none."""
    try:
        return _Grammar(grammar).named("start")
    except (NotRegular, RecursionError):
        return None


_COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "NUMBER": r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[a-zA-Z]", "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n", "NEWLINE": r"(\r?\n)+",
}  # fmt: skip
"""Lark's common terminals."""

_TOKEN = re.compile(
    r"""
    (?P<space> [^\S\n]+ | //[^\n]* | \n(?=\s*(\||//|\n)) )
    | (?P<line> \n)
    | (?P<text> "(?:[^"\\\n]|\\.)*"i? )
    | (?P<regex> /(?!/)(?:[^/\\\n]|\\.)+/[imslux]* )
    | (?P<name> [?!]*_*[A-Za-z][A-Za-z0-9_]* )
    | (?P<number> [0-9]+ )
    | (?P<mark> %[a-z]+ | -> | \.\. | [|()\[\]?*+~:.,] )
    """,
    re.VERBOSE,
)
_ENDS = frozenset({"", "|", ")", "]", "->"})  # of a sequence
_PAIRS: Mapping[str, str] = {"(": ")", "[": "]"}
_BEYOND = re.compile(r"\(\?[=!<]|\\[1-9]")  # lookaround and back references
_ESCAPES: Mapping[str, str] = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)")
_MEANING = re.compile(r"([\\.+*?()|\[\]{}^$/#&~-])")


class _Grammar:
    """The definitions of one grammar, read as they are referred to."""

    def __init__(self, grammar: str) -> None:
        self._bodies: dict[str, list[str]] = {}  # tokens by name
        self._made: dict[str, str] = {}  # expressions by name
        self._open: set[str] = set()  # names whose bodies are being read
        for line in _lines(grammar):
            self._define(line)

    def _define(self, line: list[str]) -> None:
        if line[0] == "%import":
            self._import(line[1:])
            return
        colon = line.index(":") if ":" in line else 0
        name = line[0].lstrip("?!")
        if colon not in (1, 3) or (colon == 3 and line[1] != ".") or name in self._bodies:  # 3: with a priority
            raise NotRegular(f"no rule: {' '.join(line)[:80]}")
        self._bodies[name] = line[colon + 1 :]

    def _import(self, given: list[str]) -> None:
        """Reads `common.NAME`, `common.NAME -> OTHER` or `common (NAME, OTHER)`."""
        if given[:1] != ["common"]:
            raise NotRegular("an import from elsewhere")
        if given[1:2] == ["("] and given[-1] == ")":
            names = {name: name for name in given[2:-1] if name != ","}
        elif len(given) == 3 or (len(given) == 5 and given[3] == "->"):
            names = {given[-1]: given[2]}
        else:
            raise NotRegular("an import of another form")
        for name, common in names.items():
            if common not in _COMMON:
                raise NotRegular(f"no such common terminal: {common}")
            self._made[name] = f"(?:{_COMMON[common]})"

    def named(self, name: str) -> str:
        """Returns the expression of a rule or terminal."""
        if name not in self._made:
            if name in self._open or name not in self._bodies:
                raise NotRegular(f"{name} is recursive, or not defined")
            self._open.add(name)
            self._made[name] = _bounded(f"(?:{_Body(self, self._bodies[name]).whole()})")
            self._open.remove(name)
        return self._made[name]


class _Body:
    """The body of one rule, read token by token."""

    def __init__(self, grammar: _Grammar, tokens: list[str]) -> None:
        self._grammar = grammar
        self._tokens = [*tokens, ""]
        self._at = 0

    def whole(self) -> str:
        made = self._alternatives()
        if self._next:
            raise NotRegular(f"unexpected {self._next}")
        return made

    @property
    def _next(self) -> str:
        return self._tokens[self._at]

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._next == "|":
            self._take()
            found.append(self._sequence())
        return "|".join(found)

    def _sequence(self) -> str:
        made = ""
        while self._next not in _ENDS:
            made = _bounded(made + self._repeated())
        if self._next == "->":
            self._at += 2
        return made

    def _repeated(self) -> str:
        atom = self._atom()
        if self._next in ("?", "*", "+"):
            return f"(?:{atom}){self._take()}"
        if self._next != "~":
            return atom
        self._take()
        least = self._number()
        if self._next != "..":
            return f"(?:{atom}){{{least}}}"
        self._take()
        return f"(?:{atom}){{{least},{self._number()}}}"

    def _number(self) -> int:
        if not self._next.isdigit() or len(self._next) > 4:
            raise NotRegular(f"no number of times: {self._next}")
        return int(self._take())

    def _atom(self) -> str:
        token = self._take()
        if token in _PAIRS:
            inner, closer = self._alternatives(), self._take()
            if closer != _PAIRS[token]:
                raise NotRegular(f"{token} is not closed")
            return f"(?:{inner}){'?' if closer == ']' else ''}"
        if token.startswith('"'):
            return self._range(token) if self._next == ".." else _text(token)
        if token.startswith("/"):
            return _pattern(token)
        if token[:1].isalpha() or token.startswith("_"):
            return self._grammar.named(token)
        raise NotRegular(f"unexpected {token}")

    def _range(self, first: str) -> str:
        self._take()
        ends = [_unescaped(token.strip('"')) for token in (first, self._take())]
        if any(len(end) != 1 for end in ends):
            raise NotRegular("a range of more than characters")
        return f"[{_escaped(ends[0])}-{_escaped(ends[1])}]"


def _lines(grammar: str) -> Iterator[list[str]]:
    """Yields the tokens of each definition. One that begins with `|` goes on with the line before."""
    at, line = 0, list[str]()
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise NotRegular(f"unexpected {grammar[at : at + 20]!r}")
        at = found.end()
        if found.lastgroup == "line" and line:
            yield line
            line = []
        elif found.lastgroup not in ("line", "space"):
            line.append(found.group())
    if line:
        yield line


def _text(token: str) -> str:
    body, _, flag = token[1:].rpartition('"')
    return f"(?{flag}:{_escaped(_unescaped(body))})" if flag else f"(?:{_escaped(_unescaped(body))})"


def _pattern(token: str) -> str:
    body, _, flags = token[1:].rpartition("/")
    if _BEYOND.search(body) or set(flags) - {*"ims"}:
        raise NotRegular("an expression that looks around, or back")
    return f"(?{flags}:{body})"


def _unescaped(text: str) -> str:
    def character(found: re.Match[str]) -> str:
        given = found[1]
        if given[0] in "xu" and len(given) > 1:
            return chr(int(given[1:], 16))
        return _ESCAPES.get(given, given if given in '"\\/' else found[0])

    return _ESCAPED.sub(character, text)


def _escaped(text: str) -> str:
    spelled = _MEANING.sub(r"\\\1", text)
    for name, character in _ESCAPES.items():
        spelled = spelled.replace(character, f"\\{name}")
    return spelled


def _bounded(expression: str) -> str:
    if len(expression) > MAX_CHARS:
        raise NotRegular(f"an expression of more than {MAX_CHARS} characters")
    return expression
