"""Turns token ids into text, one token at a time.

It does not use the `DecodeStream` of the `tokenizers` library (0.23). That holds text back without limit while bytes
are invalid, never hands out what it holds at the end, and fails with "Invalid prefix" if a later byte token makes
earlier ones invalid.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Detokenizes one growing sequence of tokens.

    All pushes and the flush joined equal decoding all ids at once, whatever the ids: special tokens and unknown ids
    have no text, invalid UTF-8 becomes U+FFFD. Everything is a function of the ids alone, so pushing the same ids again
    leads to the same state.
    """

    def push(self, token_id: int) -> str:
        """Returns the text that this token makes certain."""
        ...

    def flush(self) -> str:
        """Returns the text still held back, decoded as if nothing followed. Nothing may be pushed afterwards."""
        ...


class ByteDetokenizer:
    """Detokenizer for byte-level vocabularies. It holds back at most 3 bytes, an unfinished character.

    Python and the Rust library replace the same stretches of invalid bytes, the "maximal subparts" of section 3.9 of
    the Unicode Standard.
    """

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        """Starts a new text. `token_bytes` lacks the ids that have no text."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes.get(token_id, b""))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenTexts(Protocol):
    """The tokenizer interface that ContextDetokenizer needs. Its answers must never change."""

    def decode(self, token_ids: Sequence[int]) -> str: ...
    def is_visible(self, token_id: int) -> bool: ...
    def byte_of(self, token_id: int) -> bytes | None: ...


class ContextDetokenizer:
    """Detokenizer for vocabularies whose tokens stand for text, with or without byte tokens such as `<0xE4>`.

    A token's text is what decoding it after a context adds to decoding the context alone. The context is the last token
    with text, and at most one token without text after it. That suffices because decoders of this kind only treat the
    very first token, or the first character of the text, differently.

    A run of byte tokens decodes as a whole: if it is valid UTF-8 it is that text, and if not, each of its bytes is
    U+FFFD. So a run is held back until it ends or becomes invalid. Nothing else is ever held back.
    """

    def __init__(self, vocabulary: TokenTexts, context: Sequence[int] = ()) -> None:
        """Starts a new text. With `context`, a token with text, this text follows it and keeps its first space."""
        self._vocabulary = vocabulary
        self._context = [*context]  # at most one token with text, and one without text after it
        self._context_text = vocabulary.decode(self._context) if context else ""
        self._run: list[int] = []  # byte tokens held back: so far a prefix of valid UTF-8
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
