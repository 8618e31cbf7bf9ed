"""The body of a request for completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator

from penstock.gateway.common.fields import IGNORED, REFUSED, Policy, Refusal, form_of, forms_of, read_fields
from penstock.gateway.common.options import (
    STREAM_OPTIONS,
    RequestOptions,
    Shown,
    check_stream_options,
    shown_of,
    to_request,
)
from penstock.gateway.errors import ApiError
from penstock.producer import GenerateRequest
from penstock.protocol.wire.messages import ResponseFormat

Prompt: TypeAlias = str | list[int]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default, for this API alone."""


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(token) is int and token < 2**31 for token in value)


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    is_several = isinstance(value, list) and len(value) > 0
    if is_several and (all(isinstance(prompt, str) for prompt in value) or all(map(_is_tokens, value))):
        return list(value)
    raise ValueError("must be a text, a list of token ids, or a list of texts or of such lists, none of them empty")


class CompletionBody(RequestOptions):
    """The body's supported fields."""

    prompt: Annotated[Any, AfterValidator(_prompts)]
    n: int | None = None  # these three are read below
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        prompts: list[Prompt] = self.prompt
        return prompts

    @property
    def is_echo_scored(self) -> bool:
        """Whether log-probabilities of the prompt's text are asked for."""
        return bool(self.echo) and self.logprobs is not None

    def to_wire(self) -> dict[str, Any]:
        """Returns the wire's fields, except the prompt. Echoed text has log-probabilities like the rest."""
        values = {"max_tokens": DEFAULT_MAX_TOKENS, **super().to_wire()}
        if self.is_echo_scored:
            values.setdefault("prompt_logprobs", self.logprobs)
        return values

    def requests(self) -> list[GenerateRequest]:
        """Returns the request for the queue, for each prompt.

        Raises:
            ApiError: naming the field that is wrong.
        """
        values = self.to_wire()
        return [to_request(values | _prompt_field(prompt)) for prompt in self.prompts]

    @property
    def shown(self) -> Shown:
        return shown_of(self, logprobs=self.logprobs is not None)


def _prompt_field(prompt: Prompt) -> dict[str, Prompt]:
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


COMPLETION_POLICY = Policy(
    honoured=frozenset(CompletionBody.model_fields),
    ignored=IGNORED,
    refused={
        **REFUSED,
        "suffix": Refusal("text cannot be filled in", ("",)),
        "add_special_tokens": Refusal("the tokenizer decides which are added; give tokens to have none", (True,)),
        **dict.fromkeys(("messages", "tools", "tool_choice"), Refusal("is for POST /v1/chat/completions", ([],))),
        "input": Refusal("is for POST /v1/responses; use prompt"),
        **dict.fromkeys(("instructions", "system"), Refusal("is another API's; put it into prompt")),
    },
    inner={
        **forms_of(CompletionBody),
        "stream_options": STREAM_OPTIONS,
        "response_format": form_of(ResponseFormat),
    },
)


def read_completion(body: Mapping[str, Any]) -> CompletionBody:
    """Raises ApiError naming the field that is wrong."""
    completion = read_fields(COMPLETION_POLICY, CompletionBody, body)
    check_stream_options(completion)
    if completion.best_of not in (None, completion.n or 1):
        message = f"best_of: {completion.best_of} is not n, and answers are not ranked"
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")
    if completion.stream:
        _check_streamed(completion)
    return completion


def _check_streamed(completion: CompletionBody) -> None:
    """Refuses streams with no fixed order, which another replica could not continue."""
    if len(completion.prompts) > 1:
        message = f"prompt: of {len(completion.prompts)} prompts no answer is streamed; send a request for each"
        raise ApiError(400, message, param="prompt", code="invalid_value")
    if completion.echo and completion.logprobs is not None and (completion.n or 1) > 1:
        raise ApiError(400, "n: is 1 with stream, echo and logprobs together", param="n", code="invalid_value")
