"""Prometheus metrics of a gateway process, in their own registry."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from penstock.protocol.redis.faults import Trouble
from penstock.protocol.version import __version__
from penstock.serving.exposition import Registry

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_LABELS = ("method", "route")

FORGET_AFTER_S = 3600.0
"""Metrics of a queue are dropped once nobody has served it, asked for it or put anything into it for this long."""

MOST_CODES = 64
OTHER = "other"
"""Replaces codes beyond a limited number: writers of replies could invent any."""


class GatewayMetrics:
    """Metrics of one process. Routes are named by their templates; unknown paths share one route."""

    def __init__(self) -> None:
        self.registry = Registry(__version__)
        self.requests = Counter(
            "penstock_gateway_requests",
            "HTTP requests answered, by status; 499: the client left.",
            (*_LABELS, "status"),
            registry=self.registry,
        )
        self.errors = Counter(
            "penstock_gateway_errors",
            "HTTP requests answered with an error, by its code.",
            ("route", "code"),
            registry=self.registry,
        )
        self.generations = Counter(
            "penstock_gateway_generations",
            "HTTP requests that went to a queue, or would have but for a limit.",
            ("queue", "model", "status"),
            registry=self.registry,
        )
        self.open_requests = Gauge(
            "penstock_gateway_open_requests", "HTTP requests being answered.", registry=self.registry
        )
        self.first_byte_seconds = self._histogram(
            "first_byte_seconds", "Seconds from the request to the status of its answer."
        )
        self.request_seconds = self._histogram("request_seconds", "Seconds from the request to the end of its answer.")
        self._served = Gauge(
            "penstock_gateway_queue_served",
            "1 if a worker serves the queue, else 0; for queues that are set, have requests, or were served "
            "or asked for within the last hour.",
            ("queue", "model"),
            registry=self.registry,
        )
        self.redis_up = Gauge(
            "penstock_gateway_redis_up", "1 if Redis answered this scrape in time.", registry=self.registry
        )
        self._trouble = Gauge(
            "penstock_gateway_redis_trouble",
            "1 while Redis is away, refuses for now (passing) or for good (refused), or fails in another way (other).",
            ("kind",),
            registry=self.registry,
        )
        self.set_trouble(None)
        self._codes: set[str] = set()
        self._generated_s: dict[tuple[str, str], float] = {}  # when a queue last had requests with a model, or workers

    def count_error(self, route: str, code: str) -> None:
        if code not in self._codes and len(self._codes) < MOST_CODES:
            self._codes.add(code)
        self.errors.labels(route, code if code in self._codes else OTHER).inc()

    def count_generation(self, queue: str, model: str, status: int) -> None:
        self._generated_s[queue, model] = time.monotonic()
        self.generations.labels(queue, model, str(status)).inc()

    def watch_connections(self, count: Callable[[], int], count_turned_away: Callable[[], int]) -> None:
        gauge = Gauge("penstock_gateway_connections", "Open connections of clients.", registry=self.registry)
        gauge.set_function(count)
        self.registry.register(_TurnedAway(count_turned_away))

    def set_trouble(self, trouble: Trouble | None) -> None:
        """Sets what is wrong with Redis."""
        for kind in get_args(Trouble):
            self._trouble.labels(kind).set(kind == trouble)

    def set_served(self, served: Mapping[tuple[str, str], bool]) -> None:
        """Sets, for each queue and its model, whether it is served."""
        self._served.clear()
        for labels, is_served in served.items():
            self._served.labels(*labels).set(is_served)
        self._forget(served)

    def _forget(self, told: Container[tuple[str, str]]) -> None:
        """Forgets counters of queues and models that are gone."""
        now_s = time.monotonic()
        for pair, at_s in list(self._generated_s.items()):
            if pair in told:
                self._generated_s[pair] = now_s
            elif now_s - at_s >= FORGET_AFTER_S:
                del self._generated_s[pair]
                self._remove(pair)

    def _remove(self, pair: tuple[str, str]) -> None:
        [family] = self.generations.collect()
        for sample in family.samples:
            if pair == (sample.labels["queue"], sample.labels["model"]) and sample.name.endswith("_total"):
                self.generations.remove(*pair, sample.labels["status"])

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"penstock_gateway_{name}", text, _LABELS, buckets=_SECONDS, registry=self.registry)


class _TurnedAway(Collector):
    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def collect(self) -> Iterator[Metric]:
        text = "Connections refused because all of max_connections were taken (503)."
        yield CounterMetricFamily("penstock_gateway_turned_away", text, self._count())
