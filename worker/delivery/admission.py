"""From a request on the wire to a request of the engine: the worker's limits, the tokens, the model's defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from penstock.engine.errors import InvalidRequest, PromptTooLong
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import Request, SamplingParams
from penstock.producer.wire import GenerateRequest
from penstock.worker.config import WorkerConfig

_T = TypeVar("_T")


class TextEncoder(Protocol):
    """What turns prompts into tokens; `engine.text.tokenizer.Tokenizer` is one. Called from several threads."""

    vocab_size: int  # token ids from here on have no text

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a plain prompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens below `vocab_size`; special ones have none."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """The tokens of a conversation under the model's chat template, ready for the assistant's turn.

        It may block for as long as a template may take: not for the event loop.

        Raises:
            InvalidRequest: the template refuses the messages or fails, or there is none.
        """


def check_limits(request: GenerateRequest, config: WorkerConfig) -> None:
    """Refuses what is over this worker's limits, before any work is done for it.

    Raises:
        InvalidRequest: the message names the limit.
    """
    _limit(request.n, "n", config.max_n, "max_n")
    _limit(len(request.stop), "the number of stop strings", config.max_stop_strings, "max_stop_strings")
    for stop in request.stop:
        _limit(len(stop), "the length of a stop string", config.max_stop_chars, "max_stop_chars")


def encode_prompt(request: GenerateRequest, text: TextEncoder) -> tuple[int, ...]:
    """The prompt's tokens, by whichever of its three forms was given.

    Raises:
        InvalidRequest: the chat template refuses the messages.
    """
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if request.messages is not None:
        return tuple(text.encode_chat([message.model_dump() for message in request.messages]))
    return tuple(text.encode(request.prompt or ""))


def check_prompt(tokens: Sequence[int], config: WorkerConfig) -> None:
    """Raises PromptTooLong if there are more than `max_prompt_tokens`."""
    limit = config.max_prompt_tokens
    if limit is not None and len(tokens) > limit:
        raise PromptTooLong(f"the prompt has {len(tokens)} tokens, the limit max_prompt_tokens is {limit}")


def to_engine_request(
    request: GenerateRequest,
    prompt_token_ids: tuple[int, ...],
    defaults: GenerationDefaults,
    generated: tuple[tuple[int, ...], ...] = (),
) -> Request:
    """A field that the request leaves open takes the model's default. A missing seed stays missing: the engine draws it
    from the request id, so that whoever resumes the request draws the same.

    Raises:
        InvalidRequest: a value is out of range.
    """
    sampling = SamplingParams(
        temperature=_or(request.temperature, defaults.temperature),
        top_k=_or(request.top_k, defaults.top_k),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=_or(request.min_p, defaults.min_p),
        seed=request.seed,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        bad_token_ids=request.bad_token_ids,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
    )
    if request.id is None:
        raise InvalidRequest("the request has no id")
    return Request(
        id=request.id,
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        n=request.n,
        priority=request.priority,
        generated=generated,
    )


def _limit(value: int, what: str, limit: int, name: str) -> None:
    if value > limit:
        raise InvalidRequest(f"{what} is {value}, the limit {name} is {limit}")


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
