"""The engine's inputs and outputs, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from penstock.engine.errors import InvalidRequest
from penstock.parameters import SamplingParameters, declared

if TYPE_CHECKING:
    from penstock.engine.structured import Grammar

FinishReason = Literal["stop", "tool_calls", "length", "cancelled", "expired", "error"]

MAX_STOP_TOKENS = 32  # end-of-sequence ids included
MAX_PROMPT_LOGPROBS = 2**13  # of one prompt, most likely tokens included: they are sent in one message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The values of `SamplingParameters`. The defaults are plain, unfiltered sampling until a stop token.

    Raises:
        InvalidRequest: a value is out of range; the message names it.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: derived from the request id, so that a resumed request repeats it
    max_tokens: int = 256
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # empty allows all
    bad_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most likely ones'
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) is not each.default:
                _check(each.name, value)
        _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"0 to {self.max_tokens}")
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")
        num_stops = len(self.stop_token_ids)
        _require(num_stops <= MAX_STOP_TOKENS, "stop_token_ids", num_stops, f"at most {MAX_STOP_TOKENS} ids")

    @property
    def adjusts_logits(self) -> bool:
        """Whether every token is drawn from logits that differ from the model's own."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_token_ids
        )

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the token ids that end a sequence, given the model's own `eos_token_ids`."""
        return self.stop_token_ids if self.ignore_eos else (*eos_token_ids, *self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: str = "{}"  # the JSON schema of its arguments, as text
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """How the reply to a chat is parsed into text, reasoning and tool calls."""

    format: str  # a name in `penstock.engine.text.response`
    prefix: str = ""  # start of the reply that the prompt already contains, such as `<think>`
    tools: tuple[Tool, ...] = ()  # if empty, tool calls are not parsed
    reads_reasoning: bool = True  # otherwise it stays text


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue, `n` times.

    `generated` holds tokens that an earlier run produced, one tuple per choice. Generation continues after them as if
    it had never stopped, and they are not emitted again.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    priority: int = 0  # higher runs first
    cache_salt: str = ""  # prefix-cache entries are shared only between equal salts
    generated: tuple[tuple[int, ...], ...] = ()
    response: ResponseSpec | None = None  # None: the reply is text
    begins_turn: bool = False  # whether the reply is a turn of a chat: a text by itself, not one after the prompt's
    echo: str = ""  # text to put before the reply
    grammar: Grammar | None = None  # what the reply must follow; compiled by `Engine.grammars`


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """The log-probability of one token at one position. `token` and `bytes` are its text."""

    token_id: int
    token: str  # special tokens are spelled out; incomplete characters become U+FFFD
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probabilities of the token at one position and of the most likely alternatives."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    top: tuple[TopLogprob, ...]  # most likely first


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of one tool call. Only a call's first part has `id` and `name`; joined, `arguments` are JSON."""

    index: int  # of the call among those of its choice
    arguments: str
    id: str | None = None
    name: str | None = None


class Prefill(NamedTuple):
    """Progress of a prompt that takes several steps, with the reply so far if the request was resumed."""

    num_computed: int  # tokens, those from the prefix cache included
    num_tokens: int


@dataclass(slots=True)  # not frozen: that took three times as long per token
class Output:
    """The result of one step for one choice of a request.

    `text` is what these tokens released: bytes of an unfinished character, and text that could still become a stop
    string, come with a later output. Joined over all outputs it is the choice's whole text. The last output of a choice
    has a `finish_reason`; it may have no tokens. An output with `prefill` reports the progress of the prompt, and
    nothing else.
    """

    request_id: str
    index: int
    offset: int  # of the first token in this output among the choice's generated tokens
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason `error`: what went wrong
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    cause: Exception | None = None  # with finish_reason `error`: the exception, if there was one
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_reason: str | int | None = None  # with finish_reason `stop` or `tool_calls`: the stop string, or the token id
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # per prompt token (None for the first); sent once
    num_reasoning_tokens: int = 0  # with a finish_reason: number of the choice's reasoning tokens
    num_drafted_tokens: int = 0  # with a finish_reason: drafted tokens that this engine verified
    num_accepted_tokens: int = 0  # drafted tokens that were right
    prefill: Prefill | None = None  # after a step that computed a part of the prompt, not its end


def _require(holds: bool, name: str, value: object, range_: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name} must be {range_}, not {value}")


def _check(name: str, value: Any) -> None:
    is_map = name == "logit_bias"
    numbers = {f"{name} of token {id_}": bias for id_, bias in value.items()} if is_map else {name: value}
    parameter = declared(SamplingParameters)[name]
    for what, number in numbers.items():
        if fault := parameter.fault(number):
            raise InvalidRequest(f"{what} {fault}")
