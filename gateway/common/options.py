"""Options that chat completions and completions share: sampling, form and presentation of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, create_model

from penstock.gateway.common.fields import Body, BodyT, Policy
from penstock.gateway.errors import ApiError, invalid_value
from penstock.gateway.http.passed_over import pass_over
from penstock.parameters import BOTH, Parameter, Taker
from penstock.producer import GenerateRequest, ModelCard
from penstock.protocol.wire import PARAMETERS, ResponseFormat
from penstock.protocol.wire.values import FAIL_FAST, texts_or_text

_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_Texts = Annotated[list[str], FAIL_FAST, BeforeValidator(texts_or_text), WithJsonSchema(_TEXTS)]
Count = Annotated[int, Field(lt=2**31)]
"""Larger than any count can be; JSON's numbers may have thousands of digits."""

TokenIds = Annotated[list[Count], FAIL_FAST]

SMALLEST_TOP_P = 1e-6
"""Replaces OpenAI's `top_p: 0`, which leaves one token to sample from, as this does."""

_OVER_HTTP: Mapping[Any, Any] = {
    Sequence[int]: TokenIds,
    Sequence[str]: _Texts,
    str | Sequence[str]: _Texts,
    Mapping[int, float]: dict[str, float],
    Mapping[str, Any]: dict[str, Any],
    Sequence[Mapping[str, Any]]: list[dict[str, Any]],
    ResponseFormat | Mapping[str, Any]: dict[str, Any],
}
"""Maps types of parameters to those of fields, where they differ."""


def takes(*takers: Taker) -> Callable[[type[BodyT]], type[BodyT]]:
    """Adds to a body the parameters that all of `takers` take, except those that it has a field for."""

    def add(body: type[BodyT]) -> type[BodyT]:
        fields: dict[str, Any] = {
            name: (_over_http(each) | None, None)
            for name, each in PARAMETERS.items()
            if name not in body.model_fields and set(takers) <= set(each.takers)
        }
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields)

    return add


def _over_http(each: Parameter) -> Any:
    is_count = each.type is int and each.most is None
    return Count if is_count else _OVER_HTTP.get(each.type, each.type)


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # of the lengths of chunks: a protection between client and OpenAI, not offered


STREAM_OPTIONS = Policy(
    frozenset(StreamOptions.model_fields),
    ignored={"continuous_usage_stats": "counts are known at the end; include_usage has them in the last chunk"},
)


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one form of the answer."""

    model_config = ConfigDict(validate_by_alias=True)

    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: _Texts | None = None
    grammar: str | None = None


@takes(*BOTH)
class RequestOptions(Body):
    """The parameters that both APIs take, and the fields below. The wire checks ranges and combinations."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None

    prompt_cache_key: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: _Texts | None = None
    guided_grammar: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Returns the fields for the worker, under the wire's names."""
        values = {name: getattr(self, name) for name in self.model_fields_set & _OF_WIRE}
        if values.get("top_p") == 0:
            values["top_p"] = SMALLEST_TOP_P
        if values.get("top_k") == -1:  # vLLM's "all"
            values["top_k"] = 0
        if -(2**63) <= values.get("seed", 0) < 0:
            values["seed"] += 2**63
        if values.get("stop"):  # an empty text ends nothing
            values["stop"] = [text for text in values["stop"] if text]
        for name in _FORMS:
            if values.get(name) == "":  # nor has the answer to follow one
                del values[name]
        if self.prompt_cache_key and "affinity" not in values:
            values["affinity"] = sha1(self.prompt_cache_key.encode(), usedforsecurity=False).hexdigest()[:16]
        for name, value in self._forms().items():
            if values.setdefault(name, value) != value:
                raise ApiError(400, f"{name} is given twice, under two names", param=name, code="invalid_value")
        return values

    def _forms(self) -> dict[str, Any]:
        """Returns the form of the answer, if requested by vLLM's names."""
        asked = self.structured_outputs or StructuredOutputs.model_validate({})
        forms = {
            "response_format": _schema_format(asked.schema_ or self.guided_json),
            "regex": asked.regex or self.guided_regex,
            "choice": asked.choice or self.guided_choice,
            "grammar": asked.grammar or self.guided_grammar,
        }
        if asked.json_object:
            forms["response_format"] = {"type": "json_object"}
        return {name: value for name, value in forms.items() if value}


_FORMS = ("regex", "grammar")
_OF_WIRE = RequestOptions.model_fields.keys() & PARAMETERS.keys()


def _schema_format(schema: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    return {"type": "json_schema", "json_schema": {"schema": schema}} if schema else None


@dataclass(frozen=True, slots=True)
class Shown:
    """Says what a reply's body or events show besides the text."""

    logprobs: bool = False
    reasoning: bool = True
    token_ids: bool = False
    token_names: bool = True  # in log-probabilities: a token's text, else `token_id:ID`
    prompt_logprobs: bool = False
    usage: bool = False  # in a stream: a whole body always has it
    prompt_token_ids: tuple[int, ...] | None = None


def shown_of(
    options: RequestOptions, *, logprobs: bool, reasoning: bool = True, prompt_token_ids: tuple[int, ...] | None = None
) -> Shown:
    """Returns what the request asks to be shown."""
    return Shown(
        logprobs=logprobs,
        reasoning=reasoning,
        token_ids=options.return_token_ids,
        token_names=not options.return_tokens_as_token_ids,
        prompt_logprobs="prompt_logprobs" in options.model_fields_set,
        usage=options.stream_options is not None and options.stream_options.include_usage,
        prompt_token_ids=prompt_token_ids,
    )


def check_stream_options(options: RequestOptions) -> None:
    """Raises ApiError for options without a stream."""
    if options.stream_options is not None and not options.stream:
        message = "stream_options: goes with stream true only"
        raise ApiError(400, message, param="stream_options", code="invalid_value")


def to_request(values: Mapping[str, Any], *, form: str = "response_format") -> GenerateRequest:
    """Returns the request for the queue. Where a call is required there is no text: `response_format` is passed over.

    Args:
        values: fields of the queue's request.
        form: the API's own name of `response_format`.

    Raises:
        ApiError: naming what is wrong.
    """
    if "response_format" in values and _requires_call(values.get("tool_choice")):
        values = {name: value for name, value in values.items() if name != "response_format"}
        pass_over(form)
    try:
        return GenerateRequest.model_validate(values)
    except ValidationError as error:
        raise invalid_value(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _requires_call(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return bool(choice == "required")
    allowed = choice.get("allowed_tools")
    return choice.get("type") == "function" or (isinstance(allowed, dict) and allowed.get("mode") == "required")


def to_the_end(card: ModelCard) -> dict[str, int]:
    """Returns `max_tokens` for a request that names none: an answer may be as long as the model allows."""
    return {} if card.max_model_len is None else {"max_tokens": card.max_model_len}
