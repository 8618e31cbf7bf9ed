"""Pushes the metrics that a scrape shows by OTLP as well: the same families, so that nothing is counted twice.

OpenTelemetry has exporters for its own instruments, and a collector that scrapes; it has none for a registry of
prometheus_client. Families are converted by
https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

import structlog
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family

from penstock.protocol.version import __version__

CLOSE_TIMEOUT_S = 3.0
REFRESH_TIMEOUT_S = 5.0
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_DEFAULT_INTERVAL_MS = 60_000
_SCOPE = InstrumentationScope("penstock", __version__)
_log = structlog.get_logger(__name__)


class MetricPush:
    """Exports a registry every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds, and at the end, from its own thread.

    Args:
        exporter: sends the metrics, and logs failures.
        resource: the resource that the metrics belong to.
        registry: the metrics that a scrape shows.
        refresh: updates the registry, in the event loop.
    """

    def __init__(
        self,
        exporter: MetricExporter,
        resource: Resource,
        registry: CollectorRegistry,
        refresh: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._exporter = exporter
        self._resource = resource
        self._registry = registry
        self._refresh = refresh
        self._interval_s = interval_s()
        self._stopping = threading.Event()
        self._started_ns = time.time_ns()

    def start(self) -> None:
        """Starts the thread. Call it in the event loop that `refresh` belongs to."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="penstock-metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Exports once more, in `CLOSE_TIMEOUT_S` at most."""
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            with suppress(RuntimeError, TimeoutError, CancelledError):  # the loop has ended, or something hangs
                asyncio.run_coroutine_threadsafe(self._refresh(), self._loop).result(REFRESH_TIMEOUT_S)
            self._export()
        self._export()
        self._exporter.shutdown()

    def _export(self) -> None:
        try:
            self._exporter.export(as_otlp(self._registry.collect(), self._resource, self._started_ns))
        except Exception:
            _log.warning("metrics_not_sent", exc_info=True)


def interval_s() -> float:
    """Returns the time between two exports, from the environment; an invalid number counts as not set."""
    try:
        interval_ms = float(os.environ.get(INTERVAL, "") or _DEFAULT_INTERVAL_MS)
    except ValueError:
        interval_ms = 0
    return (interval_ms if interval_ms > 0 else _DEFAULT_INTERVAL_MS) / 1000


def as_otlp(families: Iterable[Family], resource: Resource, started_ns: int) -> MetricsData:
    """Converts families of metrics to OTLP. All counts begin at `started_ns` (since the epoch)."""
    now_ns = time.time_ns()
    metrics = [
        Metric(f"{family.name}_info" if family.type == "info" else family.name, family.documentation, family.unit, data)
        for family in families
        if (data := _data(family, started_ns, now_ns)) is not None
    ]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(_SCOPE, metrics, "")], "")])


def _data(family: Family, started_ns: int, now_ns: int) -> Sum | Gauge | Histogram | None:
    """Converts one family; None: it has no samples."""
    if family.type == "histogram":
        found = list(_histograms(family, started_ns, now_ns))
        return Histogram(found, AggregationTemporality.CUMULATIVE) if found else None
    points = [
        NumberDataPoint(sample.labels, started_ns, now_ns, sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    if not points:
        return None
    if family.type == "counter":
        return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Gauge(points)


def _histograms(family: Family, started_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """Yields a point for each set of labels. Prometheus's buckets include all lower ones; OTLP's do not."""
    found: dict[tuple[tuple[str, str], ...], _Buckets] = {}
    for sample in family.samples:
        labels = tuple(item for item in sample.labels.items() if item[0] != "le")
        buckets = found.setdefault(labels, _Buckets())
        if sample.name.endswith("_bucket"):
            buckets.upto[float(sample.labels["le"])] = int(sample.value)
        elif sample.name.endswith("_sum"):
            buckets.total = sample.value
    for labels, buckets in found.items():
        bounds = sorted(buckets.upto)
        upto = [buckets.upto[bound] for bound in bounds]
        counts = [count - before for count, before in zip(upto, [0, *upto], strict=False)]
        yield HistogramDataPoint(
            dict(labels),
            started_ns,
            now_ns,
            count=upto[-1],
            sum=buckets.total,
            bucket_counts=counts,
            explicit_bounds=bounds[:-1],  # the last is infinity
            min=None,  # type: ignore[arg-type]  # optional in OTLP, and Prometheus has none
            max=None,  # type: ignore[arg-type]
        )


class _Buckets:
    def __init__(self) -> None:
        self.upto: dict[float, int] = {}
        self.total = 0.0
