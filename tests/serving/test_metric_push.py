"""OTLP metrics equal those of a scrape, family by family."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry

from penstock.gateway.metrics import GatewayMetrics
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.telemetry.loading import load_telemetry
from penstock.protocol.telemetry.sdk import Telemetry
from penstock.serving.exporting import exporting
from penstock.serving.exposition import Registry
from penstock.serving.metric_push import as_otlp, interval_s
from penstock.worker.metrics import WorkerMetrics
from tests.support.otlp_collector import Collector
from tests.support.patience import WAIT_S
from tests.support.programs.worker_harness import read_reply, running_worker, send

HERE = Resource({"service.name": "here"})


class Kept(MetricExporter):
    """Keeps what it gets, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.exported: list[MetricsData] = []
        self.is_shut_down = False
        self._error = error

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any) -> MetricExportResult:
        self.exported.append(metrics_data)
        if self._error is not None:
            raise self._error
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
        self.is_shut_down = True


def by_name(data: MetricsData) -> dict[str, Any]:
    [of_resource] = data.resource_metrics
    assert of_resource.resource == HERE
    [of_scope] = of_resource.scope_metrics
    found = {metric.name: metric.data for metric in of_scope.metrics}
    assert len(found) == len(of_scope.metrics)
    return found


def worker_metrics() -> WorkerMetrics:
    metrics = WorkerMetrics("q")
    metrics.requests.labels(finish_reason="stop").inc(3)
    for seconds in (0.001, 0.3, 0.3, 4000.0):
        metrics.request_seconds.observe(seconds)
    metrics.set_service(num_live=7, is_ready=True)
    return metrics


def test_counters_gauges_and_histograms_are_what_they_are() -> None:
    data = by_name(as_otlp(worker_metrics().registry.collect(), HERE, 5))
    requests = data["penstock_requests"]
    assert isinstance(requests, Sum)
    assert requests.is_monotonic
    assert requests.aggregation_temporality is AggregationTemporality.CUMULATIVE
    counts = {(point.attributes or {})["finish_reason"]: point.value for point in requests.data_points}
    assert (counts["stop"], counts["length"]) == (3, 0)
    assert {(point.attributes or {})["queue"] for point in requests.data_points} == {"q"}
    assert {point.start_time_unix_nano for point in requests.data_points} == {5}
    live = data["penstock_live_requests"]
    assert isinstance(live, Gauge)
    assert [point.value for point in live.data_points] == [7]
    assert data["penstock_build_info"].data_points[0].value == 1
    seconds = data["penstock_request_seconds"]
    assert isinstance(seconds, Histogram)
    [point] = seconds.data_points
    assert (point.count, point.sum) == pytest.approx((4, 4000.601))
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    filled = {bound: count for bound, count in zip(point.explicit_bounds, point.bucket_counts, strict=False) if count}
    assert filled == {0.005: 1, 0.5: 2}
    assert point.bucket_counts[-1] == 1


@pytest.mark.parametrize("registry", [worker_metrics().registry, GatewayMetrics().registry], ids=["worker", "gateway"])
def test_every_number_of_a_scrape_is_there(registry: Registry) -> None:
    """The numbers are read back from OTLP, as a server that writes Prometheus's names would."""
    scraped = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.startswith("process_")  # they go on
    }
    sent = {
        key: value
        for name, data in by_name(as_otlp(registry.collect(), HERE, 0)).items()
        for key, value in back(name, data)
        if not name.startswith("process_")
    }
    assert sent == scraped
    assert len(sent) > 2


def back(name: str, data: Any) -> Iterator[tuple[tuple[str, frozenset[tuple[str, str]]], float]]:
    for point in data.data_points:
        labels = frozenset(point.attributes.items())
        if isinstance(data, Histogram):
            upto = 0
            for bound, count in zip([*point.explicit_bounds, float("inf")], point.bucket_counts, strict=True):
                upto += count
                le = "+Inf" if bound == float("inf") else str(bound)
                yield (f"{name}_bucket", labels | {("le", le)}), upto
            yield (f"{name}_count", labels), point.count
            yield (f"{name}_sum", labels), point.sum
        else:
            yield (f"{name}_total" if isinstance(data, Sum) else name, labels), point.value


async def test_a_worker_sends_what_it_counted(redis_url: str, redis: RedisClient) -> None:
    """Values are sent again and again while it serves, and the last ones at the end."""
    with Collector() as collector:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**collector.environment, "OTEL_TRACES_EXPORTER": "none"}.items():
                patch.setenv(name, value)
            telemetry = load_telemetry("penstock-worker", "w")
            async with running_worker(redis_url, telemetry=telemetry) as running:
                await send(redis, prompt="x", id="x", max_tokens=3)
                await read_reply(redis, "x")
                await asyncio.to_thread(collector.wait_for, lambda: len(collector.metrics) > 2, WAIT_S)
                await running.drain()
        [of_resource] = collector.metrics[-1].resource_metrics
    said = {each.key: each.value.string_value for each in of_resource.resource.attributes}
    assert (said["service.name"], said["service.instance.id"]) == ("penstock-worker", "w")
    metrics = {metric.name: metric for of_scope in of_resource.scope_metrics for metric in of_scope.metrics}
    assert sum(point.as_double for point in metrics["penstock_requests"].sum.data_points) == 1
    assert [point.count for point in metrics["penstock_request_seconds"].histogram.data_points] == [1]
    assert not metrics["penstock_request_seconds"].histogram.data_points[0].HasField("min")
    assert [point.as_double for point in metrics["penstock_generation_tokens"].sum.data_points] == [3]
    assert collector.spans == []


async def test_an_exporter_that_breaks_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1")
    exporter, refreshed = Kept(RuntimeError("no")), asyncio.Event()

    async def refresh() -> None:
        if len(exporter.exported) > 2:
            refreshed.set()

    with structlog.testing.capture_logs() as logs:
        async with exporting(Telemetry(HERE, None, exporter), CollectorRegistry(), refresh):
            await refreshed.wait()
    assert exporter.is_shut_down
    assert {line["event"] for line in logs} == {"metrics_not_sent"}


async def test_without_telemetry_nothing_is_sent() -> None:
    async def refresh() -> None:
        raise AssertionError

    async with exporting(None, CollectorRegistry(), refresh):
        pass


@pytest.mark.parametrize(("value", "expected"), [("", 60), ("500", 0.5), ("soon", 60), ("0", 60), ("-1", 60)])
def test_the_interval_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, expected: float) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", value)
    assert interval_s() == expected
