"""Makes a chunk's fields on the reply stream from a choice's pending output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.engine.request import Prefill, TokenLogprob, ToolCallDelta, TopLogprob
from penstock.protocol.wire import ChunkEntry
from penstock.worker.run.choices import ChoiceBuffer, Pending, merged

MIN_LOGPROB = -9999.0  # JSON has no infinity; what cannot be sampled gets this, as in OpenAI's API


def chunk_fields(choice: ChoiceBuffer, pending: Pending, *, num_choices: int) -> list[str]:
    """Makes the same fields as `encode_reply(chunk_entry(...))`, but builds no pydantic model.

    Every token passes through here.
    """
    ids = pending.token_ids
    tokens = str(ids[0]) if len(ids) == 1 else ",".join(map(str, ids))
    fields = ["type", "chunk", "index", str(choice.index), "offset", str(choice.num_published),
              "text", "".join(pending.text), "tokens", tokens]  # fmt: skip
    if pending.reasoning:
        fields += ("reasoning", "".join(pending.reasoning))
    if pending.tool_calls:
        fields += ("tool_calls", _as_json([_call_fields(delta) for delta in merged(pending.tool_calls)]))
    if pending.logprobs:
        fields += ("logprobs", _as_json([_logprob_fields(logprob) for logprob in pending.logprobs]))
    if pending.prompt_logprobs is not None:
        fields += ("prompt_logprobs", _as_json(_prompt_fields(pending.prompt_logprobs)))
    if num_choices > 1 and choice.finish_reason is not None:
        fields += ("finish_reason", choice.finish_reason)
        for name, value in stop_fields(choice).items():
            fields += (name, str(value))
    return fields


def prefill_entry(first: ChoiceBuffer, prefill: Prefill) -> ChunkEntry:
    """Makes the chunk of choice 0 that reports the prompt's progress. Older readers see an empty chunk."""
    done, total = prefill
    return ChunkEntry(
        index=first.index, offset=first.num_published, text="", tokens=(), prefill_done=done, prefill_total=total
    )


def chunk_entry(choice: ChoiceBuffer, pending: Pending, *, num_choices: int) -> ChunkEntry:
    """Makes a chunk for a reader in this process."""
    values: dict[str, Any] = {
        "index": choice.index,
        "offset": choice.num_published,
        "text": "".join(pending.text),
        "tokens": tuple(pending.token_ids),
        "reasoning": "".join(pending.reasoning),
        "tool_calls": [_call_fields(delta) for delta in merged(pending.tool_calls)],
    }
    if pending.logprobs:
        values["logprobs"] = [_logprob_fields(logprob) for logprob in pending.logprobs]
    if pending.prompt_logprobs is not None:
        values["prompt_logprobs"] = _prompt_fields(pending.prompt_logprobs)
    if num_choices > 1 and choice.finish_reason is not None:
        values |= {"finish_reason": choice.finish_reason, **stop_fields(choice)}
    return ChunkEntry.model_validate(values)


def stop_fields(choice: ChoiceBuffer) -> dict[str, Any]:
    """Returns what stopped a choice, if it was a stop string or a token."""
    reason = choice.stop_reason
    if reason is None:
        return {}
    return {"stop_string": reason} if isinstance(reason, str) else {"stop_token_id": reason}


def draft_fields(choices: Iterable[ChoiceBuffer]) -> dict[str, Any]:
    """Returns how many drafted tokens of a reply were verified, and how many were right, if there were any."""
    num_drafted = num_accepted = 0
    for choice in choices:
        num_drafted += choice.num_drafted
        num_accepted += choice.num_accepted
    return {"drafted_tokens": num_drafted, "accepted_tokens": num_accepted} if num_drafted else {}


def _call_fields(delta: ToolCallDelta) -> dict[str, Any]:
    begin = {} if delta.id is None else {"id": delta.id, "name": delta.name}
    return {"index": delta.index, **begin, "arguments": delta.arguments}


def _prompt_fields(logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    return [None if logprob is None else _logprob_fields(logprob) for logprob in logprobs]


def _logprob_fields(logprob: TokenLogprob) -> dict[str, Any]:
    return {**_top_fields(logprob), "top": [_top_fields(top) for top in logprob.top]}


def _top_fields(one: TokenLogprob | TopLogprob) -> dict[str, Any]:
    value = max(MIN_LOGPROB, one.logprob)  # in this order it also covers NaN, which JSON lacks too
    return {"id": one.token_id, "token": one.token, "bytes": list(one.bytes), "logprob": value}


def _as_json(values: Sequence[Any]) -> str:
    """Encodes values as JSON, with characters outside ASCII left as they are."""
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))
