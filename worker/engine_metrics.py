"""Exports the engine's metrics: the engine keeps its own totals, and scrapes show the last ones."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from penstock.engine.stats import DeviceMemory, EngineInfo, EngineStats

_MetricFamily = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily

_INFO = ("platform", "device_kind", "dtype", "kv_dtype", "attention", "matmul")


class EngineCollector(Collector):
    """Exports the latest figures."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.info: EngineInfo | None = None  # None: there is no model yet, or nothing is known of it
        self.memory: tuple[DeviceMemory, ...] = ()

    def collect(self) -> Iterator[_MetricFamily]:
        yield from self._totals()
        yield from self._gauges()
        yield from self._devices()
        if self.info is not None:
            engine = {name: str(getattr(self.info, name)) for name in _INFO}
            yield InfoMetricFamily("penstock_engine", "Devices, types and kernels of the engine; always 1.", engine)

    def _gauges(self) -> Iterator[_MetricFamily]:
        stats, info = self.stats, self.info
        for name, text, value in (
            ("engine_running_sequences", "Sequences being generated.", stats.num_running),
            ("engine_waiting_sequences", "Sequences that wait in the engine for pages or a slot.", stats.num_waiting),
            ("engine_pages", "Pages of the KV cache.", stats.num_pages),
            ("engine_free_pages", "Pages that hold nothing.", stats.num_free_pages),
            ("engine_cached_pages", "Pages that only the prefix cache holds.", stats.num_cached_pages),
            ("kv_cache_usage_perc", "Share of the pages that sequences hold, 0 to 1.", _usage(stats)),
            (
                "engine_kv_cache_bytes",
                "Bytes of the KV cache, over all devices.",
                0 if info is None else info.kv_cache_bytes,
            ),
            ("engine_state_slots", "Slots for states.", stats.num_state_slots),
            ("engine_free_state_slots", "Slots that hold nothing.", stats.num_free_state_slots),
            (
                "engine_cached_state_slots",
                "Slots that only the prefix cache holds.",
                stats.num_cached_state_slots,
            ),
        ):
            yield GaugeMetricFamily(f"penstock_{name}", text, value)
        yield _pages_by_kind(stats)

    def _totals(self) -> Iterator[_MetricFamily]:
        stats = self.stats
        for name, text, value in (
            ("engine_steps", "Steps of the engine.", stats.steps_total),
            ("engine_prompt_tokens", "Prompt tokens of the requests taken on.", stats.prompt_tokens_total),
            ("engine_cached_tokens", "Prompt tokens that the prefix cache saved.", stats.cached_tokens_total),
            ("engine_generated_tokens", "Tokens generated.", stats.generated_tokens_total),
            (
                "prefix_cache_queries",
                "Tokens that sequences looked for in the prefix cache as they started.",
                stats.prefix_queries_total,
            ),
            (
                "prefix_cache_hits",
                "Tokens that sequences found in the prefix cache as they started; the others were computed.",
                stats.prefix_hits_total,
            ),
            ("engine_drafted_tokens", "Drafted tokens that were verified.", stats.drafted_tokens_total),
            ("engine_accepted_tokens", "Drafted tokens that were accepted.", stats.accepted_tokens_total),
            ("engine_preemptions", "Sequences put back for want of pages.", stats.preemptions_total),
            ("engine_faults", "Steps that raised; their sequences were run again.", stats.faults_total),
            ("engine_compiles_after_warmup", "Shapes that the warm-up missed.", stats.compiles_after_warmup_total),
            ("tool_calls_mended", "Tool calls with a known flaw that were read.", stats.tool_calls_mended_total),
        ):
            yield CounterMetricFamily(f"penstock_{name}", text, value)

    def _devices(self) -> Iterator[_MetricFamily]:
        """Yields the memory families, also without any samples, as on CPU."""
        used = GaugeMetricFamily(
            "penstock_device_memory_used_bytes", "Bytes in use on a GPU or TPU.", labels=["device"]
        )
        peak = GaugeMetricFamily(
            "penstock_device_memory_peak_bytes", "Most bytes that were ever in use.", labels=["device"]
        )
        limit = GaugeMetricFamily("penstock_device_memory_limit_bytes", "Bytes that may be in use.", labels=["device"])
        for each in self.memory:
            device = [str(each.device)]
            used.add_metric(device, each.used_bytes)
            peak.add_metric(device, each.peak_bytes)
            limit.add_metric(device, each.limit_bytes)
        yield from (used, peak, limit)


def _pages_by_kind(stats: EngineStats) -> GaugeMetricFamily:
    """Counts pages by kind: of several kinds, one may run out while others are free."""
    family = GaugeMetricFamily("penstock_engine_kind_pages", "Pages by kind and state.", labels=["kind", "state"])
    for number, kind in enumerate(stats.kinds):
        held = kind.num_pages - kind.num_free - kind.num_cached
        for state, count in (("free", kind.num_free), ("cached", kind.num_cached), ("held", held)):
            family.add_metric([str(number), state], count)
    return family


def _usage(stats: EngineStats) -> float:
    held = stats.num_pages - stats.num_free_pages - stats.num_cached_pages
    return held / stats.num_pages if stats.num_pages else 0.0
