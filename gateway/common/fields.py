"""Treatment of a request's fields, at every depth: each is honoured, ignored for a reason, refused, or unknown.

docs/gateway-fields.md lists those that have a name here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from penstock.gateway.common.near import nearest
from penstock.gateway.errors import ApiError, invalid_value
from penstock.gateway.http.passed_over import is_strict, pass_over
from penstock.protocol.wire.values import WireModel, shown, unknown_field

BodyT = TypeVar("BodyT", bound="Body")


class Body(WireModel):
    """Fields with JSON's types: strings do not count as numbers, nor booleans. 4.0 is the number 4."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, values: object) -> object:
        if type(values) is not dict or float not in map(type, values.values()):
            return values
        counts = _counts(cls)
        return {
            name: int(value) if type(value) is float and value.is_integer() and name in counts else value
            for name, value in values.items()
        }


@cache
def _counts(model: type[Body]) -> frozenset[str]:
    """Returns the fields that are whole numbers."""
    kinds = {name: set(_types_in(each.annotation)) for name, each in model.model_fields.items()}
    return frozenset(name for name, found in kinds.items() if int in found and float not in found)


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)


class Refusal(NamedTuple):
    """Reason to refuse a field, unless it has one of the values that ask for nothing."""

    reason: str
    neutral: Sequence[object] = ()
    details: Mapping[str, Any] | None = None  # for programs, in APIs whose errors have a place for them


Unknown: TypeAlias = Literal["spelled", "passed", "left_out"]
"""What happens to an unknown field.

- `spelled`: it is refused if it is nearly a known name, and passed over otherwise.
- `passed`: it is passed over.
- `left_out`: the same, even where fields are strict: answers come back with whatever their server has added.
"""


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy of one kind of object: the body of an API, or an object at a place in it.

    Its `ignored` fields ask for nothing that an answer could lack. `inner` has the policies of objects inside of
    honoured fields; what is in others is not a field, such as the keys of a JSON schema.
    """

    honoured: frozenset[str]
    ignored: Mapping[str, str] = field(default_factory=dict)  # maps to the reason
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    inner: Mapping[str, Policy] = field(default_factory=dict)
    unknown: Unknown = "spelled"

    def honoured_of(self, body: Mapping[str, Any], place: str = "") -> dict[str, Any]:
        """Returns the honoured fields of the object at a place. A null field counts as left out.

        Raises:
            ApiError: a field is refused, or unknown and not passed over.
        """
        return {name: value for name, value in self.taken(body, place).items() if value is not None}

    def taken(self, body: Mapping[str, Any], place: str = "") -> dict[str, Any]:
        """Returns the same with the honoured fields that are null."""
        taken = {}
        for name, value in body.items():
            if name in self.honoured:
                taken[name] = self._inside(name, value, place)
            elif value is not None:
                self._pass_over(name, value, place)
        return taken

    def _inside(self, name: str, value: object, place: str) -> object:
        policy = self.inner.get(name)
        if policy is None:
            return value
        inside = _at(place, name)
        if isinstance(value, dict):
            return policy.taken(value, inside)
        if isinstance(value, list):
            return [
                policy.taken(each, f"{inside}[{number}]") if isinstance(each, dict) else each
                for number, each in enumerate(value)
            ]
        return value

    def _pass_over(self, name: str, value: object, place: str) -> None:
        if name in self.refused:
            reason, neutral, details = self.refused[name]
            if value not in neutral:
                raise _refusal(place, name, f"{name}: {reason}", "unsupported_parameter", details)
            return
        if name not in self.ignored:
            self._check_unknown(name, place)
        elif value in _NOTHING:
            return
        pass_over(_at(place, name))

    def _check_unknown(self, name: str, place: str) -> None:
        if is_strict() and self.unknown != "left_out":
            raise _refusal(place, name, unknown_field(name, self.honoured), "unknown_parameter")
        if self.unknown == "spelled" and (meant := nearest(name, self._known)) is not None:
            raise _refusal(place, name, f"unknown field {shown(name)}, did you mean {meant}?", "unknown_parameter")

    @property
    def _known(self) -> Sequence[str]:
        return [*sorted(self.honoured), *self.refused, *self.ignored]


_NOTHING: Sequence[object] = ([], {}, "disabled", "standard")
"""Values of an ignored field that ask for nothing, and need not be reported."""


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _refusal(place: str, name: str, says: str, code: str, details: Mapping[str, Any] | None = None) -> ApiError:
    message = f"{place}: {says}" if place else says
    return ApiError(400, message, param=_at(place, name[:80]), code=code, details=details)


def form_of(*models: type[BaseModel]) -> Policy:
    """Returns the policy of objects that are one of `models`. It does not mention fields that they lack."""
    names = {each.alias or name for model in models for name, each in model.model_fields.items()}
    return Policy(frozenset(names), inner=forms_of(*models))


def forms_of(*models: type[BaseModel]) -> dict[str, Policy]:
    """Returns the policies of the objects inside of `models`, by field."""
    inner: dict[str, list[type[BaseModel]]] = {}
    for model in models:
        for name, each in model.model_fields.items():
            kinds = [kind for kind in _types_in(each.annotation) if isinstance(kind, type)]
            found = [kind for kind in kinds if issubclass(kind, BaseModel)]
            if found:
                inner.setdefault(each.alias or name, []).extend(found)
    return {name: form_of(*found) for name, found in inner.items()}


def read_fields(policy: Policy, kind: type[BodyT], body: Mapping[str, Any], place: str = "") -> BodyT:
    """Reads the object at a place of a body as `kind`, whose fields are those that the policy supports.

    Raises:
        ApiError: a field is refused, unknown, missing, or of another type.
    """
    given = policy.honoured_of(body, place)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        wrong = invalid_value(error)
    if not place:
        raise wrong
    param = _at(place, wrong.param) if wrong.param else place
    raise ApiError(400, f"{place}: {wrong.message}", param=param, code=wrong.code)


_BY_KEY = "whom a request is for comes from its API key"
CACHED = "every prompt's prefix is cached as long as there is room"
_OLLAMA = "a worker's settings say how it uses its machine"

IGNORED: Mapping[str, str] = {
    "user": _BY_KEY,
    "safety_identifier": _BY_KEY,
    "metadata": "no answer is stored that it could describe",
    "service_tier": "`priority` orders requests",
    "prompt_cache_retention": CACHED,
    "prompt_cache_options": CACHED,
    **dict.fromkeys(("id", "request_id"), "the gateway chooses ids; the header Idempotency-Key names a request"),
    "spaces_between_special_tokens": "text is what the model's tokenizer makes of its tokens",
    **dict.fromkeys(
        ("num_ctx", "num_batch", "num_thread", "num_gpu", "num_keep", "keep_alive", "use_mmap", "use_mlock"), _OLLAMA
    ),
}
"""Common to all requests."""

_USE = "is another server's name for {}"
_NO_SEARCH = Refusal("beam search is not supported", (False,))

REFUSED: Mapping[str, Refusal] = {
    "use_beam_search": _NO_SEARCH,
    "length_penalty": Refusal("it belongs to beam search, which is not supported", (1.0,)),
    "early_stopping": _NO_SEARCH,
    "bad_words": Refusal("words are not supported, tokens are: bad_token_ids", ([],)),
    "truncate_prompt_tokens": Refusal("no prompt is cut; POST /v1/count_tokens tells how long it is"),
    "logits_processors": Refusal("code of a client is not run", ([],)),
    "vllm_xargs": Refusal("there are no plug-ins", ({},)),
    "kv_transfer_params": Refusal("pages of the KV cache do not travel"),
    "thinking_token_budget": Refusal("reasoning has no budget of its own"),
    "guided_decoding_backend": Refusal("there is one backend"),
    "guided_whitespace_pattern": Refusal("white space in JSON is not configurable"),
    "max_new_tokens": Refusal(_USE.format("max_tokens")),
    "num_predict": Refusal(_USE.format("max_tokens")),
    "stop_sequences": Refusal("is another API's name for stop"),
    "repeat_penalty": Refusal(_USE.format("repetition_penalty")),
    "prompt_embeds": Refusal("prompts are text or tokens"),
}
"""Common to all requests."""
