"""What goes into the engine and what comes out, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.engine.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.engine.structured import Grammar

FinishReason = Literal["stop", "tool_calls", "length", "cancelled", "expired", "error"]

MAX_STOP_TOKENS = 32  # end-of-sequence ids included
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**13  # of one prompt, those of the most likely tokens included: they travel in one piece
MAX_LOGIT_BIAS = 100.0  # to either side, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. The defaults are plain, unfiltered sampling until a stop token.

    Raises:
        InvalidRequest: a value is out of range; the message names it.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: drawn by the engine from the request id, so that a resumed request repeats it
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
    logprobs: int | None = None  # None gives none; k gives the sampled token's and the k most likely ones'
    prompt_logprobs: int | None = None  # the same of each token of the prompt but the first
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "0 to 100")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0, up to 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0 to 1")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "0 to 2**63 - 1")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"0 to {self.max_tokens}")
        _require(
            0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", self.repetition_penalty, "above 0, up to 100"
        )
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", self.presence_penalty, "-2 to 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", self.frequency_penalty, "-2 to 2")
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKENS,
            "stop_token_ids",
            len(self.stop_token_ids),
            f"at most {MAX_STOP_TOKENS} ids",
        )
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"0 to {MAX_LOGPROBS}",
        )
        _require(
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
            "prompt_logprobs",
            self.prompt_logprobs,
            f"0 to {MAX_LOGPROBS}",
        )
        for token_id, bias in self.logit_bias.items():
            _require(-MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS, f"logit_bias of token {token_id}", bias, "-100 to 100")

    @property
    def adjusts_logits(self) -> bool:
        """Whether every token is drawn from other logits than the model's own."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_token_ids
        )

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The token ids that end a sequence, of a model whose own are `eos_token_ids`."""
        return self.stop_token_ids if self.ignore_eos else (*eos_token_ids, *self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: str = "{}"  # the JSON schema of its arguments, as text
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """How the reply to a chat is read: as text, reasoning and tool calls."""

    format: str  # a name in `penstock.engine.text.response`
    prefix: str = ""  # what the prompt has of the reply already, such as `<think>`
    tools: tuple[Tool, ...] = ()  # without any, calls are not looked for


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue, `n` times.

    `generated` holds tokens that an earlier run already produced, one tuple per choice: generation continues after them
    as if it had never stopped, and they are not emitted again.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    priority: int = 0  # higher runs first
    cache_salt: str = ""  # prefix-cache entries are shared only between equal salts
    generated: tuple[tuple[int, ...], ...] = ()
    response: ResponseSpec | None = None  # None: the reply is text
    echo: str = ""  # what the text begins with
    grammar: Grammar | None = None  # what the reply must follow; compiled by `Engine.grammars`


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """The log-probability of one token at a place. `token` and `bytes` are what it stands for inside a text."""

    token_id: int
    token: str  # a special token is spelled; what is no whole character has U+FFFD
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """That of the token at a place, and of the most likely ones there."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    top: tuple[TopLogprob, ...]  # most likely first


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of one tool call. Only the first of a call has `id` and `name`; joined, `arguments` are JSON."""

    index: int  # of the call among those of its choice
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)  # frozen, it took three times as long to make one for each token
class Output:
    """What one step produced for one choice of one request.

    `text` is what these tokens released: bytes of an unfinished character, and text that could still become a stop
    string, come with a later output. Joined over all outputs it is the choice's whole text. The last output of a choice
    has a `finish_reason`; it may have no tokens.
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
    cause: Exception | None = None  # with finish_reason `error`: what was raised, if something was
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_reason: str | int | None = None  # with finish_reason `stop` or `tool_calls`: the stop string, or the token id
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # of each token of the prompt but the first; once
    num_reasoning_tokens: int = 0  # with a finish_reason: those of all tokens of the choice that are reasoning
    num_drafted_tokens: int = 0  # with a finish_reason: guesses at tokens of the choice that this engine verified
    num_accepted_tokens: int = 0  # those of them that were right


def _require(holds: bool, name: str, value: object, range_: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name} must be {range_}, not {value}")
