"""Requests as they travel over Redis: one JSON field `request`, or flat fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from penstock.producer.wire.errors import WireError

VERSION = 1
"""Raised when an entry's meaning changes; a worker refuses versions it does not know."""

ID_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Ids become part of keys: braces, spaces and control characters would break hash tags and shells."""

# https://www.w3.org/TR/trace-context: version ff and ids of zeros are invalid; a version after 00 may append more.
_TRACEPARENT = re.compile(
    r"(?!ff|00.{53}.)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]*)?"
)

MAX_FIELDS = 128
"""Of one request entry, and of its JSON document: several times what the schema has. What has more is not looked at."""


def _from_json(value: object) -> object:
    """Flat entries carry lists and maps as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from error
    return value


def _one_or_many(value: object) -> object:
    """`stop` may be one plain string; text that begins with `[` is a JSON list."""
    if isinstance(value, str):
        return _from_json(value) if value.startswith("[") else [value]
    return value


def _encodable(text: str) -> str:
    """JSON can spell half of a character (a lone surrogate), which no tokenizer and no UTF-8 stream takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"is not Unicode text: {error.reason} at character {error.start}") from None
    return text


def _w3c(value: str) -> str:
    if not _TRACEPARENT.fullmatch(value):
        raise ValueError("must be a W3C traceparent, such as 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    return value


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(_from_json)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
LogitBias = Annotated[dict[TokenId, Bias], BeforeValidator(_from_json)]


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: Text


class GenerateRequest(BaseModel):
    """One prompt and how to continue it. Exactly one of `prompt`, `messages` and `prompt_token_ids` is given.

    A sampling field left at None takes the model's own default (its `generation_config.json`), then the neutral value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    v: Literal[1] = 1
    id: Annotated[str, Field(pattern=f"^{ID_PATTERN.pattern}$")] | None = None
    prompt: Text | None = None
    messages: Annotated[tuple[Message, ...], BeforeValidator(_from_json)] | None = None
    prompt_token_ids: TokenIds | None = None

    n: int = Field(1, ge=1, le=64)
    max_tokens: int = Field(256, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: TokenIds = ()
    bad_token_ids: TokenIds = ()
    stop: Annotated[tuple[Annotated[Text, Field(min_length=1)], ...], BeforeValidator(_one_or_many)] = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    priority: int = Field(0, ge=-1000, le=1000)  # higher runs first
    timeout_s: float | None = Field(None, gt=0.0, le=7 * 86_400.0)  # from the moment Redis accepted the request
    traceparent: Annotated[str, AfterValidator(_w3c)] | None = Field(None, max_length=256)  # bound to the worker's logs

    @model_validator(mode="after")
    def _check_together(self) -> GenerateRequest:
        given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of prompt, messages, prompt_token_ids must be given, not {given or 'none'}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.messages is not None and not self.messages:
            raise ValueError("messages is empty")
        return self

    def to_entry(self) -> dict[str, str]:
        """The fields to XADD: one JSON document that leaves out what was left at its default."""
        return {"request": self.model_dump_json(exclude_defaults=True)}


def entry_size(fields: Mapping[bytes, bytes]) -> int:
    """Bytes of all names and values of an entry, which `max_body_bytes` bounds."""
    return sum(len(name) + len(value) for name, value in fields.items())


def parse_request(
    entry_id: str, fields: Mapping[bytes, bytes], *, max_body_bytes: int, size: int | None = None
) -> GenerateRequest:
    """Reads a request entry as `XREADGROUP` gives it. The result always has an `id`.

    Args:
        entry_id: of the entry.
        fields: of the entry; of one that is over the limit perhaps only `id`.
        max_body_bytes: the limit on names and values together.
        size: that of the entry, where not all `fields` are given.

    Raises:
        WireError: with the id that a reply can be sent to, the entry's own where the request names none.
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
    try:
        request = GenerateRequest.model_validate(values)
    except (ValidationError, RecursionError) as error:
        _refuse("invalid_request", explain(error), request_id)
    return request if request.id is not None else request.model_copy(update={"id": request_id})


def explain(error: Exception) -> str:
    """One line that names each offending field; pydantic's own text spans many and links to its website."""
    if not isinstance(error, ValidationError):
        return f"the request is nested too deeply: {error}"
    parts = []
    for item in error.errors(include_url=False)[:5]:
        where = _shown(".".join(map(str, item["loc"])))
        given = "" if item["type"] == "value_error" and not where else f", not {repr(item['input'])[:80]}"
        parts.append(f"{where or 'request'}: {item['msg']}{given}")
    return "; ".join(parts)


def _json_document(flat: Mapping[str, str], fallback_id: str) -> dict[str, Any]:
    others = sorted(set(flat) - {"request", "id"})
    if others:
        _refuse(
            "invalid_request", f"beside `request` only `id` may stand, not {_shown(', '.join(others))}", fallback_id
        )
    try:
        document = json.loads(flat["request"])
    except (ValueError, RecursionError) as error:
        _refuse("invalid_request", f"field `request` is not JSON: {error}", fallback_id)
    if not isinstance(document, dict):
        _refuse("invalid_request", f"field `request` holds {type(document).__name__}, not an object", fallback_id)
    if "id" in flat:
        if document.get("id", flat["id"]) != flat["id"]:
            _refuse(
                "invalid_request",
                f"`id` {_shown(flat['id'])} and `request.id` {_shown(str(document['id']))} differ",
                fallback_id,
            )
        document["id"] = flat["id"]
    if len(document) > MAX_FIELDS:
        request_id = _readable_id(document.get("id")) or fallback_id
        _refuse("invalid_request", f"`request` has {len(document)} fields, the limit is {MAX_FIELDS}", request_id)
    return document


def _readable_id(value: object) -> str | None:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) and ID_PATTERN.fullmatch(text) else None


def _shown(text: str) -> str:
    """Text from outside, fit for one line of an error message."""
    return text if text.isprintable() and len(text) <= 80 else repr(text)[:80]


def _refuse(code: str, message: str, request_id: str) -> NoReturn:
    raise WireError(code, message, request_id=request_id)
