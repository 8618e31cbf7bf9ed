"""What each token of a vocabulary stands for: text, or bytes of a text."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice

import tokenizers

from penstock.engine.text.decoders import DecoderKind
from penstock.engine.text.detokenizer import BEGINNING, ByteDetokenizer, ContextDetokenizer, Detokenizer
from penstock.engine.text.prompt_end import PromptEnd, byte_level_end, end_of, without_byte_tokens
from penstock.engine.text.unlocked import text_of

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_NUM_REMEMBERED = 2**14  # number of spellings cached that need the library's decoder


class Spelling:
    """A vocabulary in which special tokens are either ordinary text or have none. Any thread may use it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        kind: DecoderKind,
        tokens: Mapping[int, str],
        token_bytes: Mapping[int, bytes],
        *,
        skip_special: bool,
    ) -> None:
        """Prepares the vocabulary. `tokens`, and `token_bytes` as from `bytes_of`, lack the ids that have no text."""
        self._backend = backend
        self._kind = kind
        self._tokens = tokens
        self._bytes = token_bytes
        self._skip_special = skip_special
        self._remembered = lru_cache(_NUM_REMEMBERED)(self._decoded)

    def decode(self, token_ids: Sequence[int]) -> str:
        return text_of(self._backend, token_ids, skip_special_tokens=self._skip_special)

    def is_visible(self, token_id: int) -> bool:
        """Whether `decode` considers this token at all."""
        return token_id in self._tokens

    def byte_of(self, token_id: int) -> bytes | None:
        """Returns the bytes of a token, or None if it stands for text rather than bytes."""
        return self._bytes.get(token_id)

    def has_text(self, token_id: int) -> bool:
        # Twice, since a leading space is dropped once: a token that is one space does have text.
        return self.decode([token_id, token_id]) != ""

    def detokenizer(self, behind: PromptEnd = BEGINNING, no_opening: Container[int] = ()) -> Detokenizer:
        """Returns a detokenizer for the text after a prompt. The first space is decided as if the tokens of
        `no_opening` had no text.
        """
        if self._kind is DecoderKind.BYTES:
            return ByteDetokenizer(self._bytes, behind.unfinished)
        return ContextDetokenizer(self, behind, no_opening)

    @cached_property
    def inside(self) -> PromptEnd:
        """The state in the middle of a text: there, even the first token has the text that `spell` returns."""
        if self._kind is DecoderKind.BYTES:
            return BEGINNING
        texts = (id_ for id_ in self._tokens if id_ not in self._bytes and self.has_text(id_))
        return PromptEnd(context=tuple(islice(texts, 1)))

    def end_of(self, prompt: Sequence[int]) -> PromptEnd:
        """Returns the end of a prompt of any ids."""
        if self._kind is DecoderKind.BYTES:
            return byte_level_end(self, prompt)
        return end_of(self, prompt, self.inside.context)

    def decode_prompt(self, prompt: Sequence[int]) -> str:
        """Returns the text of a prompt without the unfinished character at its end."""
        end = self.end_of(prompt)
        if end.byte_tokens:
            return self.decode(without_byte_tokens(self, prompt, len(end.byte_tokens)))
        text = self.decode(prompt)
        return text[:-1] if end.unfinished else text  # it ends in one U+FFFD

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """Returns the text of one token in the middle of a text, with any leading space, and the bytes that it adds.

        The joined bytes of a text's tokens are the text. The text of a token that is part of a character is U+FFFD.
        """
        data = self._bytes.get(token_id)
        if data is not None:
            return data.decode(errors="replace"), data
        text = self._remembered(token_id) if self.is_visible(token_id) else ""
        return text, text.encode()

    def _decoded(self, token_id: int) -> str:
        return self.decode([token_id, token_id])[len(self.decode([token_id])) :]


def bytes_of(tokens: Mapping[int, str], kind: DecoderKind) -> dict[int, bytes]:
    """Returns the tokens that are bytes rather than text: all, the byte tokens, or none, by kind of decoder."""
    if kind is DecoderKind.BYTES:
        byte_of = _byte_alphabet()
        return {id_: _byte_level(token, byte_of) for id_, token in tokens.items()}
    if kind is DecoderKind.BYTE_RUNS:
        matches = ((id_, BYTE_TOKEN.fullmatch(token)) for id_, token in tokens.items())
        return {id_: bytes.fromhex(match[1]) for id_, match in matches if match}
    return {}


def _byte_level(token: str, byte_of: Mapping[str, int]) -> bytes:
    """Returns the bytes of a token; one outside the byte alphabet, such as an added one, stands for itself."""
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable bytes are their own characters, the others are U+0100 and up, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + number): byte for number, byte in enumerate(rest)}
