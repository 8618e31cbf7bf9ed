"""Requests as they travel over Redis: one JSON field `request`, or flat fields."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import AfterValidator, BeforeValidator, Field, Strict, ValidationError, WrapValidator, model_validator

from penstock.protocol.wire.errors import WireError
from penstock.protocol.wire.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Message,
    NamedTool,
    ReasoningEffort,
    ResponseFormat,
    ToolChoice,
    ToolObject,
)
from penstock.protocol.wire.parameters import PARAMETERS, in_range, parameter
from penstock.protocol.wire.trace_context import EXAMPLE as TRACEPARENT_EXAMPLE
from penstock.protocol.wire.trace_context import is_traceparent, is_tracestate, trace_context
from penstock.protocol.wire.values import (
    FAIL_FAST,
    FilledText,
    Float,
    Int,
    JsonObject,
    Text,
    Texts,
    TokenId,
    TokenIds,
    WireModel,
    explain,
    from_json,
    json_kind,
    piece_by_piece,
    shown,
    spelled,
)

VERSION = 1
"""Raised when an entry's meaning changes; a worker refuses versions it does not know."""

ID_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Ids become part of keys: braces, spaces and control characters would break hash tags and shells."""

MAX_FIELDS = 128
"""Limit on the fields of a request entry and of its JSON document, several times the schema's. Larger ones are not
read.
"""


def _number(value: object) -> object:
    """Converts numbers in flat entries from text, which a literal does not accept."""
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else value


def _traceparent(value: str) -> str:
    if not is_traceparent(value):
        raise ValueError(f"must be a W3C traceparent, such as {TRACEPARENT_EXAMPLE}, not {value!r:.80}")
    return value


def _tracestate(value: str) -> str:
    if not is_tracestate(value):
        raise ValueError(f"must be a W3C tracestate, such as vendor=value,other=value, not {value!r:.80}")
    return value


_RESERVED_VARIABLES = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "reasoning_effort",
        "raise_exception", "strftime_now", "dict", "namespace",
    }
)  # fmt: skip


def _free_variables(values: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(_RESERVED_VARIABLES & values.keys())
    if taken:
        raise ValueError(f"may not set {', '.join(taken)}, which the worker passes to the template")
    return values


_Name = Annotated[str, Strict(), Field(pattern=f"^{ID_PATTERN.pattern}$")]
_Bias = Annotated[float, Field(**in_range("logit_bias"))]
_LogitBias = Annotated[dict[TokenId, _Bias], WrapValidator(piece_by_piece), BeforeValidator(from_json)]
_Messages = Annotated[tuple[Message, ...], FAIL_FAST, Field(max_length=MAX_MESSAGES), BeforeValidator(from_json)]
_Tools = Annotated[tuple[ToolObject, ...], FAIL_FAST, Field(max_length=MAX_TOOLS), BeforeValidator(from_json)]

_OF_CHATS = tuple(
    name for name, each in PARAMETERS.items() if "chat" in each.takers and "completions" not in each.takers
)
_TRACE = ("traceparent", "tracestate")
_CONSTRAINTS = ("response_format", "regex", "choice", "grammar")


class GenerateRequest(WireModel):
    """One prompt and how to continue it. Exactly one of `prompt`, `messages` and `prompt_token_ids` is given.

    All other fields are parameters, which `Sampling` declares. One that is None was left out: the table in docs/wire.md
    says what holds then.
    """

    other_names: ClassVar[Mapping[str, str]] = {"max_completion_tokens": "max_tokens"}

    v: Annotated[Literal[1], BeforeValidator(_number)] = 1
    id: _Name | None = parameter("id")
    prompt: Text | None = None
    messages: _Messages | None = None
    prompt_token_ids: TokenIds | None = None

    tools: _Tools = parameter("tools")
    tool_choice: ToolChoice | None = parameter("tool_choice")
    parallel_tool_calls: bool = parameter("parallel_tool_calls")
    reasoning_effort: ReasoningEffort | None = parameter("reasoning_effort")
    add_generation_prompt: bool | None = parameter("add_generation_prompt")
    continue_final_message: bool = parameter("continue_final_message")
    chat_template_kwargs: Annotated[JsonObject, AfterValidator(_free_variables)] = Field(default_factory=dict)

    response_format: Annotated[ResponseFormat, BeforeValidator(from_json)] | None = parameter("response_format")
    regex: FilledText | None = parameter("regex")
    choice: Texts = parameter("choice")
    grammar: FilledText | None = parameter("grammar")

    n: Int = parameter("n")
    max_tokens: Int = parameter("max_tokens")
    min_tokens: Int = parameter("min_tokens")
    temperature: Float | None = parameter("temperature", allow_inf_nan=False)
    top_p: Float | None = parameter("top_p")
    top_k: Int | None = parameter("top_k")
    min_p: Float | None = parameter("min_p")
    seed: Int | None = parameter("seed")
    repetition_penalty: Float | None = parameter("repetition_penalty")
    presence_penalty: Float = parameter("presence_penalty")
    frequency_penalty: Float = parameter("frequency_penalty")
    logit_bias: _LogitBias = Field(default_factory=dict)
    allowed_token_ids: TokenIds = parameter("allowed_token_ids")
    bad_token_ids: TokenIds = parameter("bad_token_ids")
    stop: Texts = parameter("stop")
    stop_token_ids: TokenIds = parameter("stop_token_ids")
    ignore_eos: bool = parameter("ignore_eos")
    logprobs: Int | None = parameter("logprobs")
    prompt_logprobs: Int | None = parameter("prompt_logprobs")
    echo: bool = parameter("echo")
    include_stop_str_in_output: bool = parameter("include_stop_str_in_output")
    skip_special_tokens: bool = parameter("skip_special_tokens")

    priority: Int = parameter("priority")
    timeout_s: Float | None = parameter("timeout_s")
    keep_s: Float | None = parameter("keep_s")
    tenant: _Name | None = parameter("tenant")
    affinity: _Name | None = parameter("affinity")
    exact: bool = parameter("exact")
    cache_salt: Annotated[Text, Field(min_length=1, max_length=128)] | None = parameter("cache_salt")
    traceparent: Annotated[str, Strict(), AfterValidator(_traceparent)] | None = parameter("traceparent")
    tracestate: Annotated[str, Strict(), AfterValidator(_tracestate)] | None = parameter("tracestate")

    @model_validator(mode="before")
    @classmethod
    def _join_logprobs(cls, values: object) -> object:
        """Accepts OpenAI's `logprobs: true, top_logprobs: k` for `logprobs: k`."""
        if not isinstance(values, dict) or not values.keys() & {"logprobs", "top_logprobs"}:
            return values
        joined = dict(values)
        top, given = joined.pop("top_logprobs", None), joined.get("logprobs")
        wants = {"true": True, "false": False}.get(given.lower(), given) if isinstance(given, str) else given
        if top is not None and wants is not True:
            raise ValueError(f"top_logprobs: goes with logprobs true, not {spelled(given)}")
        if isinstance(wants, bool):
            joined["logprobs"] = (0 if top is None else top) if wants else None
        return joined

    @model_validator(mode="after")
    def _check_together(self) -> GenerateRequest:
        given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of prompt, messages, prompt_token_ids must be given, not {given or 'none'}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        self._check_chat()
        self._check_tools()
        named = self.model_fields_set
        constraints = [name for name in _CONSTRAINTS if name in named and getattr(self, name)]
        if constraints and self.response_format is not None and self.response_format.type == "text":
            constraints.remove("response_format")
        if len(constraints) > 1:
            raise ValueError(f"one of {', '.join(_CONSTRAINTS)} can be given, not {' and '.join(constraints)}")
        if constraints and self.is_tool_required:
            raise ValueError(f"tool_choice requires a call, which contradicts {constraints[0]}: there is no text then")
        return self

    def _check_chat(self) -> None:
        if self.messages is None:
            for name in _OF_CHATS if not self.model_fields_set.isdisjoint(_OF_CHATS) else ():
                if name in self.model_fields_set and self._is_set(name):
                    raise ValueError(f"{name} is for chats, which need messages")
        elif not self.messages:
            raise ValueError("messages: is empty")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other")

    def _is_set(self, name: str) -> bool:
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) != default)

    def _check_tools(self) -> None:
        if not self.tools and self.tool_choice is None:
            return
        names = [tool["function"]["name"] for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError(f"tools: {max(names, key=names.count)} is given more than once")
        chosen = self.chosen_tools()
        unknown = [name for name in chosen or () if name not in names]
        if unknown:
            raise ValueError(
                f"tool_choice: {unknown[0]} is not one of the tools: {', '.join(names)[:200] or 'there are none'}"
            )
        if self.is_tool_required and not names:
            raise ValueError("tool_choice: required, but there are no tools")

    def chosen_tools(self) -> tuple[str, ...] | None:
        """Returns the names that `tool_choice` allows; None: all."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return (choice.function.name,)
        if choice == "none":
            return ()
        return (
            None
            if choice is None or isinstance(choice, str)
            else tuple(t.function.name for t in choice.allowed_tools.tools)
        )

    @property
    def is_tool_required(self) -> bool:
        """Whether the answer has to call a tool."""
        choice = self.tool_choice
        if choice is None or isinstance(choice, str):
            return choice == "required"
        return isinstance(choice, NamedTool) or choice.allowed_tools.mode == "required"

    def to_entry(self) -> dict[str, str]:
        """Returns the fields to XADD: one JSON document without what was left at its default.

        The id is also a field beside the document, because a worker reads nothing else of an entry over
        `max_body_bytes`. The fields that decide the request's turn are only beside the document, because the server's
        scripts read no documents.
        """
        fields = {"request": self.model_dump_json(exclude_defaults=True, exclude=BESIDE)}
        beside = self.model_dump(mode="json", include=BESIDE, exclude_defaults=True)
        fields |= {name: str(value) for name, value in beside.items()}
        if self.affinity is None and (beginning := self._beginning()) is not None:
            salted = beginning if self.cache_salt is None else f"{self.cache_salt}\0{beginning}"
            fields["affinity"] = hashlib.sha1(salted.encode(), usedforsecurity=False).hexdigest()[:16]
        return fields if self.id is None else {**fields, "id": self.id}

    def _beginning(self) -> str | None:
        """Returns the beginning of the prompt, if it is long enough to be worth caching: the server reads no
        document.
        """
        if self.prompt_token_ids is not None:
            ids = self.prompt_token_ids[: AFFINE_CHARS // 4]
            return ",".join(map(str, ids)) if len(ids) == AFFINE_CHARS // 4 else None
        text = self.prompt or ""
        for message in self.messages or ():
            text += message.model_dump_json(exclude_defaults=True)
            if len(text) >= AFFINE_CHARS:
                break
        return text[:AFFINE_CHARS] if len(text) >= AFFINE_CHARS else None


AFFINE_CHARS = 1000
"""Prompts that share this many first characters go to one worker, unless they say otherwise."""

BESIDE = {"tenant", "priority", "timeout_s", "affinity"}
"""Fields that decide a request's turn and its worker. They go beside a document, where the server's scripts read
them.
"""


def entry_size(fields: Mapping[bytes, bytes]) -> int:
    """Returns the bytes of all names and values of an entry, which `max_body_bytes` limits."""
    return sum(len(name) + len(value) for name, value in fields.items())


def parse_request(
    entry_id: str, fields: Mapping[bytes, bytes], *, max_body_bytes: int, size: int | None = None
) -> GenerateRequest:
    """Reads a request entry as `XREADGROUP` returns it. The result always has an `id`. An invalid trace context is
    ignored.

    Args:
        entry_id: the entry's id.
        fields: the entry's fields; if it is over the limit, perhaps only `id`.
        max_body_bytes: the limit on names and values together.
        size: the entry's size, if not all `fields` are given.

    Raises:
        WireError: with the id that a reply can be sent to: the entry's own if the request names none.
    """
    fallback_id = _readable_id(fields.get(b"id")) or entry_id
    if size is None:
        size = entry_size(fields)
    if size > max_body_bytes:
        _refuse("too_large", f"the entry has {size} bytes, the limit max_body_bytes is {max_body_bytes}", fallback_id)
    if len(fields) > MAX_FIELDS:
        _refuse("invalid_request", f"the entry has {len(fields)} fields, the limit is {MAX_FIELDS}", fallback_id)
    try:
        flat = {name.decode(): value.decode() for name, value in fields.items()}
    except UnicodeDecodeError as error:
        _refuse("invalid_request", f"the entry is not UTF-8: {error}", fallback_id)
    values: dict[str, Any] = dict(flat)
    if "request" in flat:
        values = _json_document(flat, fallback_id)
    if not values:
        _refuse("invalid_request", "the entry has no fields", fallback_id)
    request_id = _readable_id(values.get("id")) or fallback_id
    if values.get("id") is None:
        values["id"] = request_id
    if values.keys() & _TRACE:  # by W3C's rule an invalid context is ignored and refuses no request
        trace = trace_context(values.get("traceparent"), values.get("tracestate"))
        values = {name: value for name, value in values.items() if name not in _TRACE} | trace
    try:
        return GenerateRequest.model_validate(values)
    except (ValidationError, RecursionError) as error:
        _refuse("invalid_request", explain(error), request_id)


def _json_document(flat: Mapping[str, str], fallback_id: str) -> dict[str, Any]:
    others = sorted(set(flat) - {"request", "id"} - BESIDE)
    if others:
        allowed = ", ".join(f"`{name}`" for name in ("id", *sorted(BESIDE)))
        _refuse(
            "invalid_request",
            f"beside `request` only {allowed} may be given, not {shown(', '.join(others))}",
            fallback_id,
        )
    try:
        document = json.loads(flat["request"])
    except (ValueError, RecursionError) as error:
        _refuse("invalid_request", f"field `request` is not JSON: {error}", fallback_id)
    if not isinstance(document, dict):
        _refuse("invalid_request", f"field `request` holds {json_kind(document)}, not an object", fallback_id)
    if "id" in flat:
        if document.get("id", flat["id"]) != flat["id"]:
            _refuse(
                "invalid_request",
                f"`id` {shown(flat['id'])} and `request.id` {shown(str(document['id']))} differ",
                fallback_id,
            )
        document["id"] = flat["id"]
    for name in BESIDE & flat.keys():
        if str(document.get(name, flat[name])) != flat[name]:
            message = f"`{name}` {shown(flat[name])} and `request.{name}` {shown(str(document[name]))} differ"
            _refuse("invalid_request", message, fallback_id)
        document[name] = flat[name]
    if len(document) > MAX_FIELDS:
        request_id = _readable_id(document.get("id")) or fallback_id
        _refuse("invalid_request", f"`request` has {len(document)} fields, the limit is {MAX_FIELDS}", request_id)
    return document


def _readable_id(value: object) -> str | None:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) and ID_PATTERN.fullmatch(text) else None


def _refuse(code: str, message: str, request_id: str) -> NoReturn:
    raise WireError(code, message, request_id=request_id)
