from __future__ import annotations

from prometheus_client import generate_latest

from penstock.engine import EngineStats
from penstock.worker.metrics import DROP_REASONS, Metrics


def series(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_every_series_is_there_from_the_start() -> None:
    found = series(Metrics())
    expected = [
        *(f'penstock_dropped_requests_total{{reason="{reason}"}}' for reason in DROP_REASONS),
        *(f'penstock_requests_total{{finish_reason="{reason}"}}' for reason in ("stop", "length", "error")),
        "penstock_ready", "penstock_queue_lag", "penstock_engine_steps_total",
    ]  # fmt: skip
    assert {name: found[name] for name in expected} == dict.fromkeys(expected, 0)


def test_gauges_show_what_was_set_last() -> None:
    metrics = Metrics()
    metrics.set_service(num_live=3, is_ready=True)
    metrics.set_queue(length=5, pending=2, lag=3)
    metrics.set_engine(EngineStats(num_running=4, steps_total=7, compiles_after_warmup_total=1))
    found = series(metrics)
    assert (found["penstock_live_requests"], found["penstock_ready"]) == (3, 1)
    assert (found["penstock_queue_length"], found["penstock_queue_pending"], found["penstock_queue_lag"]) == (5, 2, 3)
    assert (found["penstock_engine_running_sequences"], found["penstock_engine_steps_total"]) == (4, 7)
    assert found["penstock_engine_compiles_after_warmup_total"] == 1


def test_two_workers_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.claims.inc()
    assert (series(first)["penstock_claims_total"], series(second)["penstock_claims_total"]) == (1, 0)
