"""Writes docs/metrics.md from the metrics: `python -m docs.scripts.metrics_page > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric

from penstock.engine.stats import DeviceMemory, EngineInfo, EngineStats, KindStats
from penstock.gateway.metrics import GatewayMetrics
from penstock.worker.metrics import WorkerMetrics

_HEAD = """# Metrics

<!-- Written by `make docs` from the code (docs/scripts/metrics_page.py); a test compares them. -->

A worker shows its metrics at `/metrics` of its `health_port`, each process of a gateway at a `metrics_port` of its own.
With `Accept: application/openmetrics-text` they are OpenMetrics, otherwise Prometheus's text.
[operations.md](operations.md#metrics-dashboards-and-alerts) has alerts and dashboards.

- **Labels.** Every sample of a worker has `queue` and `model`; `model` is empty until the model is loaded. No label is
  a tenant, a request, a key or a worker's name, so clients can't make series. The label `priority` has at most 64
  values.
- **Process and queue.** Counters and histograms are those of one process: sum them. The gauges of a queue
  (`penstock_queue_*`, `penstock_waiting_*`, `penstock_oldest_wait_seconds`, `penstock_backlog_tokens`,
  `penstock_fleet_*`, `penstock_wanted_workers`, `penstock_dead_letters_kept`) are the same in each of its workers: take
  `max by (queue)`. One worker measures them for all, once a second ([scaling.md](scaling.md)).
- **Tokens add up.** `prompt_tokens`, `prompt_tokens_cached` and `generation_tokens` sum the usage of the replies whose
  end this worker wrote. Over all workers, `published_tokens` is `generation_tokens` plus the tokens of replies that
  still run. `engine_generated_tokens` also counts tokens that were dropped because another worker had the request.
  `prefix_cache_queries - prefix_cache_hits` is the number of prompt tokens computed, including those computed again
  after a preemption or a takeover. A killed process loses what it counted since the last scrape.
- **Names.** These are vLLM's, with `penstock_` in the place of `vllm:`: `prompt_tokens`, `generation_tokens`,
  `prompt_tokens_cached`, `request_prompt_tokens`, `request_generation_tokens`, `prefix_cache_queries`,
  `prefix_cache_hits`, `kv_cache_usage_perc`, `time_to_first_token_seconds`. `process_*` are those of the Prometheus
  client library.
- **Dead workers** export nothing. Other workers count them (`penstock_lost_workers_total`). A gateway shows which
  queues nobody serves (`penstock_gateway_queue_served`).
"""

_SHARED = "A gateway also has a worker's `penstock_build_info` and `penstock_log_lines_dropped_total`.\n"
_PROCESS = "process_"  # metrics of the Prometheus client library, which documents them
_SUFFIXES = {"counter": "_total", "info": "_info"}
_KINDS = {"counter": "Counters", "gauge": "Gauges", "histogram": "Histograms", "info": "Always 1"}
_MOST_VALUES = 6  # of a label; more of them have a table elsewhere
_INFO = EngineInfo(1, "", "", 1, 1, 1, "", "", 1, "", "", None, 1)


def page() -> str:
    worker = WorkerMetrics("queue")
    worker.set_model("model", _INFO)
    worker.set_engine(EngineStats(kinds=(KindStats(0, 0, 0),)), [DeviceMemory(0, 0, 0, 0)])
    gateway = _gateway()
    named = {family.name for family in worker.registry.collect()}
    own = [family for family in gateway.collect() if family.name not in named]
    tables = (*_table("Of a worker", worker.registry.collect()), *_table("Of a gateway", own))
    return "\n".join([_HEAD, *tables, _SHARED])


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


def _table(title: str, families: Iterable[Metric]) -> Iterator[str]:
    yield f"## {title}\n"
    told = [family for family in families if not family.name.startswith(_PROCESS)]
    for kind, heading in _KINDS.items():
        if rows := [_row(family) for family in told if family.type == kind]:
            yield "\n".join([f"| {heading} | meaning |", "| --- | --- |", *rows, ""])


def _row(family: Metric) -> str:
    labels = dict(_labels(family))
    name = family.name + _SUFFIXES.get(family.type, "") + (f"{{{', '.join(labels)}}}" if labels else "")
    values = (f" `{label}`: {_listed(found)}." for label, found in labels.items() if 1 < len(found) <= _MOST_VALUES)
    return f"| `{name}` | {family.documentation}{''.join(values)} |"


def _labels(family: Metric) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields the labels that not all families have, with the values known beforehand."""
    names = dict.fromkeys(name for sample in family.samples for name in sample.labels)
    for name in names:
        values = dict.fromkeys(sample.labels[name] for sample in family.samples if name in sample.labels)
        if name != "le" and not _is_of_all(name, family):
            yield name, tuple(values)


def _is_of_all(name: str, family: Metric) -> bool:
    return name in ("queue", "model") and not family.name.startswith("penstock_gateway_")


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


if __name__ == "__main__":
    sys.stdout.write(page())
