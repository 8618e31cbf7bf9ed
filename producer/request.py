"""From what a caller passes to a checked `GenerateRequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from pydantic import ValidationError

from penstock.producer.errors import RequestRefused
from penstock.producer.wire import GenerateRequest, Message, ResponseFormat, ToolChoice, explain

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message | Mapping[str, Any]] | GenerateRequest
"""Plain text, token ids, chat messages (`{"role": ..., "content": ...}`), or a request with everything in it."""


class Sampling(TypedDict, total=False):
    """The options beside a prompt: the other fields of `GenerateRequest`, which has their ranges and defaults, and the
    names that OpenAI's API has for some of them.
    """

    id: str
    tools: Sequence[Mapping[str, Any]]
    tool_choice: ToolChoice | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    response_format: ResponseFormat | Mapping[str, Any]
    regex: str
    choice: Sequence[str]
    grammar: str
    n: int
    max_tokens: int
    max_completion_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_token_ids: Sequence[int]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | bool
    top_logprobs: int
    prompt_logprobs: int
    echo: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    priority: int
    timeout_s: float
    keep_s: float
    tenant: str
    affinity: str
    traceparent: str
    tracestate: str


def build_request(prompt: Prompt, sampling: Sampling, *, fresh_id: str) -> GenerateRequest:
    """Checks a request and gives it `fresh_id` unless it has an id.

    Raises:
        RequestRefused: `invalid_request`, naming each field that is unknown, missing or out of range.
        TypeError: sampling options beside a GenerateRequest.
    """
    if isinstance(prompt, GenerateRequest):
        if sampling:
            raise TypeError(f"set {', '.join(sampling)} in the GenerateRequest, not beside it")
        return prompt if prompt.id is not None else prompt.model_copy(update={"id": fresh_id})
    try:
        return GenerateRequest.model_validate({"id": fresh_id, **sampling, _field_for(prompt): prompt})
    except ValidationError as error:
        raise RequestRefused(sampling.get("id"), "invalid_request", explain(error)) from None


def _field_for(prompt: object) -> str:
    if isinstance(prompt, str):
        return "prompt"
    is_ids = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int)
    return "prompt_token_ids" if is_ids else "messages"
