"""Reports of workers on themselves and their requests, twice a second. They never hold a request's text.

A report is a JSON document under a key that expires (`keys.report`). Only operators may read it, as it holds request
ids. `keys.reports` holds the server's time of each worker's last report, for a while longer than the report itself.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.protocol.wire.values import explain

REPORT_INTERVAL_S = 0.5

REMEMBERED_S = 60.0
"""Time for which a worker stays listed after its last report, so that operators who looked away still see that it is
lost.
"""

MAX_REPORTED = 256
"""Limit on the requests that a worker's report lists. Those that it has had the longest come first."""

Phase: TypeAlias = Literal["preparing", "running", "ending"]
WorkerPhase: TypeAlias = Literal["starting", "serving", "draining"]


class ReportedRequest(BaseModel):
    """One request that a worker has. Times are the server's, in ms."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    enqueued_ms: int
    claimed_ms: int  # by this worker
    turn: int  # claims so far, this one included
    phase: Phase = "running"
    tenant: str | None = None
    prompt_tokens: int = 0
    tokens: int = 0  # generated so far, over all claims
    prefilled: int = 0  # tokens computed, while a prompt takes several steps


class WorkerReport(BaseModel):
    """A worker's state. A field that it does not know is None."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: str  # of Penstock
    phase: WorkerPhase
    unready: str | None = None  # what it waits for, or what is wrong
    heartbeat_ttl_ms: int = 0
    model: str | None = None
    digest: str | None = None  # of its model, as `ModelCard.digest`
    device: str | None = None  # such as `cpu` or `4 x tpu (TPU v5e)`
    slots: int = 0  # most sequences that run at once
    running_sequences: int = 0
    waiting_sequences: int = 0  # in the engine, for a slot or for pages
    pages: int = 0
    free_pages: int = 0  # pages that hold nothing
    cached_pages: int = 0  # pages that only the prefix cache holds
    tokens_per_s: float = 0.0  # generated, over some two seconds
    num_requests: int = 0  # requests that it has
    requests: tuple[ReportedRequest, ...] = ()  # at most `MAX_REPORTED` of these

    def encode(self) -> str:
        """Returns the JSON document, without fields that have their default."""
        return self.model_dump_json(exclude_defaults=True)


def decode_report(text: bytes) -> WorkerReport:
    """Reads a report. Fields that a later version has are ignored.

    Raises:
        ValueError: it is not a report.
    """
    try:
        return WorkerReport.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"the worker report's key holds no valid report: {explain(error)}") from None
