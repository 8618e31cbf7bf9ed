"""The worker's Prometheus metrics, in a registry of their own. Every series exists from the start, at 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock.engine.request import FinishReason
from penstock.engine.stats import EngineStats
from penstock.producer.queue_load import BandLoad, QueueLoad

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
CALL_OUTCOMES = ("answered", "invalid_request", "too_large", "too_long", "internal_error")
DROP_REASONS = ("fenced", "gone", "unwritable", "rolled_back")


class Metrics:
    """One worker's. Counters are what this process did; the gauges of the queue are read from Redis at each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests ended, by finish reason.", "finish_reason")
        for reason in get_args(FinishReason):
            self.requests.labels(finish_reason=reason)
        self.dropped = self._counter("dropped_requests", "Requests let go of: another worker has them.", "reason")
        for reason in DROP_REASONS:
            self.dropped.labels(reason=reason)
        self.claims = self._counter("claims", "Requests taken on.")
        self.resumed = self._counter("resumed_requests", "Requests taken on that had been begun elsewhere.")
        self.duplicates = self._counter("duplicate_entries", "Queue entries dropped because their request had one.")
        self.handed_back = self._counter("handed_back_requests", "Requests given back by a drain.")
        self.reclaimed = self._counter("reclaimed_entries", "Queue entries taken away from dead workers.")
        self.dead_letters = self._counter(
            "dead_letters", "Entries moved to the dead letters: requests that were given up, malformed ones.", "kind"
        )
        for kind in ("request", "malformed"):
            self.dead_letters.labels(kind=kind)
        self.lost_dead_letters = self._counter("lost_dead_letters", "Dead letters that Redis refused to keep.")
        self.chunks = self._counter("chunks", "Chunks written to reply streams, those that came with an end left out.")
        self.tokens = self._counter("published_tokens", "Tokens written to reply streams before the end came.")
        self.publish_failures = self._counter("publish_failures", "Flushes that Redis did not take and that were kept.")
        self.absorbed_retries = self._counter("absorbed_retries", "Chunks sent again that had arrived before.")

        self.calls = self._counter("calls", "Calls answered, by outcome: answered, or an error's code.", "outcome")
        for outcome in CALL_OUTCOMES:
            self.calls.labels(outcome=outcome)

        self.queue_seconds = self._histogram("queue_wait_seconds", "From the enqueue to the first claim.")
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From the enqueue to the first token."
        )
        self.request_seconds = self._histogram("request_seconds", "From the enqueue to the end.")
        self.token_seconds = self._histogram(
            "time_per_output_token_seconds", "Between tokens, per request.", short=True
        )
        self.flush_seconds = self._histogram("flush_seconds", "One pipeline of writes to Redis.", short=True)

        self._live = self._gauge("live_requests", "Requests claimed and not ended.")
        self._ready = self._gauge("ready", "1 if the worker can serve.")
        self._queue_length = self._gauge("queue_length", "Entries in the request stream.")
        self._queue_pending = self._gauge("queue_pending", "Entries that some worker has, or that were given back.")
        self._queue_lag = self._gauge("queue_lag", "Entries that wait for their turn.")
        self._backlog_tokens = self._gauge("backlog_tokens", "Tokens of prompts and replies that wait, estimated.")
        self._oldest_wait = self._gauge(
            "oldest_wait_seconds", "Of the request that has waited the longest, by priority.", "priority"
        )
        self._band_requests = self._gauge("waiting_requests", "Requests that wait, by priority.", "priority")
        self._band_tokens = self._gauge("waiting_tokens", "Tokens that wait, estimated, by priority.", "priority")
        self._wanted = self._gauge("wanted_workers", "Workers that the queue has use for.")
        self._fleet_workers = self._gauge("fleet_workers", "Workers that take requests of the queue.")
        self._fleet_slots = self._gauge("fleet_slots", "Requests that they run at once.")
        self._fleet_rate = self._gauge(
            "fleet_tokens_per_second", "What they compute while requests wait; 0: not known yet."
        )
        self.set_load(QueueLoad())
        self._engine = _EngineCollector()
        self.registry.register(self._engine)

    def set_service(self, *, num_live: int, is_ready: bool) -> None:
        self._live.set(num_live)
        self._ready.set(is_ready)

    def set_queue(self, *, length: int, pending: int, lag: int) -> None:
        self._queue_length.set(length)
        self._queue_pending.set(pending)
        self._queue_lag.set(lag)

    def set_load(self, load: QueueLoad) -> None:
        self._backlog_tokens.set(load.tokens)
        self._wanted.set(load.wanted_workers)
        self._fleet_workers.set(load.num_workers)
        self._fleet_slots.set(load.slots)
        self._fleet_rate.set(load.tokens_per_s)
        for gauge in (self._oldest_wait, self._band_requests, self._band_tokens):
            gauge.clear()
        for band in (BandLoad(0, 0, 0, 0.0), *load.bands):  # the usual priority is always there
            self._oldest_wait.labels(priority=band.priority).set(band.oldest_s)
            self._band_requests.labels(priority=band.priority).set(band.num_requests)
            self._band_tokens.labels(priority=band.priority).set(band.tokens)

    def set_engine(self, stats: EngineStats) -> None:
        self._engine.stats = stats

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"penstock_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *, short: bool = False) -> Histogram:
        return Histogram(
            f"penstock_{name}", text, buckets=_SHORT_SECONDS if short else _SECONDS, registry=self.registry
        )


class _EngineCollector(Collector):
    """The engine keeps its own totals; a scrape shows the last ones."""

    def __init__(self) -> None:
        self.stats = EngineStats()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        stats = self.stats
        for name, text, value in (
            ("running_sequences", "Sequences being generated.", stats.num_running),
            ("waiting_sequences", "Sequences waiting in the engine for pages or a place.", stats.num_waiting),
            ("pages", "Pages of the KV cache.", stats.num_pages),
            ("free_pages", "Pages that hold nothing.", stats.num_free_pages),
            ("cached_pages", "Pages that only the prefix cache holds.", stats.num_cached_pages),
            ("state_slots", "Slots for states of layers that keep such.", stats.num_state_slots),
            ("free_state_slots", "State slots that hold nothing.", stats.num_free_state_slots),
            ("cached_state_slots", "State slots that only the prefix cache holds.", stats.num_cached_state_slots),
        ):
            yield GaugeMetricFamily(f"penstock_engine_{name}", text, value)
        for name, text, value in (
            ("steps", "Steps of the engine.", stats.steps_total),
            ("prompt_tokens", "Prompt tokens of the requests taken on.", stats.prompt_tokens_total),
            ("cached_tokens", "Prompt tokens that the prefix cache saved.", stats.cached_tokens_total),
            ("generated_tokens", "Tokens generated.", stats.generated_tokens_total),
            ("drafted_tokens", "Guesses at tokens that were verified.", stats.drafted_tokens_total),
            ("accepted_tokens", "Those of them that were right.", stats.accepted_tokens_total),
            ("preemptions", "Sequences put back for want of pages.", stats.preemptions_total),
            ("faults", "Steps that raised; their sequences were run again.", stats.faults_total),
            ("compiles_after_warmup", "Shapes that the warm-up missed.", stats.compiles_after_warmup_total),
        ):
            yield CounterMetricFamily(f"penstock_engine_{name}", text, value)
