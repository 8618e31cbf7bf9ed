"""The worker's Prometheus metrics, in a registry of their own. Every series exists from the start, at 0.

docs/metrics.md is written from here. Metrics that vLLM has too bear the same names, without `vllm:`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram

from penstock.engine.request import FinishReason
from penstock.engine.stats import DeviceMemory, EngineInfo, EngineStats
from penstock.protocol.queue.load import BandLoad, QueueLoad
from penstock.protocol.redis.faults import Trouble
from penstock.protocol.version import __version__
from penstock.serving.exposition import Registry
from penstock.worker.engine_metrics import EngineCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CALL_OUTCOMES = ("answered", "invalid_request", "too_large", "too_long", "internal_error")
DROP_REASONS = ("fenced", "gone", "unwritable", "rolled_back")
LETTER_KINDS = ("request", "malformed")
ERROR_CODES = (
    "invalid_request", "too_large", "too_long", "engine_error", "internal_error", "reply_unreadable",
    "reply_unwritable", "model_gone", "arithmetic_gone", "too_many_crashes",
)  # fmt: skip
OTHER = "other"  # replaces unknown codes: the number of series stays small, whichever codes are added
BANDS = ("high", "usual", "low")
REDIS_OPERATIONS = ("claim", "measure")
GRAMMAR_OUTCOMES = ("compiled", "refused", "failed")


def band_of(priority: int) -> str:
    """Maps priorities to a few names, as each priority would be too many series: `usual` is 0."""
    return "usual" if priority == 0 else "high" if priority > 0 else "low"


class WorkerMetrics:
    """Metrics of one worker. Counters cover this process; gauges of the queue were measured by one worker for all."""

    def __init__(self, queue: str = "") -> None:
        self.registry = Registry(__version__)
        self.registry.set_labels(model="", queue=queue)
        self._count_requests()
        self._count_tokens()
        self._measure_times()
        self._show_queue()
        self._engine = EngineCollector()
        self.registry.register(self._engine)

    def _count_requests(self) -> None:
        self.requests = self._counter("requests", "Requests ended, by finish reason.", "finish_reason")
        self.requests_by_reason = {each: self.requests.labels(finish_reason=each) for each in get_args(FinishReason)}
        self.errors = self._counter("errors", "Requests ended with an error, by its code (docs/wire.md).", "code")
        for code in (*ERROR_CODES, OTHER):
            self.errors.labels(code=code)
        self.dropped = self._counter(
            "dropped_requests", "Requests that this worker let go of, because another one has them.", "reason"
        )
        for reason in DROP_REASONS:
            self.dropped.labels(reason=reason)
        self.claims = self._counter("claims", "Requests taken on.")
        self.resumed = self._counter("resumed_requests", "Requests taken on that another worker had begun.")
        self.inexact = self._counter(
            "inexact_requests", "Requests taken on that a worker of another arithmetic had begun, or continued."
        )
        self.duplicates = self._counter("duplicate_entries", "Second entries of a request, dropped.")
        self.handed_back = self._counter(
            "handed_back_requests", "Requests given back, by a drain or to let others go first."
        )
        self.lost_workers = self._counter(
            "lost_workers",
            "Dead workers that this one found first.",
        )
        self.reclaimed = self._counter("reclaimed_entries", "Queue entries freed from dead workers.")
        self.dead_letters = self._counter(
            "dead_letters", "Entries that became dead letters: requests that were given up, malformed entries.", "kind"
        )
        self._letters_kept = self._gauge("dead_letters_kept", "Dead letters in the queue.", "kind")
        for kind in LETTER_KINDS:
            self.dead_letters.labels(kind=kind)
        self.lost_dead_letters = self._counter("lost_dead_letters", "Dead letters that Redis refused to keep.")
        self.publish_failures = self._counter("publish_failures", "Flushes that Redis refused; they are tried again.")
        self.absorbed_retries = self._counter("absorbed_retries", "Chunks sent again that Redis already had.")
        self.calls = self._counter("calls", "Calls answered, by outcome.", "outcome")
        for outcome in CALL_OUTCOMES:
            self.calls.labels(outcome=outcome)
        self.grammars = self._counter("grammars", "Grammars of requests, cached ones included.", "outcome")
        for outcome in GRAMMAR_OUTCOMES:
            self.grammars.labels(outcome=outcome)

    def _count_tokens(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens in the usage of requests that ended here.")
        self.cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens that the prefix cache saved, of requests that ended here."
        )
        self.generation_tokens = self._counter(
            "generation_tokens",
            "Completion tokens in the usage of requests that ended here, whichever worker generated them.",
        )
        self.prompt_lengths = self._lengths("request_prompt_tokens", "Prompt tokens per request that ended here.")
        self.reply_lengths = self._lengths(
            "request_generation_tokens", "Completion tokens per request that ended here, all choices together."
        )
        self.chunks = self._counter(
            "chunks", "Chunks written to reply streams, without those written together with an end."
        )
        self.tokens = self._counter(
            "published_tokens",
            "Tokens that this worker wrote to reply streams.",
        )

    def _measure_times(self) -> None:
        self.queue_seconds = self._histogram(
            "queue_wait_seconds",
            "Seconds from the enqueue to the first claim, of requests that ended; high: a priority above 0.",
            "band",
        )
        self.queue_seconds_by_band = {band: self.queue_seconds.labels(band=band) for band in BANDS}
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "Seconds from the enqueue to the first token."
        )
        self.request_seconds = self._histogram("request_seconds", "Seconds from the enqueue to the end.")
        self.token_seconds = self._histogram(
            "time_per_output_token_seconds", "Seconds between tokens, per request.", buckets=_SHORT_SECONDS
        )
        self.flush_seconds = self._histogram(
            "flush_seconds", "Seconds that a pipeline of writes to Redis took.", buckets=_SHORT_SECONDS
        )
        self.redis_seconds = self._histogram(
            "redis_seconds",
            "Seconds until Redis answered a claim, and one small script a second (measure).",
            "operation",
            buckets=_SHORT_SECONDS,
        )
        for operation in REDIS_OPERATIONS:
            self.redis_seconds.labels(operation=operation)
        self.grammar_seconds = self._histogram(
            "grammar_compile_seconds", "Seconds until a request's grammar was compiled; 0 for a cached one."
        )

    def _show_queue(self) -> None:
        self._live = self._gauge("live_requests", "Requests claimed and not ended yet.")
        self._ready = self._gauge("ready", "1 if the worker can serve.")
        self._trouble = self._gauge(
            "redis_trouble",
            "1 while Redis is away, refuses for now (passing) or for good (refused), or fails in another way (other).",
            "kind",
        )
        self._queue_length = self._gauge("queue_length", "Entries in the request stream.")
        self._queue_pending = self._gauge(
            "queue_pending", "Entries that workers have, or that are set aside for a model."
        )
        self._queue_lag = self._gauge("queue_lag", "Entries that wait for their turn.")
        self._backlog_tokens = self._gauge("backlog_tokens", "Waiting tokens of prompts and replies, estimated.")
        self._oldest_wait = self._gauge(
            "oldest_wait_seconds", "Seconds that the oldest waiting request has waited, by priority.", "priority"
        )
        self._band_requests = self._gauge("waiting_requests", "Waiting requests, by priority.", "priority")
        self._band_tokens = self._gauge("waiting_tokens", "Waiting tokens, estimated, by priority.", "priority")
        self._wanted = self._gauge("wanted_workers", "Workers that the queue needs.")
        self._fleet_workers = self._gauge("fleet_workers", "Workers that take requests of the queue.")
        self._fleet_slots = self._gauge("fleet_slots", "Requests that these workers run at once.")
        self._fleet_rate = self._gauge(
            "fleet_tokens_per_second",
            "Tokens a second that these workers compute while requests wait; 0: not known yet.",
        )
        for kind in get_args(Trouble):
            self._trouble.labels(kind=kind)
        self.set_letters(request=0, malformed=0)
        self.set_load(QueueLoad())

    def set_model(self, name: str, info: EngineInfo | None) -> None:
        """Puts the model's name on every sample from now on."""
        self.registry.set_labels(model=name)
        self._engine.info = info

    def set_service(self, *, num_live: int, is_ready: bool, trouble: Trouble | None = None) -> None:
        self._live.set(num_live)
        self._ready.set(is_ready)
        for kind in get_args(Trouble):
            self._trouble.labels(kind=kind).set(kind == trouble)

    def set_letters(self, *, request: int, malformed: int) -> None:
        self._letters_kept.labels(kind="request").set(request)
        self._letters_kept.labels(kind="malformed").set(malformed)

    def set_load(self, load: QueueLoad) -> None:
        self._queue_length.set(load.num_waiting + load.num_running)
        self._queue_pending.set(load.num_running + load.num_given_back)
        self._queue_lag.set(load.num_waiting - load.num_given_back)
        self._backlog_tokens.set(load.tokens)
        self._wanted.set(load.wanted_workers)
        self._fleet_workers.set(load.num_workers)
        self._fleet_slots.set(load.slots)
        self._fleet_rate.set(load.tokens_per_s)
        for gauge in (self._oldest_wait, self._band_requests, self._band_tokens):
            gauge.clear()
        for band in (BandLoad(0, 0, 0, 0.0), *load.bands):  # the usual priority is always present
            self._oldest_wait.labels(priority=band.priority).set(band.oldest_s)
            self._band_requests.labels(priority=band.priority).set(band.num_requests)
            self._band_tokens.labels(priority=band.priority).set(band.tokens)

    def set_engine(self, stats: EngineStats, memory: Sequence[DeviceMemory] = ()) -> None:
        self._engine.stats = stats
        self._engine.memory = tuple(memory)

    def count_error(self, code: str | None) -> None:
        """Counts the error that ended a request; without a code there was none."""
        if code is not None:
            self.errors.labels(code=code if code in ERROR_CODES else OTHER).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"penstock_{name}", text, labels, registry=self.registry)

    def _lengths(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, buckets=_TOKENS)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"penstock_{name}", text, labels, buckets=buckets, registry=self.registry)
