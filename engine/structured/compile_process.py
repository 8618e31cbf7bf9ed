"""Tries a grammar: the program of a sandbox (`sandbox/child.py`), for `compiler.py`.

What compiles here, within the sandbox's bounds, is compiled once more where it is used. The vocabulary here is single
bytes and the tokens that only a grammar's name for them allows: what makes a grammar costly shows with these too, and
a process has them at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_DEPTH = 100  # of brackets

LIMITS = LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=100_000,  # 7 ms, of a step that all rows wait for
    step_max_items=25_000,  # 1.3 ms
    max_lexer_states=50_000,  # of 1 to 2 KB each, in each reply that is being written
    max_grammar_size=200_000,
    verbose_errors=False,  # they would show the client the parser's inside
)

_BRACKETS = re.compile(r'\\.|["(\[{)\]}]', re.DOTALL)


class Bytes(TokenizerWrapper):
    """A vocabulary for llguidance: behind the ids of the model's own, one token per byte."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int, names: Mapping[int, str], eos_token_id: int | None) -> None:
        self._first = size
        own = [names.get(id_, "").encode() for id_ in range(size)]
        self.tokens = [*own, *(bytes([byte]) for byte in range(256))]
        self.special_token_ids = list(names)
        self.eos_token_id = eos_token_id  # type: ignore[assignment]

    def __call__(self, text: str) -> list[int]:
        return [self._first + byte for byte in text.encode()]


def start(setup: Mapping[str, Any]) -> Callable[[Any, int], dict[str, str]]:
    names = {int(id_): name for id_, name in setup["names"].items()}
    eos = setup["eos_token_ids"]
    tokenizer = LLTokenizer(Bytes(setup["size"], names, eos[0] if eos else None), eos_token=eos or None)
    return lambda source, _: _outcome(tokenizer, source)


def _outcome(tokenizer: LLTokenizer, source: str) -> dict[str, str]:
    depth = max(_depths(source), default=0)
    if depth > MAX_DEPTH:
        return {"refused": f"it nests {depth} brackets, at most {MAX_DEPTH} can be"}
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"refused": matcher.get_error()} if matcher.is_error() else {"text": ""}


def _depths(source: str) -> Iterator[int]:
    """How deep each bracket is, those within quotes aside."""
    depth, is_quoted = 0, False
    for match in _BRACKETS.finditer(source):
        sign = match[0]
        if sign == '"':
            is_quoted = not is_quoted
        elif len(sign) == 1 and not is_quoted:
            depth += 1 if sign in "([{" else -1
            yield depth
