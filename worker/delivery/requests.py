"""The requests this worker has claimed and not yet finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.request import FinishReason, Output, TokenLogprob
from penstock.producer import keys
from penstock.producer.pipeline import Command
from penstock.worker.protocol.scripts import Claim

# The reason of the whole, when choices ended differently, is the first of these that occurs.
_GRAVITY: tuple[FinishReason, ...] = ("error", "cancelled", "expired", "length", "stop")


@dataclass(frozen=True, slots=True)
class ServerClock:
    """The server's time, carried on by this process's monotonic clock from one answer to the next."""

    server_ms: int
    monotonic_s: float

    def now_ms(self) -> int:
        return self.server_ms + round((time.monotonic() - self.monotonic_s) * 1000)

    def monotonic_at(self, server_ms: float) -> float:
        return self.monotonic_s + (server_ms - self.server_ms) / 1000


@dataclass(slots=True)
class Choice:
    """One of the `n` continuations: what was published of it, and what waits to be.

    Tokens [0, num_published) are on the reply stream; the pending ones follow, in order.
    """

    index: int
    num_published: int = 0
    token_ids: list[int] = field(default_factory=list)  # pending
    text: list[str] = field(default_factory=list)  # pending
    logprobs: list[TokenLogprob] = field(default_factory=list)  # pending
    finish_reason: FinishReason | None = None
    is_closed: bool = False  # its last chunk is on the reply stream: whatever the engine says of it now, readers know

    def add(self, output: Output) -> None:
        self.finish_reason = output.finish_reason
        if self.is_closed:
            return
        self.token_ids += output.token_ids
        if output.text:
            self.text.append(output.text)
        if output.logprobs:
            self.logprobs += output.logprobs


def outcome_of(choices: Iterable[Choice]) -> FinishReason | None:
    """Why a request ended, once every choice has."""
    reasons = [choice.finish_reason for choice in choices]
    return None if None in reasons else next(reason for reason in _GRAVITY if reason in reasons)


@dataclass(frozen=True, slots=True)
class Burial:
    """Moves the entry of a request that was given up from its queue to the dead letters."""

    request_id: str
    entry_id: str
    code: str
    is_malformed: bool
    command: Command

    @property
    def entry_ids(self) -> tuple[str, ...]:
        """Of the entries that it removes from the queue."""
        return (self.entry_id,)


class LiveRequest:
    """A claimed request. Belongs to the event loop."""

    __slots__ = (
        "cached_tokens",
        "choices",
        "claim",
        "clock",
        "dead_letter",
        "deadline_s",
        "dropped",
        "end",
        "enqueued_ms",
        "entry_id",
        "error",
        "fields",
        "first_token_ms",
        "id",
        "is_admitted",
        "is_resumed",
        "is_submitted",
        "last_number",
        "log",
        "next_number",
        "num_unsettled",
        "prompt_tokens",
        "queue",
        "refresh_at_s",
        "reply_key",
        "urgent",
    )

    def __init__(
        self,
        queue: str,
        request_id: str,
        entry_id: str,
        claim: Claim,
        clock: ServerClock,
        log: Any,
        fields: dict[bytes, bytes],
    ) -> None:
        self.queue = queue
        self.id = request_id
        self.reply_key = keys.reply(queue, request_id)
        self.entry_id = entry_id
        self.claim = claim
        self.clock = clock
        self.log = log
        self.fields = fields  # of the queue entry, for the dead-letter stream
        self.enqueued_ms = min(int(entry_id.split("-")[0]), claim.server_ms)
        self.deadline_s: float | None = None  # monotonic
        self.choices: list[Choice] = [Choice(0)]
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.first_token_ms: int | None = None  # server time
        self.next_number = 1  # n of the next reply entry `<epoch>-<n>`
        self.last_number = 0  # n of the last one that Redis has confirmed
        self.error: tuple[str, str] | None = None  # code and message
        self.end: FinishReason | None = None  # set once nothing more will be generated
        self.urgent = True  # what comes next is not held back: the first token, mostly
        self.is_admitted = False  # ready for the engine
        self.is_submitted = False  # the engine has it
        self.dropped = False  # ended, or somebody else's now: nothing more may be written for it
        self.num_unsettled = 0  # writes that Redis has not answered yet; the next ones wait for them
        self.dead_letter: Burial | None = None  # what happens to the queue entry after an end that is to be kept
        self.refresh_at_s = float("inf")  # monotonic: when the reply's time to live is to be renewed
        self.is_resumed = False  # tokens of an earlier claim are on the reply stream

    def resume(self, choices: list[Choice]) -> None:
        """Continues where the chunks of earlier claims end."""
        self.choices = choices
        self.is_resumed = any(choice.num_published for choice in choices)
        self.urgent = not self.is_resumed

    def add(self, output: Output) -> None:
        choice = self.choices[output.index]
        choice.add(output)
        self.prompt_tokens = output.num_prompt_tokens or self.prompt_tokens
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        if output.token_ids and self.first_token_ms is None and not self.is_resumed:
            self.first_token_ms = self.clock.now_ms()
        if output.finish_reason is None:
            return
        if output.error is not None:
            self.error = ("engine_error", output.error)
        if output.cause is not None:
            self.log.error("engine_error", index=output.index, exc_info=output.cause)
        self.end = self.outcome

    @property
    def outcome(self) -> FinishReason | None:
        """Why the whole ended, once every choice has."""
        return outcome_of(self.choices)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_published + len(choice.token_ids) for choice in self.choices)


class Signal:
    """Wakes whoever waits at the moment it fires. Check what you wait for before each wait."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class LiveTable:
    """All live requests by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveRequest] = {}
        self.changed = Signal()  # fires when a request comes or goes, or the engine has news of one

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_id.values()))

    def get(self, request_id: str) -> LiveRequest | None:
        return self._by_id.get(request_id)

    def entry_ids(self) -> set[str]:
        return {live.entry_id for live in self._by_id.values()}

    def add(self, live: LiveRequest) -> None:
        self._by_id[live.id] = live
        self.changed.fire()

    def remove(self, live: LiveRequest) -> None:
        if self._by_id.get(live.id) is live:
            del self._by_id[live.id]
        self.changed.fire()
