"""Decides which entries leave the queue, and when: only while an entry's end is known to be on the reply stream."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from penstock.protocol.scripts import Bill
from penstock.worker.config import WorkerConfig
from penstock.worker.publish import writes
from penstock.worker.publish.writes import AsideWrite, Burial, EndCheck, Write
from penstock.worker.run.requests import LiveRequest

ENDS_SETTLE_S = 2.0
"""Delay in a cluster between writing an end and removing its entry, which also requires that the end is still there.

The queue's node and the reply's node may lose different last writes, by a power cut (`appendfsync everysec`) or to a
lagging replica. An end that is lost after its entry was removed would never be made again. On one server the end is in
the log before the removal.
"""


class Removals:
    """Holds entries to acknowledge or to turn into dead letters. Belongs to the publisher.

    Args:
        config: the queue's and the worker's names, and for how long ends are kept.
        has_nodes: whether queue and reply may be on different servers.
    """

    def __init__(self, config: WorkerConfig, *, has_nodes: bool) -> None:
        self._config = config
        self._has_nodes = has_nodes
        self._ready: list[Bill | Burial] = []
        self._settling: deque[tuple[float, EndCheck]] = deque()  # (monotonic time, check before removal)
        self._leaving: dict[str, EndCheck | None] = {}  # entries whose removal is not confirmed, with their checks

    @property
    def is_empty(self) -> bool:
        return not (self._ready or self._settling)

    def entry_ids(self) -> set[str]:
        """Returns the entries that are about to leave: nobody need look at them again."""
        return set(self._leaving)

    def due_s(self, next_flush_s: float) -> float | None:
        """Returns when the next removal is due (monotonic), given the next flush; None: nothing to write."""
        if self._ready:
            return next_flush_s
        return max(next_flush_s, self._settling[0][0]) if self._settling else None

    def add(self, entry: Bill | Burial) -> None:
        """Adds an entry that needs no end, or whose end another worker's claim has confirmed."""
        self._leaving.setdefault(entry.entry_id, None)
        self._ready.append(entry)

    def add_ended(self, live: LiveRequest, letter: Burial | None, now_s: float) -> None:
        """Adds the entry of a request whose end was just written; it becomes `letter`, if there is one."""
        check = self._leaving[live.entry_id] = EndCheck.of(live, letter or live.bill)
        if self._has_nodes:
            wait_s = min(ENDS_SETTLE_S, self._config.reply_ttl_after_end_s / 2)
            self._settling.append((now_s + wait_s, check))
        else:
            self._ready.append(check.removal)

    def collect(self, now_s: float) -> list[Write]:
        """Returns what to write now."""
        taken: list[Write] = []
        while self._settling and self._settling[0][0] <= now_s:
            taken.append(self._settling.popleft()[1])
        ready, self._ready = self._ready, []
        taken += [entry for entry in ready if isinstance(entry, Burial)]
        if bills := [entry for entry in ready if isinstance(entry, Bill)]:
            taken.append(writes.acknowledge(self._config.queue, self._config.name, bills))
        return taken

    def settle_check(self, check: EndCheck, answer: object) -> bool:
        """Lets the entry go if its end is there, or is unreadable, so it can't be remade; returns whether it goes."""
        if isinstance(answer, Exception) or EndCheck.is_there(answer):
            self._ready.append(check.removal)
            return True
        self._leaving.pop(check.entry_id, None)
        return False

    def settle(self, write: AsideWrite | Burial) -> None:
        """Forgets the entries of an answered write."""
        for entry_id in write.entry_ids:
            self._leaving.pop(entry_id, None)

    def give_up(self, burial: Burial) -> None:
        """Removes the entry without its dead letter, which can't be kept."""
        check = self._leaving.get(burial.entry_id)
        bill = Bill(burial.entry_id, "", None)
        self._leaving[burial.entry_id] = check and replace(check, removal=bill)
        self._ready.append(bill)

    def doubt(self, write: AsideWrite | Burial) -> bool:
        """Holds back an unsent removal after a change of servers: the end may be unknown to the new one.

        False: this process does not know what to check, so the worker that finds the entry pending claims it.
        """
        checks = [self._leaving.get(entry_id) for entry_id in write.entry_ids]
        self._settling.extendleft((0.0, check) for check in checks if check is not None)
        for entry_id, check in zip(write.entry_ids, checks, strict=True):
            if check is None:
                self._leaving.pop(entry_id, None)
        return None not in checks
