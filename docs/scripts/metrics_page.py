"""Writes docs/metrics.md from the metrics: `python -m docs.scripts.metrics_page > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric

from penstock.engine.stats import DeviceMemory, EngineInfo, EngineStats, KindStats
from penstock.gateway.metrics import GatewayMetrics
from penstock.worker.metrics import WorkerMetrics

_HEAD = """# Metrics

<!-- Written by `make docs` from the code (docs/scripts/metrics_page.py); a test compares them. -->

A worker shows its metrics at `/metrics` of its health port (`health_port`), a gateway at a port of their own
(`metrics_port`, one for each of its processes). Who sends `Accept: application/openmetrics-text` gets OpenMetrics, as
Prometheus does; others get Prometheus's text.

- **Labels.** Every sample of a worker has `queue` and `model`; `model` is empty until the model is loaded. No label is
  a tenant, a request, a key or a worker's name, so clients can't make series. The label `priority` has the values that
  requests wait with, 64 at most. Prometheus adds `job` and `instance`.
- **Process and queue.** Counters and histograms are those of one process: sum them. The gauges of a queue
  (`penstock_queue_*`, `penstock_waiting_*`, `penstock_oldest_wait_seconds`, `penstock_backlog_tokens`,
  `penstock_fleet_*`, `penstock_wanted_workers`, `penstock_dead_letters_kept`) are the same in each of its workers: take
  `max by (queue)`. One worker measures them for all, once a second ([scaling.md](scaling.md)); dead letters are
  counted at each scrape.
- **Tokens add up.** `prompt_tokens`, `prompt_tokens_cached` and `generation_tokens` are the sums of the usage of the
  replies that ended, each counted by the worker that wrote the end. Over all workers, `published_tokens` is
  `generation_tokens` plus the tokens of replies that still run. `engine_generated_tokens` also counts tokens that were
  dropped because another worker had the request. `prefix_cache_queries - prefix_cache_hits` is the number of prompt
  tokens computed, including tokens from before a preemption or a takeover. A killed process loses what it counted
  since the last scrape, and so does a Redis that loses data.
- **Names.** What vLLM has too is called the same, with `vllm:` in the place of `penstock_`: `prompt_tokens`,
  `generation_tokens`, `prompt_tokens_cached`, `request_prompt_tokens`, `request_generation_tokens`,
  `prefix_cache_queries`, `prefix_cache_hits`, `kv_cache_usage_perc`, `time_to_first_token_seconds`.
- **Dead workers** export nothing. Others count those whose heartbeat lapsed (`penstock_lost_workers_total`); a gateway
  shows which queues nobody serves (`penstock_gateway_queue_served`); Prometheus has `up`.

[deploy/prometheus/rules](../deploy/prometheus/rules) has alerts, [runbook.md](runbook.md) what to do about each, and
[deploy/grafana/dashboards](../deploy/grafana/dashboards) dashboards.
[scaling.md](scaling.md) has the numbers to scale by.
"""

_SUFFIXES = {"counter": "_total", "info": "_info"}
_INFO = EngineInfo(1, "", "", 1, 1, 1, "", "", 1, "", "", None, 1)


def page() -> str:
    worker = WorkerMetrics("queue")
    worker.set_model("model", _INFO)
    worker.set_engine(EngineStats(kinds=(KindStats(0, 0, 0),)), [DeviceMemory(0, 0, 0, 0)])
    return "\n".join([_HEAD, *_table("Of a worker", worker.registry), *_table("Of a gateway", _gateway())])


def _gateway() -> CollectorRegistry:
    """Makes a registry with one sample of each family."""
    metrics = GatewayMetrics()
    metrics.watch_connections(lambda: 0, lambda: 0)
    metrics.set_served({("queue", "model"): True})
    metrics.requests.labels("GET", "/", "200")
    metrics.errors.labels("/", "code")
    metrics.generations.labels("queue", "model", "200")
    for histogram in (metrics.first_byte_seconds, metrics.request_seconds):
        histogram.labels("GET", "/")
    return metrics.registry


def _table(title: str, registry: CollectorRegistry) -> Iterator[str]:
    rows = [_row(family) for family in registry.collect()]
    yield "\n".join([f"## {title}", "", "| metric | kind | labels | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _row(family: Metric) -> str:
    name = family.name + _SUFFIXES.get(family.type, "")
    return f"| `{name}` | {family.type} | {'; '.join(_labels(family))} | {family.documentation} |"


def _labels(family: Metric) -> Iterator[str]:
    """Yields the labels that not all families have, with values known beforehand."""
    names = dict.fromkeys(name for sample in family.samples for name in sample.labels)
    for name in names:
        values = dict.fromkeys(sample.labels[name] for sample in family.samples if name in sample.labels)
        if name != "le" and not _is_of_all(name, family):
            yield f"`{name}`" + (f": {_listed(values)}" if len(values) > 1 else "")


def _is_of_all(name: str, family: Metric) -> bool:
    return name in ("queue", "model") and not family.name.startswith("penstock_gateway_")


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


if __name__ == "__main__":
    sys.stdout.write(page())
