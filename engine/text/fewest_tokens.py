"""Lower bound on a text's number of tokens, found without encoding it, to refuse texts that are far too long.

Each byte of a text belongs to one token. So a byte is at least 1/n of a token, if the longest token that contains this
byte has n bytes: if the longest token with an `e` has 20 bytes, twenty `e` are at least one token. The sum of these
shares is never above the number of tokens, and takes milliseconds for 1 MB.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import tokenizers

from penstock.engine.text.decoders import DecoderKind

Check: TypeAlias = Callable[[int], None]
"""Called with the minimum number of tokens of a prompt; raises to refuse it."""

_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})  # pre-tokenizers that drop no text
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark for a space


def let_pass(_: int) -> None:
    """Refuses nothing."""


class FewestTokens:
    """The bound for one vocabulary. Any thread may use it."""

    def __init__(self, token_bytes: Iterable[bytes], spelled: Callable[[str], str | None]) -> None:
        """Prepares the bound.

        Args:
            token_bytes: byte strings that tokens may stand for; every single byte must be among them.
            spelled: returns a text as the tokens spell it, or None if the tokens may have fewer bytes than the text.
        """
        longest = np.ones(256)
        for data in token_bytes:
            for byte in set(data):
                longest[byte] = max(longest[byte], len(data))
        self._shares = 1.0 / longest
        self._spelled = spelled

    def of(self, text: str) -> int:
        """Returns the least number of tokens that `text` has; 0 if nothing is known.

        Raises:
            UnicodeEncodeError: the text holds lone surrogates.
        """
        spelled = self._spelled(text)
        if spelled is None:
            return 0
        counts = np.bincount(np.frombuffer(spelled.encode(), np.uint8), minlength=256)
        return int(counts @ self._shares * (1 - 1e-9))  # without what rounding could add


def fewest_tokens(
    backend: tokenizers.Tokenizer,
    rules: Mapping[str, Any],
    kind: DecoderKind,
    tokens: Mapping[int, str],
    token_bytes: Mapping[int, bytes],
) -> FewestTokens | None:
    """Returns the bound for a tokenizer, or None if it may drop text or turn text of any length into one token.

    Args:
        backend: the tokenizer.
        rules: its `normalizer` and `pre_tokenizer`, as in `tokenizer.json`.
        kind: how text follows from tokens.
        tokens: all tokens, by id.
        token_bytes: bytes of the tokens that stand for bytes, as `bytes_of` returns them.
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
    """Replaces space marks by spaces: a mark in the text itself looks the same."""
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
