"""A model's tokens in the form that grammars need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

_MAX_FORCED_BYTES = 16  # of a token, if the tokenizer cannot be used


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Bytes and names of tokens, by id. An id has one of the two, or is never generated.

    A token with a name is allowed only if a grammar names it. Tokens that end a reply are allowed where the grammar is
    complete; they have no bytes, so that none can end a reply in the middle.
    """

    size: int  # the model's size, which may be padded beyond the tokenizer's
    token_bytes: Mapping[int, bytes]
    names: Mapping[int, str]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]


def llguidance_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Makes llguidance's tokenizer; takes 0.3 s for 150,000 tokens. If no token ends a reply, it adds one that does."""
    return LLTokenizer(_Wrapper(vocabulary), eos_token=list(vocabulary.eos_token_ids) or None)


class _Wrapper(TokenizerWrapper):
    """The tokenizer interface that llguidance needs."""

    is_tokenizer_wrapper = True  # normally set by the constructor, which takes guidance's tokenizers
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode = vocabulary.encode
        self.eos_token_id = next(iter(vocabulary.eos_token_ids), None)  # type: ignore[assignment]
        self.special_token_ids = list(vocabulary.names)
        self.tokens = [vocabulary.token_bytes.get(id_, b"") for id_ in range(vocabulary.size)]
        for id_, name in vocabulary.names.items():
            self.tokens[id_] = name.encode()
        self._special = frozenset(vocabulary.names)

    def __call__(self, text: str) -> list[int]:
        """Splits text that a grammar forces into tokens as the tokenizer does, because the model is used to that.

        A tokenizer may do something else: begin with a space, or turn the name of a special token into that token. Then
        the longest matching tokens are used. This must not raise: that would be a panic in llguidance.
        """
        wanted = text.encode()
        ids = list(self._encode(text))
        is_text = all(id_ < len(self.tokens) and id_ not in self._special for id_ in ids)
        is_same = is_text and b"".join(self.tokens[id_] for id_ in ids) == wanted
        return ids if is_same else self._longest(wanted)

    def _longest(self, text: bytes) -> list[int]:
        """Splits text up to where no token fits; llguidance handles the rest."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            parts = (text[at : at + length] for length in range(_MAX_FORCED_BYTES, 0, -1))
            part = next((part for part in parts if part in self._ids), None)
            if part is None:
                break
            ids.append(self._ids[part])
            at += len(part)
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The lowest id of each token's bytes."""
        ids = range(len(self.tokens) - 1, -1, -1)
        return {self.tokens[id_]: id_ for id_ in ids if id_ not in self._special and self.tokens[id_]}
