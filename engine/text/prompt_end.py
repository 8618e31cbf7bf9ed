"""The state that a prompt's end leaves for decoding the text after it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

MAX_UNFINISHED = 3  # bytes of an unfinished character


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The state of a detokenizer that has read a prompt. Special tokens have no effect on it.

    The unfinished UTF-8 character at the prompt's end belongs to the text after it.
    """

    context: tuple[int, ...] = ()  # one token at most, which stands for all before the unfinished character
    unfinished: bytes = b""
    byte_tokens: tuple[int, ...] = ()  # those of the unfinished character, where bytes have tokens
    is_run_invalid: bool = False  # whether the byte tokens before the unfinished character are not UTF-8


class Tokens(Protocol):
    """The tokens of a vocabulary, as needed here."""

    def is_visible(self, token_id: int) -> bool: ...
    def has_text(self, token_id: int) -> bool: ...
    def byte_of(self, token_id: int) -> bytes | None: ...


def byte_level_end(tokens: Tokens, prompt: Sequence[int]) -> PromptEnd:
    """Returns the end of a prompt in a vocabulary whose tokens are bytes."""
    tail = b""
    for token_id in reversed(prompt):
        tail = (tokens.byte_of(token_id) or b"") + tail
        if len(tail) >= MAX_UNFINISHED:
            break
    return PromptEnd(unfinished=_unfinished(tail))


def end_of(tokens: Tokens, prompt: Sequence[int], some_text: tuple[int, ...]) -> PromptEnd:
    """Returns the end of a prompt in any other vocabulary. `some_text` is a token with text, if there is one.

    Decoders treat all tokens after a text alike, so any text will do for context.
    """
    run = [*takewhile(lambda id_: tokens.byte_of(id_) is not None, _visible(tokens, reversed(prompt)))][::-1]
    data = b"".join(tokens.byte_of(id_) or b"" for id_ in run)
    unfinished = _unfinished(data)
    num_whole = len(run) - len(unfinished)
    return PromptEnd(
        context=some_text if num_whole else _context(tokens, reversed(prompt), len(run), some_text),
        unfinished=unfinished,
        byte_tokens=tuple(run[num_whole:]),
        is_run_invalid=not _is_text(data[:num_whole]),
    )


def without_byte_tokens(tokens: Tokens, prompt: Sequence[int], count: int) -> Sequence[int]:
    """Returns the prompt up to its last `count` byte tokens."""
    places = (place for place in range(len(prompt) - 1, -1, -1) if tokens.is_visible(prompt[place]))
    end = len(prompt)
    for _ in range(count):
        end = next(places)
    return prompt[:end]


def _context(tokens: Tokens, backwards: Iterable[int], num_skipped: int, some_text: tuple[int, ...]) -> tuple[int, ...]:
    without_text: tuple[int, ...] = ()
    for place, token_id in enumerate(_visible(tokens, backwards)):
        if place >= num_skipped:
            if tokens.has_text(token_id):
                return some_text
            without_text = (token_id,)
    return without_text


def _visible(tokens: Tokens, token_ids: Iterable[int]) -> Iterator[int]:
    return (id_ for id_ in token_ids if tokens.is_visible(id_))


def _unfinished(data: bytes) -> bytes:
    """Returns the unfinished character at the end of these bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-MAX_UNFINISHED:])
    held = decoder.getstate()[0]
    # Python waits for the third byte of a surrogate, which is none: its first two are invalid already.
    return b"" if held[:1] == b"\xed" and held[1:2] >= b"\xa0" else held


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
