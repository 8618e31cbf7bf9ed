"""Snapshots made without a server."""

from __future__ import annotations

from typing import Any

from penstock.protocol.operations.reports import WorkerReport
from penstock.protocol.operations.snapshot import DeadLetter, Lane, RunningRequest, Snapshot, TenantLane, Worker


def worker(name: str, **more: Any) -> Worker:
    report = WorkerReport(
        version="1.2", phase="serving", model="org/tiny", device="cpu", slots=4, running_sequences=2, pages=10,
        free_pages=5, cached_pages=2, tokens_per_s=1234.0, heartbeat_ttl_ms=1000,
    )  # fmt: skip
    values = {"num_taken": 2, "heartbeat_left_ms": 700, "is_draining": False, "report": report, "reported_s": 0.2}
    return Worker(name, **{**values, **more})


def running(request_id: str, **more: Any) -> RunningRequest:
    values = {
        "worker": "w0", "tenant": "acme", "phase": "running", "age_s": 75.0, "running_s": 3.0, "prompt_tokens": 7,
        "tokens": 1500, "takeovers": 2,
    }  # fmt: skip
    return RunningRequest(request_id, **{**values, **more})


def letter(letter_id: str) -> DeadLetter:
    return DeadLetter(letter_id, f"r-{letter_id}", "too_many_crashes", "w0", 4000.0, 3)


def snapshot(num_workers: int = 2, num_running: int = 3, num_letters: int = 1, **more: Any) -> Snapshot:
    values: dict[str, Any] = {
        "queue": "q",
        "at_ms": 10_000,
        "workers": tuple(worker(f"w{place}") for place in range(num_workers)),
        "running": tuple(running(f"r{place}") for place in range(num_running)),
        "num_waiting": 12,
        "num_new": 0,
        "oldest_s": 90.0,
        "lanes": (Lane(5, 12, 3400, 90.0, 1, (TenantLane("acme", 5, 12, 77.0),)),),
        "load": None,
        "card": None,
        "num_dead": num_letters,
        "num_malformed": 0,
        "letters": tuple(letter(f"1-{place}") for place in range(num_letters)),
    }
    return Snapshot(**{**values, **more})
