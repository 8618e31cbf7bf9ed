"""The requests of this worker, and the phase of each.

An entry of the queue goes through these phases, in this direction only:

    taking -> [parked ->] CLAIMED -> RESTORED -> ADMITTED -> RUNNING -> ENDED -> GONE

`taking` and `parked` entries have no claim yet; the table knows them by their ids. From the claim on there is a
`LiveRequest`. Any phase may be followed by ENDED (refused, cancelled, expired) or GONE (another owner, the reply lost).
After GONE nothing is written for the request; its entry leaves the queue by way of `penstock.worker.publish.removals`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

from penstock.engine.request import FinishReason, Output, Prefill
from penstock.protocol import keys
from penstock.protocol.scripts import Bill, Claim
from penstock.protocol.wire import GenerateRequest, WireError
from penstock.worker.run.capacity import RecentMeans
from penstock.worker.run.choices import ChoiceBuffer, outcome_of
from penstock.worker.run.entries import QueueEntry
from penstock.worker.run.tracing import UNTRACED, ClaimTrace
from penstock.worker.tasks import Signal

_T = TypeVar("_T")
Asked: TypeAlias = GenerateRequest | WireError
"""The client's request, or why it can't be read."""


TOKEN_WEIGHTS = (1, 2)
"""Cost of a prompt token and of a reply token, as in Sheng et al., arXiv 2401.00588."""


class Phase(IntEnum):
    """Phase of a claimed request."""

    CLAIMED = 1  # its journal is being read: until then the content of an end is unknown
    RESTORED = 2  # its prompt is being tokenized, its grammar compiled
    ADMITTED = 3  # ready for the engine
    RUNNING = 4  # the engine has it
    ENDED = 5  # nothing more will be generated; its end is not written yet
    GONE = 6  # its end is written, or it belongs to another: nothing more may be written


@dataclass(frozen=True, slots=True)
class Parked:
    """A suspect that is pending here, claimed by nobody, until it can run alone."""

    queue: str
    id: str  # of the request
    entry: QueueEntry
    priority: int
    deadline_s: float | None  # monotonic
    due_s: float  # monotonic: when running requests have to give way to it

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s >= self.deadline_s


class Over(Exception):
    """Raised when a request ends, or is gone, while something was made for it."""


@dataclass(frozen=True, slots=True)
class ServerClock:
    """The server's time, extrapolated from its last answer by this process's monotonic clock."""

    server_ms: int
    monotonic_s: float

    def now_ms(self) -> int:
        return self.server_ms + round((time.monotonic() - self.monotonic_s) * 1000)

    def monotonic_at(self, server_ms: float) -> float:
        return self.monotonic_s + (server_ms - self.server_ms) / 1000


@dataclass(slots=True)
class ReplyCursor:
    """Position in the reply stream of a request. Only the outbox moves it."""

    key: str
    refreshed_at_s: float  # monotonic: when its time to live was last set
    flushed_at_s: float = 0.0  # monotonic: when output was last taken to be written
    next_number: int = 1  # n of the next entry `<epoch>-<n>`
    last_number: int = 0  # n of the last one that Redis has confirmed
    num_unsettled: int = 0  # writes that Redis has not answered yet; the next ones wait for them
    is_urgent: bool = False  # its output is not held back
    has_begun: bool = False  # something readable is written, or on its way: later output may be held back
    prefilled: int = 0  # computed tokens of the prompt, as last reported to the reader
    prefill_told_s: float = 0.0  # monotonic: when such a report was last due
    tells_prefill: bool = False  # whether the next flush reports the prompt's progress


class LiveRequest:
    """A claimed request. Belongs to the event loop; only its own methods change it.

    Args:
        queue: the one it came from.
        request_id: the clients' id for it.
        entry: its queue entry.
        claim: this worker's.
        received_s: when the claim's answer came (monotonic).
        asked: the client's request, or why it can't be read.
        log: bound to the request.
    """

    __slots__ = (
        "asked",
        "cached_tokens",
        "choices",
        "claim",
        "clock",
        "deadline_s",
        "enqueued_ms",
        "entry_bytes",
        "entry_id",
        "error",
        "fields",
        "finish_reason",
        "first_token_ms",
        "has_output",
        "id",
        "ignored",
        "is_dead",
        "is_resumed",
        "log",
        "over",
        "phase",
        "prefill",
        "prompt_tokens",
        "queue",
        "reply",
        "tenant",
        "trace",
    )

    def __init__(
        self,
        queue: str,
        request_id: str,
        entry: QueueEntry,
        claim: Claim,
        received_s: float,
        asked: Asked,
        log: Any,
    ) -> None:
        self.phase = Phase.CLAIMED
        self.over: asyncio.Future[None] | None = None  # done once the request has ended or is gone; None: nobody waits
        self.queue = queue
        self.id = request_id
        self.entry_id = entry.id
        self.entry_bytes = entry.size
        self.fields = entry.kept  # for the dead-letter stream
        self.tenant = entry.tenant
        self.claim = claim
        self.clock = ServerClock(claim.server_ms, received_s)
        self.asked = asked
        self.log = log
        self.reply = ReplyCursor(keys.reply(queue, request_id), received_s, prefill_told_s=received_s)
        self.enqueued_ms = min(int(entry.id.split("-")[0]), claim.server_ms)
        self.deadline_s: float | None = None  # monotonic
        self.choices: list[ChoiceBuffer] = [ChoiceBuffer(0)]
        self.is_resumed = False  # whether tokens of an earlier claim are on the reply stream
        self.prefill: Prefill | None = None  # of the choice that is furthest, until this claim has a token
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.ignored: tuple[str, ...] = ()  # fields of the request that the prompt does not show
        self.has_output = False  # whether this claim has a token
        self.first_token_ms: int | None = None  # server time
        self.finish_reason: FinishReason | None = None  # from ENDED on
        self.error: tuple[str, str] | None = None  # code and message
        self.is_dead = False  # whether its entry goes to the dead letters
        self.trace: ClaimTrace = UNTRACED

    def resume(self, choices: list[ChoiceBuffer], timeout_s: float | None = None) -> None:
        """Continues where earlier claims' chunks end, until `timeout_s` after the enqueue."""
        self.choices = choices
        self.is_resumed = any(choice.num_published for choice in choices)
        self.reply.has_begun = self.is_resumed
        self.deadline_s = self.deadline_of(timeout_s)
        self._move(max(self.phase, Phase.RESTORED))

    def deadline_of(self, timeout_s: float | None) -> float | None:
        """Returns `timeout_s` after the enqueue, by the server's clock as of the claim (monotonic)."""
        return None if timeout_s is None else self.clock.monotonic_at(self.enqueued_ms + timeout_s * 1000)

    def admit(self, num_prompt_tokens: int, ignored: tuple[str, ...] = ()) -> None:
        self.prompt_tokens, self.ignored = num_prompt_tokens, ignored
        self._advance(Phase.ADMITTED)

    def start(self) -> None:
        """Notes that the engine has the request."""
        self._advance(Phase.RUNNING)
        self.trace.started(self.prompt_tokens, self.completion_tokens)

    def add(self, output: Output) -> None:
        """Adds an output of the engine; the last output of the last choice ends the request."""
        if output.prefill is not None:
            if not self.has_output:
                self.prefill = max(output.prefill, self.prefill or output.prefill)
            return
        choice = self.choices[output.index]
        choice.add(output)
        self.prompt_tokens = output.num_prompt_tokens or self.prompt_tokens
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        if output.token_ids and not self.has_output:
            self._note_first_token()
        if output.finish_reason is None:
            return
        if output.error is not None:
            self.error = ("engine_error", output.error)
        if output.cause is not None:
            self.log.error("engine_error", index=output.index, exc_info=output.cause)
        if (reason := self.outcome) is not None:
            self.end(reason)

    def _note_first_token(self) -> None:
        self.has_output, self.prefill = True, None
        self.trace.first_token(self.cached_tokens)
        if not self.is_resumed:
            self.first_token_ms = self.clock.now_ms()

    def end(self, reason: FinishReason) -> None:
        """Ends the request; one that has ended keeps its end."""
        if self.phase < Phase.ENDED:
            self.finish_reason = reason
            self._move(Phase.ENDED)

    def fail(self, code: str, message: str, *, is_dead: bool = False) -> None:
        """Ends the request with an error; `is_dead`: its entry goes to the dead letters."""
        if self.phase < Phase.ENDED:
            self.error, self.is_dead = (code, message), is_dead
            self.end("error")

    def let_go(self) -> None:
        self._move(Phase.GONE)

    async def unless_over(self, work: asyncio.Future[_T]) -> _T:
        """Returns the result of `work`.

        Raises:
            Over: the request ended, or is gone: `work` is given up.
        """
        self.over = self.over or asyncio.get_running_loop().create_future()
        if self.phase >= Phase.ENDED:
            self._move(self.phase)
        try:
            ends: list[asyncio.Future[Any]] = [work, self.over]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.over.done():
                raise Over
            return work.result()
        finally:
            work.cancel()

    def is_overdue(self, now_s: float) -> bool:
        """Checks whether the deadline has passed; reported once, as the end is then under way."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return False
        self.deadline_s = None
        return True

    @property
    def is_running(self) -> bool:
        return self.phase is Phase.RUNNING

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, with its end unwritten."""
        return self.phase is Phase.ENDED

    @property
    def is_gone(self) -> bool:
        return self.phase is Phase.GONE

    @property
    def outcome(self) -> FinishReason | None:
        """Why the request ended, once every choice has."""
        return outcome_of(self.choices)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_published + len(choice.pending.token_ids) for choice in self.choices)

    @property
    def bill(self) -> Bill:
        """What its tenant has been served with the request, over all claims."""
        tokens = TOKEN_WEIGHTS[0] * self.prompt_tokens + TOKEN_WEIGHTS[1] * self.completion_tokens
        return Bill(self.entry_id, self.tenant, tokens, self.id)

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens; None: unknown. A worker that takes over for the end alone reads no tokens."""
        return sum(choice.num_reasoning for choice in self.choices) or None

    def _advance(self, phase: Phase) -> None:
        if phase <= self.phase:
            raise ValueError(f"request {self.id!r} is {self.phase.name} and can't become {phase.name}")
        self._move(phase)

    def _move(self, phase: Phase) -> None:
        self.phase = phase
        if self.over is not None and phase >= Phase.ENDED and not self.over.done():
            self.over.set_result(None)


class RequestTable:
    """Everything that this worker has taken from the queue and not finished.

    Args:
        abort: tells the engine that nobody wants the rest of a request.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._by_id: dict[str, LiveRequest] = {}
        self.taking: set[str] = set()  # entries on their way to the engine
        self.parked: dict[str, Parked] = {}  # suspects, by entry
        self.alone: str | None = None  # entry of the suspect that runs alone, or is about to
        self.ending: set[str] = set()  # entries that the sweep found, on their way to their ends
        self.ended = RecentMeans()
        self.must_recover = True  # whether entries may be pending here that are not in this table
        self.changed = Signal()  # fires when a request comes or goes, or the engine has output of one

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_id.values()))

    def get(self, request_id: str) -> LiveRequest | None:
        return self._by_id.get(request_id)

    @property
    def entry_ids(self) -> set[str]:
        return {live.entry_id for live in self._by_id.values()} | self.taking | self.ending | self.parked.keys()

    @property
    def is_busy(self) -> bool:
        """Whether anything runs, is about to, or has an unwritten end."""
        return bool(self.taking) or any(live.phase >= Phase.RUNNING for live in self._by_id.values())

    def add(self, live: LiveRequest) -> None:
        self._by_id[live.id] = live
        self.changed.fire()

    def park(self, suspect: Parked) -> None:
        self.parked[suspect.entry.id] = suspect
        self.changed.fire()

    def end_parked(self, suspect: Parked) -> None:
        """Releases a suspect that need not run: the intake claims it, and learns why."""
        if self.parked.pop(suspect.entry.id, None) is not None:
            self.recover()

    def remove(self, live: LiveRequest) -> None:
        """Removes a finished request."""
        live.let_go()
        if self._by_id.get(live.id) is live:
            del self._by_id[live.id]
        self.changed.fire()

    def note_end(self, live: LiveRequest) -> None:
        """Removes a request whose end is written. Only requests that were not cut short count in the averages."""
        self.remove(live)
        if live.finish_reason in ("stop", "length"):
            self.ended.add(
                entry_bytes=live.entry_bytes, prompt_tokens=live.prompt_tokens, reply_tokens=live.completion_tokens
            )

    def let_go(self, live: LiveRequest) -> None:
        """Gives up a request with another owner, or without a reply. Its entry may be pending here."""
        self.remove(live)
        self.abort(live)
        self.recover()

    def abort(self, live: LiveRequest) -> None:
        """Tells the engine to drop the rest."""
        self._abort(live.id)

    def recover(self) -> None:
        """Makes the intake look for pending entries that are not in the table."""
        self.must_recover = True
        self.changed.fire()
