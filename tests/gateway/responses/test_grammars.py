"""Lark grammars become regular expressions of the same texts, or of none."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from lark import Lark
from lark.exceptions import LarkError

from penstock.gateway.responses.grammars import regex_of

PATCH = """
start: begin hunk+ end            // a patch
begin: "*** Begin" LF
end: "*** End" LF?

hunk: added | changed
added: "*** Add: " name LF line+
changed: "*** Update: " name LF ("*** Move: " name LF)? change?

name: /(.+)/
line: "+" /(.+)/ LF -> line
change: (context | ("+" | "-" | " ") /(.+)/ LF)+
      | "*** Nothing" LF
context: ("@@" | "@@ " /(.+)/) LF

%import common.LF
"""
SCALARS = """
start: number "/" [unit] | "a".."c"~2
number.2: INT
unit: /k?m/i | "\\x41\\u0042" | "\\"q\\""
%import common (INT, LETTER)
"""


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (PATCH, ["*** Begin\n*** Add: a\n+b\n*** End", "*** Begin\n*** Update: a\n*** Move: b\n@@ c\n-d\n*** End\n"]),
        (PATCH, ["*** Begin\n*** End", "*** Begin\n*** Add: a\n-b\n*** End", "*** Begin\n*** Update: a\n*** End\n"]),
        (SCALARS, ["12/", "12/KM", "1/m", '3/"q"', "3/AB", "ab", "a", "abc", "12", "/", "1/q"]),
    ],
)
def test_the_same_texts_follow_both(grammar: str, texts: list[str]) -> None:
    pattern = regex_of(grammar)
    assert pattern is not None
    parser = Lark(grammar, parser="earley")
    for text in texts:
        try:
            parser.parse(text)
        except LarkError:
            assert not re.fullmatch(pattern, text), text
        else:
            assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "a"',
        'start: a\na: b\nb: a | "x"',
        "start: missing",
        "rule: /a/",
        'start: "a"\n%ignore " "',
        "start: /a(?=b)/",
        r"start: /(a)\1/",
        "start: %json {}",
        "start: name{a}",
        "start: /a",
        "start: ('a')",
        'start: ("a"',
        'start: "a"~99999',
        "%import python.NAME\nstart: NAME",
        "",
        "start: " + "(" * 5000,
        "\n".join(["start: a", *(f"{one}: {two} {two}" for one, two in pairwise("abcdefghijklmnopqr")), 'r: "x"']),
    ],
)  # fmt: skip
def test_what_has_no_such_expression_is_left_to_the_model(grammar: str) -> None:
    assert regex_of(grammar) is None
