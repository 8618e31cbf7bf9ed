"""What the engine has said of the choices of a request, and how much of that is published."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from penstock.engine.request import FinishReason, Output, TokenLogprob, ToolCallDelta

# The reason of the whole, when choices ended differently, is the first of these that occurs.
_GRAVITY: tuple[FinishReason, ...] = ("error", "cancelled", "expired", "length", "tool_calls", "stop")


@dataclass(slots=True)
class Pending:
    """What waits to be published of one choice, in order."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def add(self, output: Output) -> None:
        """Raises UnicodeEncodeError if a part of a reply can't be written."""
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
        """Whether there is something that a reader can show."""
        return bool(self.text or self.reasoning or self.tool_calls)

    def then(self, later: Pending) -> Pending:
        """Both, as one."""
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
    """One of the `n` choices: how much of it was published, and what waits to be.

    Tokens [0, num_published) are on the reply stream; the pending ones follow, in order.
    """

    index: int
    num_published: int = 0
    pending: Pending = field(default_factory=Pending)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id of the token, that ended it
    num_reasoning: int = 0  # tokens that are reasoning, once it has ended
    num_drafted: int = 0  # guesses at tokens that were verified, once it has ended
    num_accepted: int = 0  # those of them that were right
    is_closed: bool = False  # its last chunk is on the reply stream: whatever the engine says of it now, readers know

    def add(self, output: Output) -> None:
        self.finish_reason = output.finish_reason
        self.num_reasoning = output.num_reasoning_tokens
        self.num_drafted, self.num_accepted = output.num_drafted_tokens, output.num_accepted_tokens
        if self.is_closed:
            return
        self.stop_reason = output.stop_reason
        self.pending.add(output)

    def take(self) -> Pending:
        """What is pending, which is the taker's from now on."""
        taken, self.pending = self.pending, Pending()
        return taken


def _check_writable(output: Output) -> None:
    """What can't be written would fail in the write that it shares with other requests."""
    (output.text + output.reasoning).encode()
    for call in output.tool_calls:
        ((call.name or "") + call.arguments).encode()


def outcome_of(choices: Iterable[ChoiceBuffer]) -> FinishReason | None:
    """Why a request ended, once every choice has."""
    reasons = [choice.finish_reason for choice in choices]
    return None if None in reasons else next(reason for reason in _GRAVITY if reason in reasons)


def merged(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """The same, with neighbours of one call joined."""
    runs: list[list[ToolCallDelta]] = []
    for delta in deltas:
        if runs and delta.id is None and delta.index == runs[-1][0].index:
            runs[-1].append(delta)
        else:
            runs.append([delta])
    return [replace(run[0], arguments="".join(delta.arguments for delta in run)) for run in runs]
