"""Turns a caller's arguments into a checked `GenerateRequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from pydantic import ValidationError

from penstock.protocol.errors import RequestRefused
from penstock.protocol.wire import ID_PATTERN, GenerateRequest, Message, Sampling, explain, in_python

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message | Mapping[str, Any]] | GenerateRequest
"""Plain text, token ids, chat messages (`{"role": ..., "content": ...}`), or a request with everything in it."""


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
    return _made(_field_for(prompt), prompt, sampling, fresh_id)


def request_of_tokens(token_ids: Sequence[int], *, fresh_id: str, skip_special_tokens: bool = True) -> GenerateRequest:
    """Returns a request that asks a question about tokens. Errors name `token_ids`.

    Raises:
        RequestRefused: they are not a list of token ids.
    """
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, _TEXT_LIKE):
        raise RequestRefused(
            None, "invalid_request", f"token_ids: must be a list of integers, not {in_python(token_ids)}"
        )
    given: Sampling = {} if skip_special_tokens else {"skip_special_tokens": False}
    return _made("prompt_token_ids", token_ids, given, fresh_id, {"prompt_token_ids": "token_ids"})


def check_options(sampling: Sampling) -> None:
    """Passes if these options are valid in a request, whatever its prompt.

    Raises:
        RequestRefused: as `build_request`.
    """
    _made("messages", _ANY_CHAT, sampling, fresh_id="x")


_ANY_CHAT = ({"role": "user", "content": "x"},)
"""A prompt that allows every option."""

_PROMPTS = frozenset({"prompt", "messages", "prompt_token_ids"})
_ALSO_CALLED = {**GenerateRequest.other_names, "top_logprobs": "logprobs"}
_TEXT_LIKE = (str, bytes, bytearray, memoryview)


def _made(
    field: str, prompt: object, sampling: Sampling, fresh_id: str, called: Mapping[str, str] = MappingProxyType({})
) -> GenerateRequest:
    """Builds the request.

    Args:
        field: the request's field for the prompt.
        prompt: in one of its forms.
        sampling: the options given with it.
        fresh_id: the request's id, unless it is given one.
        called: the caller's names for fields of the request, where they differ from the options' names.

    Raises:
        RequestRefused: as `build_request`.
    """
    if given := _PROMPTS & sampling.keys():
        raise RequestRefused(None, "invalid_request", f"{min(given)}: there is a prompt already")
    values: dict[str, Any] = {**sampling, field: prompt}
    if values.get("id") is None:
        values["id"] = fresh_id
    try:
        return GenerateRequest.model_validate(values)
    except (ValidationError, RecursionError) as error:
        named = sampling.get("id")
        request_id = named if isinstance(named, str) and ID_PATTERN.fullmatch(named) else None
        by_caller = {ours: name for name, ours in _ALSO_CALLED.items() if name in sampling}
        raise RequestRefused(request_id, "invalid_request", explain(error, {**called, **by_caller})) from None


def _field_for(prompt: object) -> str:
    if isinstance(prompt, str):
        return "prompt"
    if not isinstance(prompt, Sequence) or isinstance(prompt, _TEXT_LIKE):
        forms = "text, a list of token ids, a list of messages or a GenerateRequest"
        raise RequestRefused(None, "invalid_request", f"prompt: must be {forms}, not {in_python(prompt)}")
    return "prompt_token_ids" if len(prompt) > 0 and isinstance(prompt[0], int) else "messages"
