from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families

from docs.scripts.metrics_page import page
from penstock import __version__
from penstock.engine import EngineInfo, EngineStats
from penstock.engine.errors import InvalidRequest
from penstock.engine.stats import DeviceMemory, KindStats
from penstock.protocol.queue.load import QueueLoad
from penstock.serving.exposition import render
from penstock.worker.intake.measured_grammars import MeasuredGrammars
from penstock.worker.metrics import DROP_REASONS, ERROR_CODES, WorkerMetrics, band_of
from tests.support.packages import ROOT
from tests.support.scrapes import scraped

DOCS = ROOT / "docs"
INFO = EngineInfo(1, "bfloat16", "int8", 64, 4096, 32, "gpu", "H100", 1, "pallas", "xla", None, 256)


def series(metrics: WorkerMetrics) -> dict[str, float]:
    return scraped(generate_latest(metrics.registry).decode())


def test_every_series_is_there_from_the_start() -> None:
    found = series(WorkerMetrics())
    expected = [
        *(f'penstock_dropped_requests_total{{reason="{reason}"}}' for reason in DROP_REASONS),
        *(f'penstock_requests_total{{finish_reason="{reason}"}}' for reason in ("stop", "length", "error")),
        *(f'penstock_errors_total{{code="{code}"}}' for code in (*ERROR_CODES, "other")),
        *(f'penstock_queue_wait_seconds_count{{band="{band}"}}' for band in ("high", "usual", "low")),
        *(f'penstock_dead_letters_kept{{kind="{kind}"}}' for kind in ("request", "malformed")),
        "penstock_ready", "penstock_queue_lag", "penstock_engine_steps_total", "penstock_lost_workers_total",
    ]  # fmt: skip
    assert {name: found[name] for name in expected} == dict.fromkeys(expected, 0)


def test_gauges_show_what_was_set_last() -> None:
    metrics = WorkerMetrics()
    metrics.set_service(num_live=3, is_ready=True)
    metrics.set_load(QueueLoad(num_waiting=4, num_running=1, num_given_back=1))
    metrics.set_letters(request=4, malformed=1)
    stats = EngineStats(num_running=4, steps_total=7, compiles_after_warmup_total=1, num_pages=8, num_free_pages=2)
    metrics.set_engine(replace(stats, num_cached_pages=4), [DeviceMemory(3, 10, 20, 30)])
    found = series(metrics)
    assert (found["penstock_live_requests"], found["penstock_ready"]) == (3, 1)
    assert (found["penstock_queue_length"], found["penstock_queue_pending"], found["penstock_queue_lag"]) == (5, 2, 3)
    assert [found[f'penstock_dead_letters_kept{{kind="{kind}"}}'] for kind in ("request", "malformed")] == [4, 1]
    assert (found["penstock_engine_running_sequences"], found["penstock_engine_steps_total"]) == (4, 7)
    assert found["penstock_engine_compiles_after_warmup_total"] == 1
    assert found["penstock_kv_cache_usage_perc"] == 0.25
    memory = [found[f'penstock_device_memory_{name}_bytes{{device="3"}}'] for name in ("used", "peak", "limit")]
    assert memory == [10, 20, 30]
    metrics.set_engine(EngineStats(kinds=(KindStats(9, 2, 3), KindStats(5, 0, 1))))
    by_kind = {name: value for name, value in series(metrics).items() if "kind_pages" in name and "created" not in name}
    of_first, of_second = ({"free": 2, "cached": 3, "held": 4}, {"free": 0, "cached": 1, "held": 4})
    assert by_kind == {
        f'penstock_engine_kind_pages{{kind="{kind}",state="{state}"}}': count
        for kind, counts in enumerate((of_first, of_second))
        for state, count in counts.items()
    }


def test_two_workers_in_one_process_count_apart() -> None:
    first, second = WorkerMetrics(), WorkerMetrics()
    first.claims.inc()
    assert (series(first)["penstock_claims_total"], series(second)["penstock_claims_total"]) == (1, 0)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_model_and_queue_are_on_every_sample(accept: str) -> None:
    metrics = WorkerMetrics("q")
    metrics.set_model("tiny", INFO)
    text, _ = render(metrics.registry, accept)
    samples = [line for line in text.decode().splitlines() if line[0] != "#"]
    assert len(samples) > 100
    assert [line for line in samples if 'model="tiny"' not in line or 'queue="q"' not in line] == []


def test_it_says_what_it_is() -> None:
    metrics = WorkerMetrics()
    before = series(metrics)
    metrics.set_model("tiny", INFO)
    found = series(metrics)
    [build] = [name for name in found if name.startswith("penstock_build_info")]
    assert f'version="{__version__}"' in build
    [engine] = [name for name in found if name.startswith("penstock_engine_info")]
    assert 'device_kind="H100"' in engine
    assert 'kv_dtype="int8"' in engine
    assert found["penstock_engine_kv_cache_bytes"] == 4096
    assert set(found) - set(before) == {engine}


@pytest.mark.skipif(sys.platform != "linux", reason="only there is /proc")
def test_what_the_process_takes_is_there() -> None:
    found = series(WorkerMetrics())
    assert found["process_resident_memory_bytes"] > 2**20
    assert found["process_open_fds"] > 0


def test_open_metrics_are_for_those_who_ask() -> None:
    metrics = WorkerMetrics("q")
    text, kind = render(metrics.registry, "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;q=0.5")
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")
    families = {family.name: family.type for family in open_metrics_families(text.decode())}
    assert (families["penstock_build"], families["penstock_requests"]) == ("info", "counter")
    for accept in ("", "text/plain", "*/*"):
        plain, kind = render(metrics.registry, accept)
        assert kind.startswith("text/plain; version=")
        assert b"# EOF" not in plain


def test_a_code_that_nobody_knows_makes_no_new_series() -> None:
    metrics = WorkerMetrics()
    before = set(series(metrics))
    for code in (None, "too_long", "made_up"):
        metrics.count_error(code)
    found = series(metrics)
    assert set(found) == before
    assert found['penstock_errors_total{code="too_long"}'] == found['penstock_errors_total{code="other"}'] == 1


def test_the_codes_are_those_of_the_wire() -> None:
    section = (DOCS / "wire.md").read_text().split("### Error codes")[1].split("###")[0]
    assert [code for code in ERROR_CODES if f"`{code}`" not in section] == []


def test_priorities_make_three_bands() -> None:
    assert [band_of(priority) for priority in (-1000, -1, 0, 1, 1000)] == ["low", "low", "usual", "high", "high"]


def test_grammars_are_counted_by_what_became_of_them() -> None:
    class Grammars:
        def compile(self, source: str) -> str:
            if source == "bad":
                raise InvalidRequest("no grammar")
            if source == "broken":
                raise RuntimeError("no sandbox")
            return source.upper()

    metrics = WorkerMetrics()
    grammars = MeasuredGrammars(Grammars(), metrics)  # type: ignore[arg-type]
    assert [str(grammars.compile("a")) for _ in range(2)] == ["A", "A"]
    with pytest.raises(InvalidRequest):
        grammars.compile("bad")
    with pytest.raises(RuntimeError):
        grammars.compile("broken")
    found = series(metrics)
    outcomes = {
        name: found[f'penstock_grammars_total{{outcome="{name}"}}'] for name in ("compiled", "refused", "failed")
    }
    assert outcomes == {"compiled": 2, "refused": 1, "failed": 1}
    assert found["penstock_grammar_compile_seconds_count"] == 4


@pytest.mark.skipif(sys.platform != "linux", reason="the page has what is known of a process there")
def test_the_page_of_metrics_is_current() -> None:
    assert (DOCS / "metrics.md").read_text() == page(), "run `make docs`"
