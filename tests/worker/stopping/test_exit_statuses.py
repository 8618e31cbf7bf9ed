"""Each reason for which a worker ends has an exit status of its own."""

from __future__ import annotations

from penstock.worker.errors import WorkerError


def test_exit_statuses_differ() -> None:
    statuses = [error.exit_status for error in WorkerError.__subclasses__()]
    assert len(set(statuses)) == len(statuses)
    assert 0 not in statuses
