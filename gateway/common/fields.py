"""Treatment of a request's fields: each is supported, ignored for a reason, or refused. docs/gateway.md lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import ConfigDict, ValidationError

from penstock.gateway.errors import ApiError, invalid_value
from penstock.protocol.wire.values import WireModel, unknown_field

BodyT = TypeVar("BodyT", bound="Body")


class Body(WireModel):
    """Fields with JSON's types: strings do not count as numbers, nor booleans."""

    model_config = ConfigDict(strict=True)


class Refusal(NamedTuple):
    """Reason to refuse a field, unless it has one of the values that ask for nothing."""

    reason: str
    neutral: Sequence[object] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy of one API. Its `ignored` fields ask for nothing that an answer could lack."""

    honoured: frozenset[str]
    ignored: Mapping[str, str]  # maps to the reason
    refused: Mapping[str, Refusal]

    def honoured_of(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the supported fields. A null field counts as left out.

        Raises:
            ApiError: a field is refused or unknown.
        """
        given = {name: value for name, value in body.items() if value is not None and name not in self.ignored}
        for name in given.keys() - self.honoured:
            self._pass_over(name, given.pop(name))
        return given

    def _pass_over(self, name: str, value: object) -> None:
        if name not in self.refused:
            raise ApiError(400, unknown_field(name, self.honoured), param=name[:80], code="unknown_parameter")
        reason, neutral = self.refused[name]
        if value not in neutral:
            raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")


def read_fields(policy: Policy, kind: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    """Reads the body as `kind`, whose fields are those that the policy supports.

    Raises:
        ApiError: a field is refused, unknown, missing, or of another type.
    """
    try:
        return kind.model_validate(policy.honoured_of(body))
    except ValidationError as error:
        raise invalid_value(error) from None


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
    "spaces_between_special_tokens": "text is what the model's tokenizer makes of its tokens",
    **dict.fromkeys(
        ("num_ctx", "num_batch", "num_thread", "num_gpu", "num_keep", "keep_alive", "use_mmap", "use_mlock"), _OLLAMA
    ),
}
"""Common to all requests."""

_USE = "is another server's name for {}"
_NO_SEARCH = Refusal("beam search is not supported", (False,))

_NO_ID = Refusal("a request's id is the gateway's to choose; the header Idempotency-Key names a request")

REFUSED: Mapping[str, Refusal] = {
    "id": _NO_ID,
    "request_id": _NO_ID,
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
    "repeat_penalty": Refusal(_USE.format("repetition_penalty")),
    "prompt_embeds": Refusal("prompts are text or tokens"),
}
"""Common to all requests."""
