"""Reply entries as they travel over Redis: `own`, `chunk` and `end`, flat fields that a person can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from penstock.producer.wire.errors import WireError

FinishReason = Literal["stop", "tool_calls", "length", "cancelled", "expired", "error"]


def _as_bytes(value: object) -> object:
    if not isinstance(value, list):
        return value
    try:
        return bytes(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{value!r} is no list of bytes") from error


TokenBytes = Annotated[bytes, BeforeValidator(_as_bytes), PlainSerializer(list)]  # JSON: numbers from 0 to 255

# Reply entries may gain fields within a version: a reader ignores those it does not know.


class OwnEntry(BaseModel):
    """`<epoch>-0`: a worker took the request. A second one is a takeover by another worker.

    `epoch` only ever rises; `turn` counts the claims, as far as the server remembers them.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["own"] = "own"
    worker: str
    epoch: int
    turn: int | None = None


class ChunkEntry(BaseModel):
    """Tokens of one choice, in order; `offset` counts this choice's tokens before this chunk."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["chunk"] = "chunk"
    index: int
    offset: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None  # of this choice, in its last chunk, when n > 1


class TopLogprob(BaseModel):
    """Log-probability of one token at a place. `token` and `bytes` are what this token alone stands for.

    Joined, the `bytes` of a choice's tokens are its text where no one `token` need be a whole character.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: int
    token: str
    bytes: TokenBytes
    logprob: float


class TokenLogprob(TopLogprob):
    """That of the token at a place, and of the most likely ones there."""

    top: tuple[TopLogprob, ...]


class EndEntry(BaseModel):
    """The one terminal entry of a reply. Times are milliseconds on the server's and the worker's clocks."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["end"] = "end"
    finish_reason: FinishReason
    finish_reasons: tuple[FinishReason, ...] | None = None  # one per choice, when n > 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queued_ms: int | None = None  # from the enqueue to the claim
    ttft_ms: int | None = None  # from the enqueue to the first token
    total_ms: int | None = None  # from the enqueue to this entry
    code: str | None = None
    message: str | None = None


ReplyEntry = OwnEntry | ChunkEntry | EndEntry

_ENTRY_TYPES: dict[str, type[OwnEntry | ChunkEntry | EndEntry]] = {
    "own": OwnEntry,
    "chunk": ChunkEntry,
    "end": EndEntry,
}


def encode_reply(entry: ReplyEntry) -> dict[str, str]:
    """Flat fields that a person can read: token ids joined by commas, structured values as JSON, nothing for None."""
    fields: dict[str, str] = {}
    for name, value in entry.model_dump(exclude_none=True).items():
        if name in ("tokens", "finish_reasons"):
            fields[name] = ",".join(map(str, value))
        elif name == "logprobs":
            fields[name] = json.dumps(value, separators=(",", ":"))
        else:
            fields[name] = str(value)
    return fields


def decode_reply(fields: Mapping[str, str]) -> ReplyEntry:
    """The inverse of `encode_reply`.

    Raises:
        WireError: the fields are no reply entry.
    """
    kind = _ENTRY_TYPES.get(fields.get("type", ""))
    if kind is None:
        raise WireError("bad_reply", f"reply entry has type {fields.get('type')!r}", request_id="")
    values: dict[str, Any] = dict(fields)
    for name in ("tokens", "finish_reasons"):
        if name in values:
            values[name] = tuple(part for part in values[name].split(",") if part)
    try:
        if "logprobs" in values:
            values["logprobs"] = json.loads(values["logprobs"])
        return kind.model_validate(values)
    except (ValueError, RecursionError) as error:
        raise WireError("bad_reply", f"reply entry of type {kind.__name__}: {error}", request_id="") from error
