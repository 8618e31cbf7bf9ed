"""Attributes of spans for requests and their ends, by the conventions for GenAI and messaging. They never hold text.

Names come from opentelemetry-semantic-conventions if it has them; our own begin with `penstock.`. Stop strings are left
out, as they are text that a client wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv._incubating.attributes import messaging_attributes as messaging

from penstock.protocol.telemetry.recorder import Attributes
from penstock.protocol.wire import FinishReason, GenerateRequest

REQUEST_ID = "penstock.request.id"
TENANT = "penstock.tenant"
PRIORITY = "penstock.priority"
ATTEMPT = "penstock.attempt"
RESUMED_TOKENS = "penstock.resumed_tokens"
OUTCOME = "penstock.outcome"
LINK = "penstock.link"

_REQUEST_FIELDS = {
    gen_ai.GEN_AI_REQUEST_MAX_TOKENS: "max_tokens",
    gen_ai.GEN_AI_REQUEST_TEMPERATURE: "temperature",
    gen_ai.GEN_AI_REQUEST_TOP_P: "top_p",
    gen_ai.GEN_AI_REQUEST_TOP_K: "top_k",
    gen_ai.GEN_AI_REQUEST_SEED: "seed",
    gen_ai.GEN_AI_REQUEST_PRESENCE_PENALTY: "presence_penalty",
    gen_ai.GEN_AI_REQUEST_FREQUENCY_PENALTY: "frequency_penalty",
    TENANT: "tenant",
}


def operation_of(request: GenerateRequest) -> str:
    """Returns the conventions' name for the operation."""
    return "text_completion" if request.messages is None else "chat"


def request_attributes(request: GenerateRequest, model: str) -> Attributes:
    """Returns what a request asks of the model with this name."""
    said: dict[str, Any] = {
        gen_ai.GEN_AI_OPERATION_NAME: operation_of(request),
        gen_ai.GEN_AI_PROVIDER_NAME: "penstock",
        gen_ai.GEN_AI_REQUEST_MODEL: model,
    }
    for name, field in _REQUEST_FIELDS.items():
        if (value := getattr(request, field)) is not None:
            said[name] = value
    if request.n > 1:
        said[gen_ai.GEN_AI_REQUEST_CHOICE_COUNT] = request.n
    if request.priority:
        said[PRIORITY] = request.priority
    return said


def message_attributes(queue: str, operation: str, kind: str | None, request_id: str) -> Attributes:
    """Returns the attributes of a message to or from a queue: the operation in our words and in the conventions'."""
    said = {
        messaging.MESSAGING_SYSTEM: "redis",
        messaging.MESSAGING_DESTINATION_NAME: queue,
        messaging.MESSAGING_OPERATION_NAME: operation,
        REQUEST_ID: request_id,
    }
    return said if kind is None else {**said, messaging.MESSAGING_OPERATION_TYPE: kind}


def end_attributes(
    request_id: str,
    reasons: Sequence[FinishReason],
    *,
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    reasoning_tokens: int | None,
) -> Attributes:
    """Returns how each choice of a reply ended, and the token counts."""
    said: dict[str, Any] = {
        gen_ai.GEN_AI_RESPONSE_ID: request_id,
        gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: tuple(reasons),
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: prompt_tokens,
        gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: cached_tokens,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: completion_tokens,
    }
    if reasoning_tokens:
        said[gen_ai.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS] = reasoning_tokens
    return said
