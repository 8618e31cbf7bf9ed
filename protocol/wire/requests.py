"""Requests as they travel over Redis: one JSON field `request`, or flat fields."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, islice
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from penstock.protocol.ranks import HIGHEST_PRIORITY, LOWEST_PRIORITY
from penstock.protocol.wire.errors import WireError
from penstock.protocol.wire.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Message,
    NamedTool,
    ResponseFormat,
    ToolChoice,
    ToolObject,
)
from penstock.protocol.wire.trace_context import EXAMPLE as TRACEPARENT_EXAMPLE
from penstock.protocol.wire.trace_context import is_traceparent, is_tracestate, trace_context
from penstock.protocol.wire.values import (
    FAIL_FAST,
    JsonObject,
    Text,
    WireModel,
    explain,
    from_json,
    json_kind,
    no_boolean,
    shown,
    spelled,
    texts_or_text,
)

VERSION = 1
"""Raised when an entry's meaning changes; a worker refuses versions it does not know."""

ID_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Ids become part of keys: braces, spaces and control characters would break hash tags and shells."""

MIN_KEEP_S = 60
"""Shortest time to keep a reply after its end, so that a worker that takes over from a dead one still sees the end."""

MAX_KEEP_S = 366 * 86_400
"""Longest time to keep a reply after its end; a worker's own limit is `max_keep_s`."""

MAX_FIELDS = 128
"""Limit on the fields of a request entry and of its JSON document, several times the schema's. Larger ones are not
read.
"""


def _one_or_many(value: object) -> object:
    """Accepts one plain string for `stop`; text that begins with `[` is a JSON list."""
    if isinstance(value, str):
        return from_json(value) if value.startswith("[") else [value]
    return texts_or_text(value)


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


def _piece_by_piece(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
    """Acts like FAIL_FAST, which maps do not have."""
    if not isinstance(value, Mapping):
        return validate(value)
    items = iter(value.items())
    made = validate({})
    _only_numbers(chain(value, value.values()))
    while piece := dict(islice(items, _PIECE)):
        made |= validate(piece)
    return made


def _in_pieces(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validates a long list in pieces: one call would block all other threads, a tenth of a second for 500,000
    numbers.
    """
    if not isinstance(value, Collection) or isinstance(value, str | Mapping):
        return validate(value)
    ids = value if isinstance(value, (list, tuple)) else tuple(value)
    _only_numbers(ids)
    if len(ids) <= _LONG_PIECE:
        return validate(ids)
    try:
        pieces = [validate(ids[start : start + _LONG_PIECE]) for start in range(0, len(ids), _LONG_PIECE)]
    except ValidationError:
        return validate(ids)  # its error says where
    return tuple(chain.from_iterable(pieces))


def _only_numbers(values: Iterable[object]) -> None:
    """Rejects booleans, which would be 0 and 1, and bytes, which would be read as text. A million takes some 10 ms."""
    if wrong := _NO_NUMBERS.intersection(map(type, values)):
        raise ValueError(f"holds a {min(kind.__name__ for kind in wrong)}, where only numbers may stand")


_NO_NUMBERS = frozenset({bool, bytes})
_PIECE = 256
_LONG_PIECE = 4096

_Int = Annotated[int, BeforeValidator(no_boolean)]
Float = Annotated[float, BeforeValidator(no_boolean)]
_Name = Annotated[str, Strict(), Field(pattern=f"^{ID_PATTERN.pattern}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**63)]
_TokenIds = Annotated[tuple[TokenId, ...], FAIL_FAST, WrapValidator(_in_pieces), BeforeValidator(from_json)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
LogitBias = Annotated[dict[TokenId, Bias], WrapValidator(_piece_by_piece), BeforeValidator(from_json)]
_Texts = Annotated[tuple[Annotated[Text, Field(min_length=1)], ...], FAIL_FAST, BeforeValidator(_one_or_many)]
Messages = Annotated[tuple[Message, ...], FAIL_FAST, Field(max_length=MAX_MESSAGES), BeforeValidator(from_json)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_OF_CHATS = (
    "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "add_generation_prompt",
    "continue_final_message", "chat_template_kwargs",
)  # fmt: skip
_TRACE = ("traceparent", "tracestate")
_CONSTRAINTS = ("response_format", "regex", "choice", "grammar")
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


class GenerateRequest(WireModel):
    """One prompt and how to continue it. Exactly one of `prompt`, `messages` and `prompt_token_ids` is given.

    A sampling field left at None takes the model's own default (from its `generation_config.json`), or else the neutral
    value.
    """

    other_names: ClassVar[Mapping[str, str]] = {"max_completion_tokens": "max_tokens"}

    v: Annotated[Literal[1], BeforeValidator(_number)] = 1
    id: _Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    prompt_token_ids: _TokenIds | None = None

    tools: Annotated[tuple[ToolObject, ...], FAIL_FAST, Field(max_length=MAX_TOOLS), BeforeValidator(from_json)] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[JsonObject, AfterValidator(_free_variables)] = Field(default_factory=dict)

    response_format: Annotated[ResponseFormat, BeforeValidator(from_json)] | None = None
    regex: Annotated[Text, Field(min_length=1)] | None = None
    choice: _Texts = ()
    grammar: Annotated[Text, Field(min_length=1)] | None = None  # in Lark's notation

    n: _Int = Field(1, ge=1, le=64)
    max_tokens: _Int = Field(256, ge=1, lt=2**63)
    min_tokens: _Int = Field(0, ge=0, lt=2**63)
    temperature: Float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: Float | None = Field(None, gt=0.0, le=1.0)
    top_k: _Int | None = Field(None, ge=0, lt=2**63)
    min_p: Float | None = Field(None, ge=0.0, le=1.0)
    seed: _Int | None = Field(None, ge=0, lt=2**63)
    repetition_penalty: Float | None = Field(None, gt=0.0, le=100.0)
    presence_penalty: Float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: Float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: _TokenIds = ()
    bad_token_ids: _TokenIds = ()
    stop: _Texts = ()
    stop_token_ids: _TokenIds = ()
    ignore_eos: bool = False
    logprobs: _Int | None = Field(None, ge=0, le=20)
    prompt_logprobs: _Int | None = Field(None, ge=0, le=20)
    echo: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    priority: _Int = Field(0, ge=LOWEST_PRIORITY, le=HIGHEST_PRIORITY)  # higher runs first
    timeout_s: Float | None = Field(None, gt=0.0, le=7 * 86_400.0)  # from the moment Redis accepted the request
    keep_s: Float | None = Field(None, ge=MIN_KEEP_S, le=MAX_KEEP_S)  # from the reply's end; None: the worker's default
    tenant: _Name | None = None  # tenants share the capacity
    affinity: _Name | None = None  # requests with the same value go to one worker, as far as it has capacity
    cache_salt: Annotated[Text, Field(min_length=1, max_length=128)] | None = None  # shared prefixes have the same
    traceparent: Annotated[str, Strict(), AfterValidator(_traceparent)] | None = None  # the trace that it is a part of
    tracestate: Annotated[str, Strict(), AfterValidator(_tracestate)] | None = None  # what tracing systems add to that

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
            raise ValueError(f"tools: {max(names, key=names.count)} is there more than once")
        chosen = self.chosen_tools()
        unknown = [name for name in chosen or () if name not in names]
        if unknown:
            raise ValueError(
                f"tool_choice: {unknown[0]} is none of the tools: {', '.join(names)[:200] or 'there are none'}"
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

        The id is also a field beside it: a worker reads nothing else of an entry over `max_body_bytes`. The fields that
        decide its turn are only beside it, as nobody looks into documents for those.
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
"""Fields that decide a request's turn and its worker. They stand beside a document, where the server's scripts read
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
            "invalid_request", f"beside `request` only {allowed} may stand, not {shown(', '.join(others))}", fallback_id
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
