from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from redis import exceptions
from structlog.testing import capture_logs

from penstock.serving.readiness import REMINDER_S, SETTLED_S, Readiness

REFUSED = exceptions.ConnectionError("Error 111 connecting to localhost:6379.")


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with capture_logs() as captured:
        yield captured


def test_each_part_gives_and_takes_back_its_own_reason() -> None:
    readiness = Readiness()
    assert readiness.is_ready
    readiness.not_ready("heartbeat", "some trouble")
    readiness.not_ready("service", "loading the model")
    readiness.not_ready("service", "warming up")
    reasons = {"heartbeat": "some trouble", "service": "warming up"}
    assert (readiness.is_ready, readiness.reasons) == (False, reasons)
    readiness.ready("service")
    readiness.ready("publisher")
    assert readiness.reasons == {"heartbeat": "some trouble"}
    readiness.ready("heartbeat")
    assert readiness.is_ready


def test_an_outage_is_one_line_a_reminder_a_minute_and_one_line_at_its_end(
    monkeypatch: pytest.MonkeyPatch, lines: list[Any]
) -> None:
    now = [100.0]
    monkeypatch.setattr("penstock.serving.readiness._log", structlog.get_logger())
    readiness = Readiness("redis://localhost:6379/0", lambda: now[0])
    for now[0] in (100.0, 100.1, 101.0, 100.0 + REMINDER_S - 0.1):
        for part in ("intake", "heartbeat", "publisher"):
            readiness.lost_redis(part, REFUSED)
    assert readiness.reasons["intake"] == "no connection to Redis"  # and no address: anybody may ask
    for now[0] in (100.0 + REMINDER_S, 100.0 + 2 * REMINDER_S - 0.1):
        readiness.lost_redis("intake", REFUSED)
    now[0] = 300.0
    for part in ("service", "intake", "heartbeat", "publisher"):
        assert lines[-1]["event"] == "redis_still_unavailable"
        readiness.ready(part)
    assert readiness.is_ready
    assert [(line["event"], line["log_level"], line["redis"]) for line in lines] == [
        ("redis_unavailable", "warning", "redis://localhost:6379/0"),
        ("redis_still_unavailable", "warning", "redis://localhost:6379/0"),
        ("redis_back", "info", "redis://localhost:6379/0"),
    ]
    assert "redis-server" in lines[0]["hint"]
    assert (lines[1]["for_s"], lines[2]["after_s"]) == (60, 200.0)


def test_what_is_refused_among_what_is_not_is_one_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, lines: list[Any]
) -> None:
    """When other commands of a part succeed it becomes ready in between, but is not cured."""
    now = [0.0]
    monkeypatch.setattr("penstock.serving.readiness._log", structlog.get_logger())
    readiness = Readiness("", lambda: now[0])
    refused = exceptions.NoPermissionError("no permissions", status_code="NOPERM")
    for second in range(int(REMINDER_S) + 1):
        now[0] = float(second)
        readiness.lost_redis("part", refused)
        assert (readiness.trouble, readiness.refused_for_s) == ("refused", second)
        readiness.ready("part")
        assert (readiness.trouble, readiness.refused_for_s) == (None, 0.0)
        assert readiness.refused.is_set()
    said = [line["event"] for line in lines]
    assert said == ["redis_unavailable", "redis_back", "redis_still_unavailable", "redis_back"]
    readiness.lost_redis("part", exceptions.OutOfMemoryError("full", status_code="OOM"))
    assert lines[-1]["event"] == "redis_unavailable"
    now[0] += SETTLED_S
    readiness.ready("part")
    assert not readiness.refused.is_set()
    readiness.lost_redis("part", refused)
    readiness.ready("part")
    now[0] += SETTLED_S
    readiness.lost_redis("part", refused)
    assert [line["event"] for line in lines].count("redis_unavailable") == 4
