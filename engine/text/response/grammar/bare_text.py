"""Strings that a model writes without quotes and escapes, constrained by regular expressions from their schema."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.response.grammar.lark import ANY, either, literal, regex
from penstock.engine.text.response.grammar.schemas import FORMATS, LEAP_YEAR, Schema

_MONTH_AND_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"([1-9][0-9]{{3}}-{_MONTH_AND_DAY}|({LEAP_YEAR})-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9]([-a-zA-Z0-9]{0,30}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,4}}"
_PATH = "[-a-zA-Z0-9._~/=&+,;]{0,200}"
_USER = "[a-zA-Z0-9_+-]{1,30}"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([1-9][0-9]{0,4}D)?T[1-9][0-9]{0,4}[HMS]|P[1-9][0-9]{0,4}[YMWD]",
    "email": rf"{_USER}(\.{_USER}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"https?://{_HOST}(:[1-9][0-9]{{1,3}})?(/{_PATH}(\?{_PATH})?)?",
}
# Bare strings that would be read as another type.
OTHER_VALUES = (
    r"/\s*([-+0-9.eE]+|true|false|null|True|False|None)\s*/ "
    rf"| (/\s*[\[{{]/ | /\s*/ {literal(chr(34))}) {ANY}"
)
_NO_CONTROLS = r"/[^\x00-\x08\x0b\x0c\x0e-\x1f]*/"  # patterns disagree about these
_MAX_CHECKED = 16  # characters at the beginning of a string
_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)  # in which signs have no special meaning


def bare_text(schema: Schema, *, strict: bool, of: str) -> str:
    """Returns a lexeme of the strings that follow `schema`.

    Raises:
        InvalidRequest: `strict` is set and it can't be done; `of` says whose schema it is.
    """
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return either(literal(value) for value in values if isinstance(value, str))
    conditions = list(_conditions(schema, strict, of))
    return " & ".join([*conditions, _NO_CONTROLS]) if conditions else ANY


def text_before(tag: str, schema: Schema, *, strict: bool, of: str) -> str:
    """Returns a lexeme like `bare_text` for strings that end at the first `tag`. Grammars that use it read `tag`
    lazily.

    If the schema restricts more than the length, strings may not even contain the tag's first character: checking for
    the whole tag would cost milliseconds per token.
    """
    text = bare_text(schema, strict=strict, of=of)
    at_least = schema.get("minLength", 0)
    if schema.keys() & {"pattern", "format"} or at_least > _MAX_CHECKED:
        return f"({text}) & /[^{re.escape(tag[0])}]*/"
    return f"({text}) & ~(/(?s:.){{0,{at_least - 1}}}/ {literal(tag)} {ANY})" if at_least else text


def _conditions(schema: Schema, strict: bool, of: str) -> Iterator[str]:
    at_least, at_most = schema.get("minLength", 0), schema.get("maxLength", "")
    if at_least or at_most != "":
        yield f"/(?s:.){{{at_least},{at_most}}}/"
    for keyword, expression in (("format", _formatted), ("pattern", _searched)):
        if keyword in schema:
            condition = expression(schema[keyword])
            if condition is None and strict:
                raise InvalidRequest(f"{of}: {keyword} {schema[keyword]!r:.80} can't be held to in this model's format")
            if condition:
                yield condition


def _formatted(name: object) -> str | None:
    """Returns a format's condition, or None if it is unknown how. Formats outside all drafts have no effect."""
    if not isinstance(name, str) or name not in FORMATS:
        return ANY
    return regex(_PATTERNS[name]) if name in _PATTERNS else None


def _searched(pattern: object) -> str | None:
    """Returns text that contains `pattern`; None if an anchor is within the pattern or one of several alternatives."""
    inner = str(pattern)
    is_at_start, is_at_end = inner.startswith("^"), inner.endswith("$") and _ATOM.sub("", inner)[-1:] == "$"
    inner = inner[is_at_start : len(inner) - is_at_end]
    bare = _ATOM.sub("", inner)
    if "^" in bare or "$" in bare or ((is_at_start or is_at_end) and _has_alternatives(bare)):
        return None
    before, behind = "" if is_at_start else ANY, "" if is_at_end else ANY
    return f"({before} {regex(f'(?:{inner})')} {behind})" if inner else ANY


def _has_alternatives(bare: str) -> bool:
    """Whether there are alternatives outside all groups."""
    depth = 0
    for sign in bare:
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if sign == "|" and depth == 0:
            return True
    return False
