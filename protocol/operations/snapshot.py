"""State of a queue at one moment: workers, waiting and running requests, dead letters. It holds no request's text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.protocol.operations.reports import Phase, WorkerReport
from penstock.protocol.queue.load import QueueLoad
from penstock.protocol.wire import ModelCard

SILENT_AFTER_S = 0.9
"""A worker reports twice as often. An observer who looks once a second sees within two seconds that one was killed or
froze.
"""

WorkerState: TypeAlias = Literal["starting", "live", "unready", "draining", "silent", "lost"]
"""`silent`: it has not reported for `SILENT_AFTER_S`. `lost`: its heartbeat has lapsed, and others take over."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A consumer of a queue's group, or a process that will be one."""

    name: str
    num_taken: int  # requests taken and not finished
    heartbeat_left_ms: int | None  # until others take over, unless it beats again; None: no heartbeat
    is_draining: bool
    digest: str | None = None  # of its model
    report: WorkerReport | None = None  # None: it has not reported for too long, or its version does not report
    reported_s: float | None = None  # ago; None: not within `REMEMBERED_S`

    @property
    def is_live(self) -> bool:
        """Whether the worker's requests are safe from takeover. A worker that loads its model has none, and no
        heartbeat either.
        """
        return self.heartbeat_left_ms is not None

    @property
    def is_silent(self) -> bool:
        return self.reported_s is not None and self.reported_s > SILENT_AFTER_S

    @property
    def state(self) -> WorkerState:
        if not self.is_live:
            is_starting = self.report is not None and self.report.phase == "starting"
            return "lost" if not is_starting else "silent" if self.is_silent else "starting"
        if self.is_silent:
            return "silent"
        if self.is_draining:
            return "draining"
        return "unready" if self.report is not None and self.report.unready else "live"

    @property
    def heartbeat_s(self) -> float | None:
        """Seconds since the heartbeat was renewed; None: not known."""
        if self.heartbeat_left_ms is None or self.report is None or not self.report.heartbeat_ttl_ms:
            return None
        return max(0, self.report.heartbeat_ttl_ms - self.heartbeat_left_ms) / 1000


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that a worker has."""

    id: str
    worker: str
    tenant: str | None
    phase: Phase
    age_s: float  # since its enqueue
    running_s: float  # since this worker took it
    prompt_tokens: int
    tokens: int  # generated so far
    takeovers: int  # workers that had it before and died, drained or gave way
    prefilled: int = 0  # tokens computed, while a prompt takes several steps


@dataclass(frozen=True, slots=True)
class TenantLane:
    """A tenant with waiting requests, one of those next in turn in its band."""

    name: str  # "": requests without a tenant
    priority: int
    num_waiting: int  # with this priority
    served: float  # tokens divided by its weight: the tenant with the least is next


@dataclass(frozen=True, slots=True)
class Lane:
    """Requests that wait with one priority. Those that came since the last count are not included."""

    priority: int
    num_requests: int
    tokens: int  # of prompts and replies, estimated
    oldest_s: float
    num_tenants: int
    tenants: tuple[TenantLane, ...] = ()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up."""

    id: str  # of the letter
    request_id: str
    code: str
    worker: str
    age_s: float  # since it was given up
    crashes: int | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a queue at `at_ms`, by the server's clock."""

    queue: str
    at_ms: int
    workers: tuple[Worker, ...]  # by name
    running: tuple[RunningRequest, ...]  # as far as workers report them; the oldest first
    num_waiting: int  # requests that no worker has: the lag
    num_new: int | None  # how many of these are not counted yet; None: not known
    oldest_s: float | None  # age of the waiting request that came first; None: none waits, or nobody knows
    lanes: tuple[Lane, ...]  # the highest priority first
    load: QueueLoad | None  # None: there are no numbers
    card: ModelCard | None
    num_dead: int
    num_malformed: int
    letters: tuple[DeadLetter, ...]  # the newest first

    @property
    def num_running(self) -> int:
        return sum(worker.num_taken for worker in self.workers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second, by all workers that report."""
        heard = (worker.report for worker in self.workers if worker.report is not None and not worker.is_silent)
        return sum(report.tokens_per_s for report in heard)

    @property
    def slots(self) -> int:
        """Slots of all workers that take requests."""
        serving = (worker.report for worker in self.workers if worker.state in ("live", "unready"))
        return sum(report.slots for report in serving if report is not None)

    @property
    def load_age_s(self) -> float | None:
        """Age of `lanes` and `load`: some two seconds at most while a worker lives."""
        return None if self.load is None else max(0, self.at_ms - self.load.at_ms) / 1000

    def to_document(self) -> dict[str, Any]:
        """Returns the snapshot as JSON."""
        document = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in _MODELS
        }
        for name in ("running", "lanes", "letters"):
            document[name] = [dataclasses.asdict(each) for each in document[name]]
        return {
            **document,
            "workers": [worker_document(worker) for worker in self.workers],
            "load": None if self.load is None else dataclasses.asdict(self.load),
            "card": None if self.card is None else self.card.model_dump(exclude_none=True),
            "num_running": self.num_running,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "slots": self.slots,
            "load_age_s": self.load_age_s,
        }


_MODELS = frozenset({"workers", "load", "card"})


def worker_document(worker: Worker) -> dict[str, Any]:
    """Returns a worker as JSON, without its requests."""
    reported = {} if worker.report is None else worker.report.model_dump(exclude={"requests", "digest"})
    return {
        "name": worker.name,
        "state": worker.state,
        **reported,
        "digest": worker.digest,
        "num_taken": worker.num_taken,
        "heartbeat_left_ms": worker.heartbeat_left_ms,
        "heartbeat_s": worker.heartbeat_s,
        "reported_s": worker.reported_s,
    }
