"""Turns token ids into text, one token at a time.

It does not use the `DecodeStream` of the `tokenizers` library (0.23). That holds text back without limit while bytes
are invalid, never hands out what it holds at the end, and fails with "Invalid prefix" if a later byte token makes
earlier ones invalid.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from penstock.engine.text.prompt_end import PromptEnd

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BEGINNING = PromptEnd()


class Detokenizer(Protocol):
    """Detokenizes one growing sequence of tokens.

    All pushes and the flush joined equal decoding all ids at once, whatever the ids: special tokens and unknown ids
    have no text, invalid UTF-8 becomes U+FFFD. After a prompt, they equal what these ids add to the decoded prompt.
    Everything is a function of the prompt and the ids alone, so pushing the same ids again leads to the same state.
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

    def __init__(self, token_bytes: Mapping[int, bytes], unfinished: bytes = b"") -> None:
        """Starts a new text, with the unfinished character of a prompt. `token_bytes` lacks the ids without text."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(unfinished)

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes.get(token_id, b""))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenTexts(Protocol):
    """The tokenizer interface that ContextDetokenizer needs. Its answers must never change."""

    def decode(self, token_ids: Sequence[int]) -> str: ...
    def is_visible(self, token_id: int) -> bool: ...
    def has_text(self, token_id: int) -> bool: ...
    def byte_of(self, token_id: int) -> bytes | None: ...


class ContextDetokenizer:
    """Detokenizer for vocabularies whose tokens stand for text, with or without byte tokens such as `<0xE4>`.

    A token's text is what decoding it after a context adds to decoding the context alone. The context is the last token
    with text, and at most one token without text after it. That suffices because decoders of this kind only treat the
    very first token, or the first character of the text, differently.

    A run of byte tokens decodes as a whole: if it is valid UTF-8 it is that text, and if not, each of its bytes is
    U+FFFD. So a run is held back until it ends or becomes invalid. Nothing else is ever held back.

    If a prompt ends in a run that is valid UTF-8 so far, the text begins a new run with the unfinished character at the
    prompt's end. The client already has the characters before that one.
    """

    def __init__(self, vocabulary: TokenTexts, behind: PromptEnd = BEGINNING, no_opening: Container[int] = ()) -> None:
        """Starts a text after a prompt. Tokens of `no_opening` may have text, but the first space is decided as if
        they had none.
        """
        self._vocabulary = vocabulary
        self._no_opening = no_opening
        self._context = [*behind.context]  # at most one token with text, and one without text after it
        self._context_text = vocabulary.decode(self._context) if self._context else ""
        self._run: list[int] = []  # byte tokens held back: so far a prefix of valid UTF-8
        self._run_decoder = codecs.getincrementaldecoder("utf-8")()
        self._in_invalid_run = behind.is_run_invalid
        self._of_prompt = "".join(self._text_behind(id_) for id_ in behind.byte_tokens)  # goes out with the first push

    def push(self, token_id: int) -> str:
        if not self._of_prompt:
            return self._text_behind(token_id)
        of_prompt, self._of_prompt = self._of_prompt, ""
        return of_prompt + self._text_behind(token_id)

    def flush(self) -> str:
        text = self._of_prompt + (self._text_of(self._run) if self._run else "")
        self._of_prompt = ""
        self._end_run()
        return text

    def _text_behind(self, token_id: int) -> str:
        """Returns the text that this token makes certain."""
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
        if not self._context and token_id in self._no_opening:
            return
        has_text = self._vocabulary.has_text(token_id)
        self._context = [token_id] if has_text else [*self._context[:1], token_id]
        self._context_text = self._vocabulary.decode(self._context)
