"""Reply entries as they travel over Redis: `own`, `chunk` and `end`, flat fields that a person can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from penstock.protocol.wire.errors import WireError

FinishReason = Literal["stop", "tool_calls", "length", "cancelled", "expired", "error"]


def _as_bytes(value: object) -> object:
    if not isinstance(value, list):
        return value
    try:
        return bytes(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{value!r} is not a list of bytes") from error


TokenBytes = Annotated[bytes, BeforeValidator(_as_bytes), PlainSerializer(list)]  # JSON: numbers from 0 to 255

# Reply entries may gain fields within a version: a reader ignores those it does not know.


class OwnEntry(BaseModel):
    """`<epoch>-0`: a worker took the request. A second one is a takeover by another worker.

    `epoch` only increases; `turn` counts the claims, as far as the server remembers them.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["own"] = "own"
    worker: str
    epoch: int
    turn: int | None = None
    digest: str | None = None  # of the worker's model, as `ModelCard.digest`
    arithmetic: str | None = None  # of the worker, as `ModelCard.arithmetic`
    exact: int | None = None  # 0: what follows may be rounded otherwise than what an earlier worker wrote


class _Stopped(BaseModel):
    """An entry that may name what ended a choice with `stop` or `tool_calls`: a stop string or a token id."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    stop_string: str | None = None
    stop_token_id: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        return self.stop_token_id if self.stop_string is None else self.stop_string


class ChunkEntry(_Stopped):
    """Tokens of one choice, in order, and what they decode to; `offset` counts this choice's tokens before this
    chunk.
    """

    type: Literal["chunk"] = "chunk"
    index: int
    offset: int
    text: str
    tokens: tuple[int, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # in the first chunk of choice 0
    finish_reason: FinishReason | None = None  # of this choice, in its last chunk, when n > 1; so is what stopped it
    prefill_done: int | None = None  # in a chunk of choice 0 that has neither tokens nor text: how far a prompt is
    prefill_total: int | None = None


class ToolCallDelta(BaseModel):
    """The next part of one tool call. Only a call's first part has `id` and `name`; joined, the `arguments` are
    JSON.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    index: int = Field(ge=0)  # of the call among those of its choice
    id: str | None = None
    name: str | None = None
    arguments: str


class TopLogprob(BaseModel):
    """Log-probability of one token at a position. `token` and `bytes` are the text of this token alone.

    The joined `bytes` of a choice's tokens are its text, although a single `token` need not be a whole character.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: int
    token: str
    bytes: TokenBytes
    logprob: float


class TokenLogprob(TopLogprob):
    """Log-probability of the token at a position, and of the most likely tokens there."""

    top: tuple[TopLogprob, ...]


class EndEntry(_Stopped):
    """The one terminal entry of a reply. Times are milliseconds by the server's clock.

    With one choice, what stopped it is here; with several, it is in each one's last chunk.
    """

    type: Literal["end"] = "end"
    finish_reason: FinishReason
    finish_reasons: tuple[FinishReason, ...] | None = None  # one per choice, when n > 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None  # those of them that are reasoning, if any are known
    drafted_tokens: int | None = None  # speculated tokens that were verified, if any
    accepted_tokens: int | None = None  # those of them that were right
    queued_ms: int | None = None  # from the enqueue to the claim
    ttft_ms: int | None = None  # from the enqueue to the first token
    total_ms: int | None = None  # from the enqueue to this entry
    ignored: tuple[str, ...] | None = None  # fields of the request that had no effect
    arithmetic: str | None = None  # of the worker that writes the end, as `ModelCard.arithmetic`
    exact: int | None = None  # 0: workers of several arithmetics generated it
    code: str | None = None
    message: str | None = None


_LISTS = ("tokens", "finish_reasons", "ignored")
_JSON_FIELDS = frozenset({"tool_calls", "logprobs", "prompt_logprobs"})
_LEFT_OUT = {"reasoning": "", "tool_calls": "[]"}  # values that nearly all chunks have

ReplyEntry = OwnEntry | ChunkEntry | EndEntry

_ENTRY_TYPES: dict[str, type[OwnEntry | ChunkEntry | EndEntry]] = {
    "own": OwnEntry,
    "chunk": ChunkEntry,
    "end": EndEntry,
}


def encode_reply(entry: ReplyEntry) -> dict[str, str]:
    """Returns flat fields that a person can read: token ids joined by commas, structured values as JSON, nothing for
    None.
    """
    fields: dict[str, str] = {}
    for name, value in entry.model_dump(exclude_none=True).items():
        if name in _LISTS:
            fields[name] = ",".join(map(str, value))
        elif name in _JSON_FIELDS:
            fields[name] = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        else:
            fields[name] = str(value)
    return {name: value for name, value in fields.items() if name not in _LEFT_OUT or value != _LEFT_OUT[name]}


def decode_reply(fields: Mapping[str, str]) -> ReplyEntry:
    """Inverts `encode_reply`.

    Raises:
        WireError: the fields are not a reply entry.
    """
    kind = _ENTRY_TYPES.get(fields.get("type", ""))
    if kind is None:
        raise WireError("bad_reply", f"reply entry has type {fields.get('type')!r}", request_id="")
    values: dict[str, Any] = dict(fields)
    for name in _LISTS:
        if name in values:
            values[name] = tuple(part for part in values[name].split(",") if part)
    try:
        for name in _JSON_FIELDS & values.keys():
            values[name] = json.loads(values[name])
        return kind.model_validate(values)
    except (ValueError, RecursionError) as error:
        raise WireError("bad_reply", f"reply entry of type {kind.__name__}: {error}", request_id="") from error
