"""What a caller gets back: chunks while the text is written, and the whole reply at its end."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.producer.wire import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one choice, and the text they brought.

    `offset` counts this choice's tokens before this chunk; the joined texts of a choice are its whole text. A chunk can
    have tokens without text (the text is not complete yet) and text without tokens (text held back until the end).
    `entry_id` is where to continue from: `stream(after=chunk.entry_id)`. `finish_reason` is set on the last chunk of a
    choice when there are several.
    """

    text: str
    tokens: tuple[int, ...]
    index: int
    offset: int
    logprobs: tuple[TokenLogprob, ...] | None
    entry_id: str
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` continuations of a prompt."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all choices. `cached_tokens` are prompt tokens that needed no computing."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds since the enqueue, on the server's and the worker's clocks: to the claim, first token and end."""

    queued_ms: int | None
    ttft_ms: int | None
    total_ms: int | None


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that ended: `stop`, `length`, `cancelled` or `expired` (and `error` inside a `RequestFailed`)."""

    request_id: str
    finish_reason: FinishReason
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids of the first choice."""
        return self.choices[0].tokens
