"""How many tokens a text has at least, found without encoding it: what is far too long is refused before it is encoded.

Each byte of a text belongs to one token. A token's bytes stand in the vocabulary, so a byte is at least the share of a
token that it is in the longest one that has it: where the longest token with an `e` has 20 bytes, twenty `e` are at
least one token. The sum of these shares is never above the number of tokens, and takes milliseconds for 1 MB.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import tokenizers

from penstock.engine.text.decoders import DecoderKind

Check: TypeAlias = Callable[[int], None]
"""Is told how many tokens a prompt has at least; raises to refuse it."""

_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})  # steps before a model's own that drop no text
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece spells a space


def let_pass(_: int) -> None:
    """Refuses nothing."""


class FewestTokens:
    """The bound for one vocabulary. Any thread may ask."""

    def __init__(self, token_bytes: Iterable[bytes], spelled: Callable[[str], str | None]) -> None:
        """
        Args:
            token_bytes: those that each token may stand for; every single byte must be among them.
            spelled: a text as the tokens spell it; None: it may have fewer bytes than that.
        """
        longest = np.ones(256)
        for data in token_bytes:
            for byte in set(data):
                longest[byte] = max(longest[byte], len(data))
        self._shares = 1.0 / longest
        self._spelled = spelled

    def of(self, text: str) -> int:
        """How many tokens `text` has at least; 0 where nothing can be said.

        Raises:
            UnicodeEncodeError: the text holds lone surrogates.
        """
        spelled = self._spelled(text)
        if spelled is None:
            return 0
        counts = np.bincount(np.frombuffer(spelled.encode(), np.uint8), minlength=256)
        return int(counts @ self._shares * (1 - 1e-9))  # what rounding could add is off


def fewest_tokens(
    backend: tokenizers.Tokenizer,
    rules: Mapping[str, Any],
    kind: DecoderKind,
    tokens: Mapping[int, str],
    token_bytes: Mapping[int, bytes],
) -> FewestTokens | None:
    """None: this tokenizer may drop text, or make one token of any length of it.

    Args:
        backend: the tokenizer.
        rules: its `normalizer` and `pre_tokenizer`, as in `tokenizer.json`.
        kind: how text follows from tokens.
        tokens: all, by id.
        token_bytes: of those that stand for bytes, as `bytes_of` gives them.
    """
    added = backend.get_added_tokens_decoder().values()
    normalizer = _steps(rules["normalizer"], "normalizers")
    before = _steps(rules["pre_tokenizer"], "pretokenizers")
    has_all = len({data for data in token_bytes.values() if len(data) == 1}) == 256
    takes_space = any(token.lstrip or token.rstrip for token in added)
    model: Any = backend.model
    if not (isinstance(model, tokenizers.models.BPE) and has_all and all(map(_keeps, before))) or takes_space:
        return None
    named = [token.content.encode() for token in added]
    if kind is DecoderKind.BYTES and any(step["type"] == "ByteLevel" for step in before):
        spelled = {(): _as_it_is, ("NFC",): _composed}.get(tuple(step["type"] for step in normalizer))
        return None if spelled is None else FewestTokens([*token_bytes.values(), *named], spelled)
    if kind is DecoderKind.BYTE_RUNS and model.byte_fallback and all(map(_marks_space, normalizer)):
        whole = [_with_spaces(token).encode() for id_, token in tokens.items() if id_ not in token_bytes]
        return FewestTokens([*whole, *named], _with_spaces)
    return None


def _as_it_is(text: str) -> str:
    return text


def _composed(text: str) -> str | None:
    return text if text.isascii() or unicodedata.is_normalized("NFC", text) else None


def _with_spaces(text: str) -> str:
    """A text's own mark cannot be told from a space."""
    return text.replace(_SPACE, " ")


def _steps(rule: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if rule is None:
        return []
    if rule["type"] != "Sequence":
        return [rule]
    return [step for inner in rule[name] for step in _steps(inner, name)]


def _keeps(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEEPING or (step["type"] == "Split" and step["behavior"] != "Removed")


def _marks_space(step: Mapping[str, Any]) -> bool:
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return step["type"] == "Prepend" or step == mark
