"""Results for callers: chunks while the text is written, and the whole reply at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.protocol.wire import FinishReason, TokenLogprob, ToolCallDelta


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one choice, and what they decode to: text, reasoning, parts of tool calls.

    `offset` counts this choice's tokens before this chunk. The joined texts of a choice are its whole text; the same
    holds for its reasoning and the arguments of each call. A chunk can have tokens without text (the text is not
    complete yet) and text without tokens (text held back until the end). To continue after a chunk, call
    `stream(after=chunk.entry_id)`. `finish_reason` and `stop_reason` are set on the last chunk of a choice when there
    are several. `prompt_logprobs` come with the first chunk of choice 0.
    `arithmetic` is that of the worker that wrote it (`ModelCard.arithmetic`), if the reader saw that worker's claim.
    """

    text: str
    tokens: tuple[int, ...]
    index: int
    offset: int
    logprobs: tuple[TokenLogprob, ...] | None
    entry_id: str
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    arithmetic: str | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """How many tokens of a long prompt are computed. After a takeover, the reply so far counts as well."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called. `arguments` are a JSON object, unless the reply was cut off in it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` continuations of a prompt. `stop_reason` is the stop string or the token id that ended it."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: str | int | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The choice as a message, for the `messages` of the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all choices. `cached_tokens` are prompt tokens that needed no computing. `reasoning_tokens` are
    the part of the completion that is reasoning, as far as known. `drafted_tokens` were speculated, as far as the
    worker that ended the reply knows, and `accepted_tokens` of them were right (docs/speculation.md).
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds from the enqueue to the claim, first token and end, on the server's and the worker's clocks."""

    queued_ms: int | None
    ttft_ms: int | None
    total_ms: int | None


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that ended with `stop`, `tool_calls`, `length`, `cancelled` or `expired` (`error` inside a
    `RequestFailed`).

    `prompt_logprobs` are those of the prompt's tokens, if requested; the first token has none. `entry_id` is the end's,
    if the reply was read from a stream. `ignored` names fields of the request that had no effect: `tools`,
    where the chat template has no place for them or its calls are not read. `arithmetic` is that of the
    worker that wrote the end; with `is_exact` false, workers of several generated it, and another run may give other
    tokens (docs/guarantees.md).
    """

    request_id: str
    finish_reason: FinishReason
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    entry_id: str | None = None
    ignored: tuple[str, ...] = ()
    arithmetic: str | None = None
    is_exact: bool = True

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids of the first choice."""
        return self.choices[0].tokens

    @property
    def reasoning(self) -> str:
        """The reasoning of the first choice."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The first choice as a message, for the `messages` of the next request."""
        return self.choices[0].message
