from __future__ import annotations

import dataclasses
import io

import pytest
import structlog

from penstock import __version__
from penstock.engine import EngineInfo
from penstock.worker.logs import configure_logs
from penstock.worker.startup_report import STARTED, as_table, describe

INFO = EngineInfo(
    num_parameters=1_720_000, dtype="float32", kv_dtype="float32", kv_cache_tokens=16_608, kv_cache_bytes=41 << 20,
    max_model_len=1024, platform="cpu", device_kind="cpu", num_devices=1, attention="native", matmul="native",
    fallback=None, vocab_size=512, batch_invariant=True, instructions="TDPBF16PS",
)  # fmt: skip
REDIS = "redis://localhost:6379/0"
WHERE = {"queue": "q", "worker": "w", "redis": REDIS}


@pytest.fixture
def console() -> io.StringIO:
    stream = io.StringIO()
    configure_logs("info", "console", stream)
    return stream


def test_the_event_has_what_there_is_to_know() -> None:
    assert describe("demo", INFO, **WHERE, health="127.0.0.1:8080") == {
        "model": "demo", "parameters": 1_720_000, "dtype": "float32", "device": "cpu", "attention": "native",
        "matmul": "native", "kv_cache_tokens": 16_608, "kv_cache_bytes": 41 << 20, "kv_dtype": "float32",
        "max_model_len": 1024, "instructions": "TDPBF16PS", "queue": "q", "worker": "w", "redis": REDIS,
        "health": "127.0.0.1:8080", "version": __version__,
    }  # fmt: skip
    assert describe("fake", None, **WHERE, health=None).keys() == {
        "model", "queue", "worker", "redis", "health", "version"
    }  # fmt: skip


def test_people_get_a_table() -> None:
    rows = [line.split(maxsplit=1) for line in as_table(describe("demo", INFO, **WHERE, health=None)).splitlines()]
    assert rows == [
        ["model", "demo, 1.72 M parameters, float32"],
        ["device", "cpu"],
        ["attention", "native"],
        ["matmul", "native"],
        ["bf16", "by    TDPBF16PS"],
        ["KV", "cache   16,608 tokens in 41 MiB of float32, at most 1,024 per sequence"],
        ["queue", "q"],
        ["worker", "w"],
        ["Redis", REDIS],
        ["version", __version__],
    ]


def test_the_arithmetic_is_told() -> None:
    for is_invariant, said in ((True, "equal bits in any batch"), (False, "bits by batch")):
        info = dataclasses.replace(INFO, batch_invariant=is_invariant)
        fields = describe("demo", info, **WHERE, health=None, arithmetic="a1")
        assert (fields["arithmetic"], fields["batch_invariant"]) == ("a1", is_invariant)
        assert f"a1, {said}; penstock doctor times it against others" in as_table(fields)


def test_what_times_chose_is_told() -> None:
    fields = describe("demo", dataclasses.replace(INFO, timed=("matmul xla", "1 decode step")), **WHERE, health=None)
    assert fields["timed"] == ["matmul xla", "1 decode step"]
    assert "measured   matmul xla; 1 decode step\n" in as_table(fields)


def test_states_are_told_where_there_are_any() -> None:
    held = dataclasses.replace(INFO, num_state_slots=1200, state_cache_bytes=3 << 19)
    fields = describe("demo", held, **WHERE, health=None)
    assert (fields["state_slots"], fields["state_cache_bytes"]) == (1200, 3 << 19)
    assert "1,200 slots in 1.5 MiB" in as_table(fields)


def test_several_devices_are_counted() -> None:
    info = dataclasses.replace(INFO, platform="tpu", device_kind="TPU v5e", num_devices=4, num_parameters=8_030_261_248)
    fields = describe("m", info, **WHERE, health=None)
    assert fields["device"] == "4 x tpu (TPU v5e)"
    assert "8.03 B parameters" in as_table(fields)


def test_the_console_log_has_the_table_and_no_control_characters(console: io.StringIO) -> None:
    structlog.get_logger().info(STARTED, **describe("/models/\x1b[2Jx", INFO, **WHERE, health=None))
    text = console.getvalue()
    assert "16,608 tokens in 41 MiB" in text
    assert "\x1b[2J" not in text
