from __future__ import annotations

from penstock.worker.readiness import Readiness


def test_each_part_gives_and_takes_back_its_own_reason() -> None:
    readiness = Readiness()
    assert readiness.is_ready
    readiness.not_ready("heartbeat", "no answer from Redis: refused")
    readiness.not_ready("service", "loading the model")
    readiness.not_ready("service", "warming up")
    assert not readiness.is_ready
    assert readiness.reasons == {"heartbeat": "no answer from Redis: refused", "service": "warming up"}
    readiness.ready("service")
    readiness.ready("publisher")
    assert readiness.reasons == {"heartbeat": "no answer from Redis: refused"}
    readiness.ready("heartbeat")
    assert readiness.is_ready
