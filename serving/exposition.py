"""Exposition of metrics to scrapers, for the gateway and the worker."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Info, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from penstock.serving import log_lines


class Registry(CollectorRegistry):
    """Metrics of one service, with the same labels on every sample.

    It starts with the build (`penstock_build_info`) and the process's resources (`process_*`, on Linux).
    """

    def __init__(self, version: str) -> None:
        super().__init__()
        self._labels: dict[str, str] = {}
        build = Info("penstock_build", "The version of Penstock, and of Python; always 1.", registry=self)
        build.info({"version": version, "python": platform.python_version()})
        self.register(_Process())
        self.register(_Log())

    def set_labels(self, **labels: str) -> None:
        """Sets labels for every sample from now on. No family may itself have a label of such a name."""
        self._labels |= labels

    def collect(self) -> Iterator[Metric]:
        """Yields all families without `_created` series: these would double the number, and
        `process_start_time_seconds` suffices.
        """
        for family in super().collect():
            family.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family


class _Process(Collector):
    """Reports the kernel's figures about this process; nothing if they are missing or malformed."""

    def __init__(self) -> None:
        self._collector: ProcessCollector | None = None
        with suppress(ValueError, IndexError):  # OSError is the collector's own
            self._collector = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Metric]:
        with suppress(ValueError, IndexError, UnboundLocalError):  # the last: `limits` lacks a line
            return [] if self._collector is None else list(self._collector.collect())
        return []


class _Log(Collector):
    def collect(self) -> Iterator[Metric]:
        text = "Lines of the log that were dropped, as the log could not be written to."
        yield CounterMetricFamily("penstock_log_lines_dropped", text, log_lines.num_dropped())


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Returns the page and its content type: OpenMetrics for clients that accept it, else Prometheus's text format.

    Args:
        registry: the metrics to show.
        accept: the header of the request; may be empty.
    """
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
