"""Token ids to text, one token at a time.

The `DecodeStream` of the `tokenizers` library (0.23) is not used: it holds text back without limit while bytes are
invalid, never hands out what it holds at the end, and fails with "Invalid prefix" where a later byte token makes
earlier ones invalid.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Text of one growing sequence of tokens.

    All pushes and the flush joined are what decoding all the ids at once gives, whatever the ids: special tokens and
    unknown ids have no text, invalid UTF-8 becomes U+FFFD. Everything is a function of the ids alone, so pushing the
    same ids again leads to the same state.
    """

    def push(self, token_id: int) -> str:
        """The text that this token made certain."""
        ...

    def flush(self) -> str:
        """The text still held back, decoded as if nothing followed. Nothing may be pushed afterwards."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: each token is some bytes. At most 3 bytes, an unfinished character, are held back.

    Python and the Rust library replace the same stretches of invalid bytes, the "maximal subparts" of section 3.9 of
    the Unicode Standard.
    """

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        """`token_bytes` lacks the ids that have no text."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes.get(token_id, b""))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class Vocabulary(Protocol):
    """What ContextDetokenizer asks of a tokenizer. None of it may change."""

    def decode(self, token_ids: Sequence[int]) -> str: ...
    def is_visible(self, token_id: int) -> bool: ...
    def byte_of(self, token_id: int) -> bytes | None: ...


class ContextDetokenizer:
    """For vocabularies whose tokens stand for text, with or without byte tokens such as `<0xE4>`.

    A token's text is what decoding it behind a context adds to decoding the context alone. The context is the last
    token that has text, and at most one without text behind it: no more is needed, since decoders of this kind treat
    only the very first token, or the first character of the text, differently.

    A run of byte tokens decodes as a whole: if it is valid UTF-8 it is that text, and if not, every byte of it is
    U+FFFD. So a run is held back until it ends or becomes invalid, and nothing else ever is.
    """

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int] = ()) -> None:
        """`context`: a token with text that this text goes on behind, and so keeps its first space; none: it begins."""
        self._vocabulary = vocabulary
        self._context = [*context]  # at most one token with text, and one without behind it
        self._context_text = vocabulary.decode(self._context) if context else ""
        self._run: list[int] = []  # byte tokens that are held back: so far the beginning of valid UTF-8
        self._run_decoder = codecs.getincrementaldecoder("utf-8")()
        self._in_invalid_run = False

    def push(self, token_id: int) -> str:
        if not self._vocabulary.is_visible(token_id):
            return ""
        byte = self._vocabulary.byte_of(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        self._in_invalid_run = False
        text = self._text_of([*self._run, token_id])
        for released in (*self._run[-1:], token_id):
            self._move_context(released)
        self._end_run()
        return text

    def flush(self) -> str:
        text = self._text_of(self._run) if self._run else ""
        self._end_run()
        return text

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        if self._in_invalid_run:
            return REPLACEMENT
        self._run.append(token_id)
        try:
            self._run_decoder.decode(byte)
        except UnicodeDecodeError:
            text = self._text_of(self._run)
            self._end_run()
            self._in_invalid_run = True
            self._move_context(token_id)
            return text
        return ""

    def _text_of(self, token_ids: list[int]) -> str:
        return self._vocabulary.decode([*self._context, *token_ids])[len(self._context_text) :]

    def _end_run(self) -> None:
        self._run = []
        self._run_decoder.reset()

    def _move_context(self, token_id: int) -> None:
        decode = self._vocabulary.decode
        # Twice, since a leading space is dropped once: a token that is one space does have text.
        has_text = decode([token_id, token_id]) != ""
        self._context = [token_id] if has_text else [*self._context[:1], token_id]
        self._context_text = decode(self._context)
