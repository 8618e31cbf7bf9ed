"""Tries grammars out for `compiler.py`: this is a program for the sandbox (`sandbox/child.py`).

A grammar that compiles here, within the sandbox's bounds, is compiled again where it is used. The vocabulary here is
single bytes and the tokens that a grammar can only allow by name. That shows what makes a grammar costly just as well,
and is available at once.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_DEPTH = 100  # of brackets
# llguidance recurses over rules, and a stack overflow ends its process. It should be this process, so it gets three
# quarters of the stack that threads have where the grammar is compiled again.
STACK_BYTES = 6 * 2**20

LIMITS = LLParserLimits(
    max_items_in_row=2_000,  # the library's default: a mask takes 10 ms then, and 40 ms at twice as many
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=100_000,  # 7 ms of a step that all rows wait for
    step_max_items=50_000,  # 2.5 ms
    # States that all replies of a grammar share. This many take 13 to 21 MB, as measured; schemas come nowhere near.
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # verbose errors would show the client the parser's internals
)

NUM_TRIED = 8  # tokens
_TRIED_FIRST = (*b'{["', *range(0x7E, 0x1F, -1))  # opening bytes lead to where there is most to choose from

_BRACKETS = re.compile(r'\\.|["(\[{)\]}]', re.DOTALL)


class Bytes(TokenizerWrapper):
    """A vocabulary for llguidance: after the model's own ids, one token per byte."""

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
    size, eos = setup["size"], setup["eos_token_ids"]
    tokenizer = LLTokenizer(Bytes(size, names, eos[0] if eos else None), eos_token=eos or None)
    threading.stack_size(STACK_BYTES)
    thread = ThreadPoolExecutor(max_workers=1)
    return lambda source, _: thread.submit(_outcome, tokenizer, size, source).result()


def _outcome(tokenizer: LLTokenizer, first_byte: int, source: str) -> dict[str, str]:
    depth = max(_depths(source), default=0)
    if depth > MAX_DEPTH:
        return {"refused": f"it nests {depth} brackets, the limit is {MAX_DEPTH}"}
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    _try_tokens(matcher, first_byte)
    return {"refused": matcher.get_error()} if matcher.is_error() else {"text": ""}


def _try_tokens(matcher: LLMatcher, first_byte: int) -> None:
    """Samples a few tokens: some limits are met only when a reply begins, better here than in each reply."""
    for _ in range(NUM_TRIED):
        mask = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask(), "little") >> first_byte
        byte = next((byte for byte in _TRIED_FIRST if mask >> byte & 1), None)
        if byte is None or not matcher.consume_token(first_byte + byte):
            return


def _depths(source: str) -> Iterator[int]:
    """Yields the depth of each bracket outside quotes."""
    depth, is_quoted = 0, False
    for match in _BRACKETS.finditer(source):
        sign = match[0]
        if sign == '"':
            is_quoted = not is_quoted
        elif len(sign) == 1 and not is_quoted:
            depth += 1 if sign in "([{" else -1
            yield depth
