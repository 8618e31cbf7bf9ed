"""Records a run: what every client saw, what the streams held in the end, and what was done to workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.tools.chaos.plan import RequestPlan

EventKind = Literal["start", "kill", "freeze", "wake", "restart", "end"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One entry of a reply stream, and when a client read it (monotonic)."""

    entry_id: str
    fields: dict[str, str]
    at_s: float = 0.0


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it."""

    request: RequestPlan
    entry_ids: list[str] = field(default_factory=list)  # of the queue entry, from the answer to each enqueue
    seen: list[Seen] = field(default_factory=list)
    stored: list[Seen] | None = None  # the whole reply stream, read after the run

    @property
    def has_ended(self) -> bool:
        return bool(self.seen) and self.seen[-1].fields.get("type") == "end"


@dataclass(frozen=True, slots=True)
class ChaosEvent:
    """An event of a worker, or of the server (then `worker` is empty), at `at_s` (monotonic)."""

    kind: EventKind
    worker: str
    at_s: float


@dataclass(slots=True)
class Wire:
    """Counts of what the proxies saw."""

    dropped: int = 0  # answers that were lost after the command had been executed
    cut: int = 0  # commands that were lost
    delayed: int = 0
    fenced: int = 0  # writes of a worker that had lost its claim, refused by the server
    absorbed: int = 0  # writes that had arrived before, refused by the server as duplicates


@dataclass(slots=True)
class History:
    records: dict[str, RequestRecord] = field(default_factory=dict)
    events: list[ChaosEvent] = field(default_factory=list)
    wire: Wire = field(default_factory=Wire)
    left_in_queue: int = 0  # entries after the run
    dead_letters: int = 0
    troubles: list[str] = field(default_factory=list)  # workers that ended by themselves
    missed: int = 0  # faults that found no moment, through no fault of the workers
    seconds: float = 0.0
