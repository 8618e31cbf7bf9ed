"""Buffers the output of each choice of a request, and tracks how much is published."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from penstock.engine.request import FinishReason, Output, TokenLogprob, ToolCallDelta

# If choices ended differently, the request's reason is the first of these that occurs.
_GRAVITY: tuple[FinishReason, ...] = ("error", "cancelled", "expired", "length", "tool_calls", "stop")


@dataclass(slots=True)
class Pending:
    """Output of one choice that waits to be published, in order."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def add(self, output: Output) -> None:
        """Adds an output. Raises UnicodeEncodeError if a part of it can't be written."""
        if output.tool_calls or output.reasoning:
            _check_writable(output)
        self.token_ids += output.token_ids
        if output.text:
            self.text.append(output.text)
        if output.reasoning:
            self.reasoning.append(output.reasoning)
        if output.tool_calls:
            self.tool_calls += output.tool_calls
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs

    @property
    def is_readable(self) -> bool:
        """Whether there is anything that a reader can show."""
        return bool(self.text or self.reasoning or self.tool_calls)

    def then(self, later: Pending) -> Pending:
        return Pending(
            self.token_ids + later.token_ids,
            self.text + later.text,
            self.reasoning + later.reasoning,
            self.tool_calls + later.tool_calls,
            self.logprobs + later.logprobs,
            self.prompt_logprobs or later.prompt_logprobs,
        )


@dataclass(slots=True)
class ChoiceBuffer:
    """One of the `n` choices: how much of it is published, and what waits.

    Tokens [0, num_published) are on the reply stream; the pending ones follow, in order.
    """

    index: int
    num_published: int = 0
    pending: Pending = field(default_factory=Pending)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id of the token, that ended it
    num_reasoning: int = 0  # reasoning tokens, known once it has ended
    num_drafted: int = 0  # drafted tokens that were verified, known once it has ended
    num_accepted: int = 0  # drafted tokens that were right
    is_closed: bool = False  # its last chunk is on the reply stream: later output for it is ignored

    def add(self, output: Output) -> None:
        self.finish_reason = output.finish_reason
        self.num_reasoning = output.num_reasoning_tokens
        self.num_drafted, self.num_accepted = output.num_drafted_tokens, output.num_accepted_tokens
        if self.is_closed:
            return
        self.stop_reason = output.stop_reason
        self.pending.add(output)

    def take(self) -> Pending:
        """Takes the pending output, now the caller's."""
        taken, self.pending = self.pending, Pending()
        return taken


def _check_writable(output: Output) -> None:
    """Raises for unwritable text, which would fail a write shared with other requests."""
    (output.text + output.reasoning).encode()
    for call in output.tool_calls:
        ((call.name or "") + call.arguments).encode()


def outcome_of(choices: Iterable[ChoiceBuffer]) -> FinishReason | None:
    """Returns why a request ended; None if any of its choices has not ended."""
    reasons = [choice.finish_reason for choice in choices]
    return None if None in reasons else next(reason for reason in _GRAVITY if reason in reasons)


def merged(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """Joins neighbouring deltas of the same call."""
    runs: list[list[ToolCallDelta]] = []
    for delta in deltas:
        if runs and delta.id is None and delta.index == runs[-1][0].index:
            runs[-1].append(delta)
        else:
            runs.append([delta])
    return [replace(run[0], arguments="".join(delta.arguments for delta in run)) for run in runs]
