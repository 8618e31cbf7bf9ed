"""A gateway process's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram

from penstock.gateway.exposition import Registry
from penstock.producer.redis.faults import Trouble
from penstock.producer.version import __version__

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_LABELS = ("method", "route")


class Metrics:
    """One process's. Routes are named by their templates, and what leads nowhere is one route."""

    def __init__(self) -> None:
        self.registry = Registry(__version__)
        self.requests = Counter(
            "penstock_gateway_requests",
            "HTTP requests answered, by status; 499: the client went before.",
            (*_LABELS, "status"),
            registry=self.registry,
        )
        self.errors = Counter(
            "penstock_gateway_errors",
            "HTTP requests answered with an error before anything else, by its code for programs.",
            ("route", "code"),
            registry=self.registry,
        )
        self.generations = Counter(
            "penstock_gateway_generations",
            "Those of the HTTP requests that went to a queue, or would have but for a limit, by its model.",
            ("queue", "model", "status"),
            registry=self.registry,
        )
        self.open_requests = Gauge(
            "penstock_gateway_open_requests", "HTTP requests that are being answered.", registry=self.registry
        )
        self.first_byte_seconds = self._histogram("first_byte_seconds", "From the request to the status of its answer.")
        self.request_seconds = self._histogram("request_seconds", "From the request to the end of its answer.")
        self._served = Gauge(
            "penstock_gateway_queue_served",
            "1 if a worker serves the queue, 0 if none does; of queues that are set, or were ever seen served.",
            ("queue", "model"),
            registry=self.registry,
        )
        self.redis_up = Gauge(
            "penstock_gateway_redis_up", "1 if Redis answered this scrape in time.", registry=self.registry
        )
        self._trouble = Gauge(
            "penstock_gateway_redis_trouble",
            "1 while Redis is away, or refuses for a while (passing) or for good (refused).",
            ("kind",),
            registry=self.registry,
        )
        self.set_trouble(None)

    def watch_connections(self, count: Callable[[], int]) -> None:
        gauge = Gauge("penstock_gateway_connections", "Connections that clients hold.", registry=self.registry)
        gauge.set_function(count)

    def set_trouble(self, trouble: Trouble | None) -> None:
        """What is wrong with Redis."""
        for kind in get_args(Trouble):
            self._trouble.labels(kind).set(kind == trouble)

    def set_served(self, served: Mapping[tuple[str, str], bool]) -> None:
        """Of each queue and its model, whether it is served."""
        self._served.clear()
        for labels, is_served in served.items():
            self._served.labels(*labels).set(is_served)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"penstock_gateway_{name}", text, _LABELS, buckets=_SECONDS, registry=self.registry)
