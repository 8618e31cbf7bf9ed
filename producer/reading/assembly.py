"""Assembles reply entries into chunks and a whole reply: each token, character and argument once and in order, or an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias, cast

from penstock.protocol.errors import ReplyCorrupt, RequestFailed, RequestRefused
from penstock.protocol.reply import Choice, Chunk, Prefill, Reply, Timings, ToolCall, Usage
from penstock.protocol.wire import (
    REFUSED_CODES,
    ChunkEntry,
    EndEntry,
    FinishReason,
    OwnEntry,
    ReplyEntry,
    TokenLogprob,
    ToolCallDelta,
)


class Assembler:
    """Assembles one reply from its entries, which come in the order of their ids.

    Normally offsets simply continue. After a failover to a server that lost the last entries, a new worker writes again
    some tokens that were already read here. They are the same tokens, so they are dropped by their offset.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._choices: dict[int, _Choice] = {}
        self._arithmetic: str | None = None  # of the last worker that took the request
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.ended = False
        """Whether the end was read."""
        self.reply: Reply | None = None
        """The whole reply, once its end was read, unless the request was refused."""
        self.prefill: Prefill | None = None
        """Progress of the prompt, as long as the last worker has reported it and no token."""
        self.tell_prefill: Callable[[Prefill], object] = _ignore
        """Called with each new value of `prefill`."""

    def feed(self, entry_id: str, entry: ReplyEntry) -> Chunk | None:
        """Returns the part of the entry that is new, if any.

        Raises:
            ReplyCorrupt: tokens are missing before this entry.
            RequestRefused, RequestFailed: the entry ends the reply with an error.
        """
        if isinstance(entry, OwnEntry):
            self._arithmetic = entry.arithmetic
            self.prefill = None
            return None
        if isinstance(entry, EndEntry):
            self._end(entry_id, entry)
            return None
        if entry.prefill_done is not None:
            self.prefill = Prefill(entry.prefill_done, entry.prefill_total or entry.prefill_done)
            self.tell_prefill(self.prefill)
            return None
        self.prefill = None
        choice = self._choices.get(entry.index)
        if choice is None:
            choice = self._choices[entry.index] = _Choice()
        self._prompt_logprobs = self._prompt_logprobs or entry.prompt_logprobs
        try:
            return choice.feed(entry_id, entry, self._arithmetic)
        except ValueError as error:
            raise ReplyCorrupt(self._request_id, f"entry {entry_id}: {error}") from error

    def _end(self, entry_id: str, end: EndEntry) -> None:
        self.ended, self.prefill = True, None
        if end.finish_reason == "error" and end.code in REFUSED_CODES:
            raise RequestRefused(self._request_id, end.code or "", end.message or "")
        num_read = sum(choice.num_tokens for choice in self._choices.values())
        if end.finish_reason != "error" and num_read != end.completion_tokens:
            reason = f"{num_read} tokens were read, the end entry counts {end.completion_tokens}"
            raise ReplyCorrupt(self._request_id, reason)
        self.reply = reply = self._whole(entry_id, end)
        if end.finish_reason == "error":
            raise RequestFailed(self._request_id, end.code or "unknown", end.message or "no message given", reply)

    def _whole(self, entry_id: str, end: EndEntry) -> Reply:
        num_choices = max([1, len(end.finish_reasons or ()), *(index + 1 for index in self._choices)])
        reasons = end.finish_reasons or ()
        return Reply(
            request_id=self._request_id,
            finish_reason=end.finish_reason,
            choices=tuple(
                self._choices.get(index, _Choice()).whole(
                    index, reasons[index] if index < len(reasons) else end.finish_reason, end.stop_reason
                )
                for index in range(num_choices)
            ),
            usage=_usage(end),
            timings=Timings(end.queued_ms, end.ttft_ms, end.total_ms),
            prompt_logprobs=self._prompt_logprobs,
            entry_id=entry_id,
            ignored=end.ignored or (),
            arithmetic=end.arithmetic,
            is_exact=end.exact != 0,
        )


def _usage(end: EndEntry) -> Usage:
    return Usage(
        end.prompt_tokens,
        end.cached_tokens,
        end.completion_tokens,
        end.reasoning_tokens or 0,
        end.drafted_tokens or 0,
        end.accepted_tokens or 0,
    )


def _ignore(prefill: Prefill) -> None:
    """Does nothing."""


_Position: TypeAlias = tuple[int, int, int, int]
"""A position in a choice, as counts of what comes before it: tokens, characters of text, characters of reasoning, and
units of tool calls. A tool call counts one for its beginning and one for each character of arguments. It is a plain
tuple, as one is made for each chunk.
"""


class _Choice:
    """A choice, as far as it was read.

    `_at` is the writer's position, and `_read` the furthest one that was read. When a takeover repeats tokens, `_at`
    goes back to one of `_ends`: for each k at which a chunk ended, the position after the first k tokens. The text of k
    tokens depends on them alone, so what lies between that position and `_read` is known. Nothing follows the last
    chunk.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._logprobs: list[TokenLogprob] = []
        self._stop_reason: str | int | None = None
        self._has_ended = False
        self._at: _Position = (0, 0, 0, 0)
        self._read = self._at
        self._ends = {0: self._at}

    @property
    def num_tokens(self) -> int:
        return self._read[0]

    def feed(self, entry_id: str, entry: ChunkEntry, arithmetic: str | None) -> Chunk | None:
        if self._has_ended:
            return None
        if entry.offset != self._at[0]:
            self._go_back(entry)
        before, read = self._at, self._read
        self._at = at = _advanced(before, entry)
        self._ends[at[0]] = at
        self._has_ended = entry.finish_reason is not None
        if before == read:  # nothing of it was read
            if at == before and not self._has_ended:
                return None
            self._read = at
            chunk = _whole_chunk(entry_id, entry, arithmetic)
        else:
            furthest = tuple(map(max, at, read))
            if furthest == read and not self._has_ended:
                return None
            self._read = cast("_Position", furthest)
            chunk = _rest_of_chunk(entry_id, entry, arithmetic, before, read)
        self._add(chunk)
        return chunk

    def _go_back(self, entry: ChunkEntry) -> None:
        """Moves back to the position where the entry's writer begins."""
        if entry.offset > self._at[0]:
            raise ValueError(
                f"choice {entry.index} continues at token {entry.offset}, but only {self._at[0]} came before"
            )
        if entry.offset not in self._ends:
            raise ValueError(f"choice {entry.index} goes back to token {entry.offset}, where no chunk ended before")
        self._at = self._ends[entry.offset]

    def _add(self, chunk: Chunk) -> None:
        self._tokens += chunk.tokens
        self._texts.append(chunk.text)
        if chunk.logprobs:
            self._logprobs += chunk.logprobs
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
        for delta in chunk.tool_calls:
            self._add_to_call(chunk.index, delta)
        self._stop_reason = chunk.stop_reason

    def _add_to_call(self, index: int, delta: ToolCallDelta) -> None:
        if delta.id is not None and delta.index == len(self._calls):
            self._calls.append(_Call(delta.id, delta.name or "", []))
        elif delta.id is not None or delta.index >= len(self._calls):
            begins = "begins" if delta.id is not None else "continues"
            raise ValueError(f"choice {index} {begins} call {delta.index}, {len(self._calls)} calls came before")
        self._calls[delta.index].arguments.append(delta.arguments)

    def whole(self, index: int, finish_reason: FinishReason, stop_reason: str | int | None) -> Choice:
        return Choice(
            index,
            "".join(self._texts),
            tuple(self._tokens),
            tuple(self._logprobs) if self._logprobs else None,
            finish_reason,
            "".join(self._reasoning),
            tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._calls),
            self._stop_reason if stop_reason is None else stop_reason,
        )


class _Call(NamedTuple):
    id: str
    name: str
    arguments: list[str]


def _advanced(at: _Position, entry: ChunkEntry) -> _Position:
    tokens, chars, reasoning, calls = at
    return (
        tokens + len(entry.tokens),
        chars + len(entry.text),
        reasoning + len(entry.reasoning),
        calls + (sum(map(_size, entry.tool_calls)) if entry.tool_calls else 0),
    )


def _whole_chunk(entry_id: str, entry: ChunkEntry, arithmetic: str | None) -> Chunk:
    return Chunk(
        entry.text,
        entry.tokens,
        entry.index,
        entry.offset,
        entry.logprobs,
        entry_id,
        entry.finish_reason,
        entry.reasoning,
        entry.tool_calls,
        entry.stop_reason if entry.finish_reason is not None else None,
        entry.prompt_logprobs,
        arithmetic,
    )


def _rest_of_chunk(
    entry_id: str, entry: ChunkEntry, arithmetic: str | None, before: _Position, read: _Position
) -> Chunk:
    """Returns the part of an entry whose writer began at `before` that is new to a reader at `read`."""
    num_tokens, num_chars, num_reasoning, num_of_calls = (have - had for have, had in zip(read, before, strict=True))
    return Chunk(
        entry.text[num_chars:],
        entry.tokens[num_tokens:],
        entry.index,
        read[0],
        None if entry.logprobs is None else entry.logprobs[num_tokens:],
        entry_id,
        entry.finish_reason,
        entry.reasoning[num_reasoning:],
        tuple(_unread(entry.tool_calls, num_of_calls)),
        entry.stop_reason,
        None if read[0] else entry.prompt_logprobs,
        arithmetic,
    )


def _size(delta: ToolCallDelta) -> int:
    return (delta.id is not None) + len(delta.arguments)


def _unread(deltas: Iterable[ToolCallDelta], num_read: int) -> Iterator[ToolCallDelta]:
    """Yields what follows the first `num_read` units of the deltas, as `_Position` counts them."""
    for delta in deltas:
        if num_read <= 0:
            yield delta
        elif num_read < _size(delta):
            yield ToolCallDelta(index=delta.index, arguments=delta.arguments[num_read - (delta.id is not None) :])
        num_read -= _size(delta)
