"""Parts of bodies and events that several of OpenAI's APIs share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.gateway.common.options import Shown
from penstock.gateway.errors import ended_early
from penstock.producer import Reply, TokenLogprob, TopLogprob, Usage

Document = dict[str, Any]

EXACT_HEADER = "x-penstock-exact"

_MICROSECONDS = 1_000_000


_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def spell(document: object) -> str:
    """Returns JSON on one line, in ASCII: some clients take other characters than CR and LF for the end of a line."""
    return _ENCODER.encode(document)


def created_at(entry_id: str | None) -> int:
    """Returns the Unix time of a reply, from the id of one of its entries, so that all replicas agree."""
    return int((entry_id or "0").partition("-")[0]) // _MICROSECONDS


def fingerprint(arithmetic: str | None) -> str | None:
    """Returns the `system_fingerprint` of what a worker of this arithmetic wrote; None: unknown."""
    return None if arithmetic is None else f"fp_{arithmetic}"


def exactness(*replies: Reply) -> dict[str, str]:
    """Returns the header that says that workers of several arithmetics generated an answer, or none if they did not."""
    return {} if all(reply.is_exact for reply in replies) else {EXACT_HEADER: "0"}


def check_ended(reply: Reply) -> None:
    """Raises ApiError if OpenAI's API has no finish reason for how the reply ended."""
    if reply.finish_reason in ("cancelled", "expired"):
        raise ended_early(reply.finish_reason)


def usage(*counts: Usage) -> Document:
    """Returns the usage of one reply, or of several together."""
    prompt_tokens = sum(count.prompt_tokens for count in counts)
    completion_tokens = sum(count.completion_tokens for count in counts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(count.cached_tokens for count in counts)},
        "completion_tokens_details": {"reasoning_tokens": sum(count.reasoning_tokens for count in counts)},
    }


def token_name(token: TopLogprob, shown: Shown) -> str:
    return token.token if shown.token_names else f"token_id:{token.id}"


def chat_logprobs(tokens: Iterable[TokenLogprob], shown: Shown) -> Document:
    """Returns `logprobs` of a chat's choice, or of a part of it."""
    content = [
        _logprob(token, shown) | {"top_logprobs": [_logprob(other, shown) for other in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokens: Sequence[TokenLogprob | None]) -> list[Document | None]:
    """Returns prompt log-probabilities in vLLM's form: by token id, the prompt's own token first. Only the most likely
    ones have a known rank.
    """
    return [None if token is None else _ranked(token) for token in tokens]


def _logprob(token: TopLogprob, shown: Shown) -> Document:
    return {"token": token_name(token, shown), "logprob": token.logprob, "bytes": list(token.bytes)}


def _ranked(token: TokenLogprob) -> Document:
    ranks = {other.id: rank for rank, other in enumerate(token.top, start=1)}
    return {
        str(other.id): {"logprob": other.logprob, "rank": ranks.get(other.id), "decoded_token": other.token}
        for other in (token, *token.top)
    }
