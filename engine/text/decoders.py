"""Finds out whether and how text can be streamed through a decoder of the `tokenizers` library."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.errors import ConfigError

PER_TOKEN = frozenset({"Replace", "Strip", "Metaspace"})  # stages that see one token, and whether it is the first


class DecoderKind(enum.Enum):
    """How the text of a sequence of tokens follows from the tokens."""

    BYTES = "each token is some bytes; the text is all of them decoded as UTF-8, errors replaced"
    BYTE_RUNS = "a run of tokens like <0xE4> is UTF-8 as a whole; all others stand for their own text"
    TEXT = "each token stands for its own text, which depends at most on whether it is the first"


def decoder_kind(decoder: Mapping[str, Any] | None) -> DecoderKind:
    """Returns the kind of a decoder, given as in `tokenizer.json`.

    Raises:
        ConfigError: a later token could change the text of earlier ones, so that nothing could ever be released.
    """
    stages = _stages(decoder)
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return DecoderKind.BYTES
    if kinds in ([], ["WordPiece"]):
        return DecoderKind.TEXT
    rest = list(stages)
    while rest and rest[0]["type"] in PER_TOKEN:
        rest.pop(0)
    byte_runs = bool(rest) and rest[0]["type"] == "ByteFallback"
    rest = rest[byte_runs:]
    if rest and rest[0]["type"] == "Fuse":
        rest.pop(0)
        # It strips the whole text: only the start may change, by one character. The detokenizer's context hides that.
        if rest and rest[0]["type"] == "Strip" and rest[0]["start"] <= 1 and rest[0]["stop"] == 0:
            rest.pop(0)
    if rest:
        raise ConfigError(f"text can't be streamed through the tokenizer's decoder {' > '.join(kinds)}")
    return DecoderKind.BYTE_RUNS if byte_runs else DecoderKind.TEXT


def _stages(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for inner in decoder["decoders"] for stage in _stages(inner)]
