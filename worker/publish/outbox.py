"""Decides what is written to Redis and when, and what an answer means. Sends nothing itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.engine.request import FinishReason, Output
from penstock.protocol import scripts
from penstock.protocol.redis.faults import is_no_group, is_stale_id
from penstock.protocol.redis.pipeline import Command
from penstock.protocol.scripts import Bill
from penstock.protocol.wire import EndEntry
from penstock.worker.config import WorkerConfig
from penstock.worker.publish import writes
from penstock.worker.publish.ending import NOT_OURS, dead_letter, end_entry, kept_ms, unclaimed_end
from penstock.worker.publish.journal import JournalError
from penstock.worker.publish.removals import Removals
from penstock.worker.publish.schedule import ChunkPace, FlushSchedule
from penstock.worker.publish.writes import (
    AsideWrite,
    Burial,
    ChunkWrite,
    EndCheck,
    FinishWrite,
    ProbeWrite,
    RefreshWrite,
    Write,
)
from penstock.worker.redis import retries
from penstock.worker.run.requests import LiveRequest, RequestTable

PREFILL_NEWS_S = 1.0  # shortest time before and between reports of a prompt's progress


@dataclass(frozen=True, slots=True)
class Drop:
    """The request no longer belongs to this worker."""

    live: LiveRequest
    why: Literal["gone", "rolled_back"]


@dataclass(frozen=True, slots=True)
class Fence:
    """Another worker took this one for dead and has the request. The request is not to blame."""

    live: LiveRequest


@dataclass(frozen=True, slots=True)
class Bury:
    """Redis refuses to write the request's keys, for instance because they hold something else."""

    live: LiveRequest
    error: Exception


@dataclass(frozen=True, slots=True)
class Finished:
    """The end is on the reply stream."""

    live: LiveRequest
    end: EndEntry
    letter: Burial | None  # the dead letter that its entry becomes, if any


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """Redis refuses for good a write that nobody waits for: a dead letter, an acknowledgement."""

    write: Burial | AsideWrite | RefreshWrite
    error: Exception


Verdict: TypeAlias = Drop | Fence | Bury | Finished | WriteRefused


class Outbox:
    """Collects outputs, and hands out writes when `FlushSchedule` says that they are due.

    Each request has at most one flush under way. Later output waits in the request itself, so the buffer is bounded by
    what the running requests may generate.

    Args:
        config: names, limits and times to live.
        requests: all requests of this worker.
        pace: interval between chunks.
        has_nodes: whether queue and reply may be on different servers.
    """

    def __init__(self, config: WorkerConfig, requests: RequestTable, pace: ChunkPace, *, has_nodes: bool) -> None:
        self.requests = requests
        self.retry_at_s = 0.0  # when writes that Redis did not take go out again (monotonic)
        self.is_stuck = False  # whether writes wait for Redis, also while they are retried
        self.num_chunks = 0  # confirmed so far
        self.num_tokens = 0
        self.num_absorbed = 0  # chunks that were sent twice
        self._config = config
        self._schedule = FlushSchedule(pace)
        self._removals = Removals(config, has_nodes=has_nodes)
        self._aside: list[Write] = []
        self._unsettled: list[Write] = []  # sent, or tried: the server's answer is not known or was "not now"

    @property
    def news(self) -> asyncio.Event:
        """Event that is set when something is due earlier than `due_s` said; the waiter clears it."""
        return self._schedule.news

    @property
    def is_empty(self) -> bool:
        """Whether everything was handed out and settled, except for writes under way."""
        return self._schedule.is_empty and self._removals.is_empty and not (self._aside or self._unsettled)

    @property
    def num_unsettled(self) -> int:
        """Number of writes that have to be sent again."""
        return len(self._unsettled)

    @property
    def leaving(self) -> set[str]:
        """Entries that are about to leave the queue: nobody need look at them again."""
        return self._removals.entry_ids()

    # Input.

    def push(self, live: LiveRequest, output: Output) -> None:
        """Receives the engine's output for one request."""
        if not live.is_gone:
            self._add(live, output)
            if output.prefill is None:
                self._schedule.note_output(live, self.requests)
            else:
                self._note_prefill(live, time.monotonic())
        self.requests.changed.fire()

    def end(self, live: LiveRequest, reason: FinishReason) -> None:
        """Ends a request that the engine does not have, unless it has ended."""
        live.end(reason)
        self.flush_soon(live)

    def fail(self, live: LiveRequest, code: str, message: str, *, is_dead: bool = False) -> None:
        """Ends a request that the engine does not have with an error; `is_dead`: its entry becomes a dead letter."""
        live.fail(code, message, is_dead=is_dead)
        self.flush_soon(live)

    def flush_soon(self, live: LiveRequest) -> None:
        """Writes a request's output without waiting for the interval."""
        live.reply.is_urgent = True
        self._schedule.add(live)

    def tell(self, command: Command) -> None:
        """Sends a command that nobody waits for with the next flush."""
        self._aside.append(AsideWrite(command))
        self.news.set()

    def remove(self, entry: Bill | Burial) -> None:
        """Acknowledges an entry, or makes a dead letter of it, with the next flush, if this worker still has it."""
        self._removals.add(entry)
        self.news.set()

    def bury(self, live: LiveRequest, code: str, message: str) -> Burial:
        """Makes a dead letter of the entry of a request that was given up, with the next flush."""
        letter = dead_letter(live, code, message, self._config)
        self.remove(letter)
        return letter

    def give_up(self, live: LiveRequest) -> None:
        """Tells readers that the request's keys hold something that no worker writes, as far as the reply can be
        written.
        """
        self.tell(unclaimed_end(live.id, live.asked, NOT_OURS, self._config))

    def _add(self, live: LiveRequest, output: Output) -> None:
        try:
            live.add(output)
        except Exception:  # one broken request must not lose the outputs of others
            live.log.exception("output_failed")
            live.fail("internal_error", "the worker failed to process the engine's output; its log says why")
            self.requests.abort(live)

    def _note_prefill(self, live: LiveRequest, now_s: float) -> None:
        reply = live.reply
        if live.prefill is None or live.prefill.num_computed <= reply.prefilled:  # less after it was preempted
            return
        if now_s >= reply.prefill_told_s + PREFILL_NEWS_S:
            reply.prefill_told_s, reply.tells_prefill = now_s, True
            self._schedule.add(live)

    # Output.

    def due_s(self) -> float | None:
        """Returns when to write next (monotonic); None: nothing to write."""
        if self._unsettled:
            return self.retry_at_s  # what blocks them would block the others too
        if self._aside:
            return 0.0
        due_s = self._schedule.due_s()
        return self._removals.due_s(self._schedule.next_flush_s) if due_s is None else due_s

    def collect(self, now_s: float) -> list[Write]:
        """Returns the writes that are due. Each comes back through `settle`, or is dropped by `still_valid`."""
        batch = [write for write in self._unsettled if not _is_of_gone(write)]
        self._unsettled = []
        for live in self._schedule.take(now_s):
            batch += self._take(live, now_s)
        batch += self._aside
        self._aside = []
        return batch + self._removals.collect(now_s)

    def _take(self, live: LiveRequest, now_s: float) -> list[Write]:
        live.reply.is_urgent = False
        live.reply.has_begun = live.reply.has_begun or any(each.pending.is_readable for each in live.choices)
        if live.has_ended:
            return [writes.take_end(live, end_entry(live), ttl_ms=kept_ms(live.asked, self._config))]
        taken: list[Write] = []
        if live.reply.tells_prefill and live.prefill is not None:  # None: there are tokens by now
            taken.append(writes.take_prefill(live, live.prefill))
        live.reply.tells_prefill = False
        taken += [writes.take_chunk(live, each) for each in live.choices if writes.has_news(live, each)]
        if now_s >= live.reply.refreshed_at_s + self._config.reply_ttl_s / 2:
            live.reply.refreshed_at_s = now_s
            taken += writes.refresh(live, round(self._config.reply_ttl_s * 1000))
        return taken

    def still_valid(self, batch: Iterable[Write]) -> list[Write]:
        """Returns the writes of a batch that make sense on a server that may have forgotten the last writes.

        A write is void if its request was let go, or if it removes an entry whose end may be unknown there. The intake
        finds such an entry pending, and the claim tells whether its reply has ended.
        """
        return [write for write in batch if not self.is_void(write) or self._withdraw(write)]

    def is_void(self, write: Write) -> bool:
        """Checks whether a write was meant for another server than the current one."""
        return bool(write.entry_ids) if isinstance(write, AsideWrite | Burial) else _is_of_gone(write)

    def _withdraw(self, write: Write) -> Literal[False]:
        if not isinstance(write, AsideWrite | Burial) or not self._removals.doubt(write):
            self.requests.recover()  # look again: the end was perhaps not yet known when the intake looked
        return False

    # Answers.

    def settle(self, write: Write, answer: Any, now_s: float) -> Verdict | None:
        """Handles the server's answer to a write, or the error that came instead.

        Returns:
            what others have to do about it; None, as nearly always: nothing.
        """
        if isinstance(answer, Exception) and retries.must_wait(answer):
            self._unsettled.append(write)  # unchanged: it may have arrived
            return None
        match write:
            case ChunkWrite():
                return self._settle_chunk(write, answer)
            case ProbeWrite():
                return self._settle_probe(write.chunk, answer)
            case FinishWrite():
                return self._settle_finish(write, answer, now_s)
            case EndCheck():
                if not self._removals.settle_check(write, answer):
                    self.requests.recover()
                return None
            case Burial() | AsideWrite() | RefreshWrite():
                return self._settle_aside(write, answer)

    def _settle_chunk(self, write: ChunkWrite, answer: Any) -> Verdict | None:
        if isinstance(answer, Exception):
            if not is_stale_id(answer):
                return Bury(write.live, answer)
            self._unsettled.append(ProbeWrite.of(write))
        elif answer is None:  # NOMKSTREAM: the reply stream has expired or was deleted
            return Drop(write.live, "gone")
        else:
            self._confirm(write)
        return None

    def _settle_probe(self, chunk: ChunkWrite, answer: Any) -> Verdict | None:
        """Handles a probe: the refused chunk is there (an earlier sending arrived), or a later claim is, or it can
        never arrive.
        """
        if isinstance(answer, Exception):
            return Bury(chunk.live, answer)
        found = scripts.parse_standing(answer)
        if found.entry_id is None:
            return Drop(chunk.live, "gone")
        if not found.is_of(chunk.live.claim):
            return Fence(chunk.live)
        if chunk.is_in(found):
            self.num_absorbed += 1
            self._confirm(chunk)
        elif found.entry_id == chunk.entry_id:  # its writer did not keep to the protocol
            return Bury(chunk.live, JournalError(f"reply entry {chunk.entry_id} is not what was written there"))
        else:
            writes.put_back(chunk)
            self._release(chunk.live)
        return None

    def _settle_finish(self, write: FinishWrite, answer: Any, now_s: float) -> Verdict:
        live = write.live
        if isinstance(answer, Exception):
            return Bury(live, answer)
        if answer == b"fenced":
            return Fence(live)
        if answer == b"lost":
            return Drop(live, "rolled_back")
        self.num_tokens += write.num_tokens
        letter = dead_letter(live, *live.error, self._config) if live.is_dead and live.error else None
        self._removals.add_ended(live, letter, now_s)
        return Finished(live, write.end, letter)

    def _settle_aside(self, write: Burial | AsideWrite | RefreshWrite, answer: Any) -> Verdict | None:
        is_refused = isinstance(answer, Exception) and not is_no_group(answer)
        if isinstance(write, Burial) and is_refused:  # its entry leaves the queue anyway, or it never would
            self._removals.give_up(write)
            self.news.set()
        elif not isinstance(write, RefreshWrite):
            self._removals.settle(write)
        return WriteRefused(write, answer) if is_refused else None

    def _confirm(self, write: ChunkWrite) -> None:
        write.choice.num_published += len(write.pending.token_ids)
        write.choice.is_closed |= write.is_last
        write.live.reply.last_number = max(write.live.reply.last_number, write.number)
        self.num_chunks += 1
        self.num_tokens += len(write.pending.token_ids)
        self._release(write.live)

    def _release(self, live: LiveRequest) -> None:
        live.reply.num_unsettled -= 1
        self._schedule.add(live)


def _is_of_gone(write: Write) -> bool:
    match write:
        case ChunkWrite() | FinishWrite():
            return write.live.is_gone
        case ProbeWrite():
            return write.chunk.live.is_gone
        case _:
            return False
