"""What names an engine's arithmetic: all that decides how it rounds, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine import arithmetic, processors
from penstock.engine.arithmetic import arithmetic_of
from penstock.engine.config import EngineConfig
from penstock.engine.stats import EngineInfo

INFO = EngineInfo(1, "bfloat16", "bfloat16", 64, 4096, 4096, "cpu", "cpu", 1, "native", "native", None, 256)
INVARIANT = replace(INFO, batch_invariant=True)
CONFIG = EngineConfig()
CPUINFO = {"model name": "model name\t: A CPU", "flags": "flags\t\t: fpu avx2 avx512f hypervisor"}


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    facts = dict(CPUINFO)
    for module in (arithmetic, processors):
        monkeypatch.setattr(
            module, "cpu_facts", lambda *names: [line for name, line in facts.items() if name in names] * 2
        )
    monkeypatch.setattr(arithmetic, "num_processors", lambda: 2)
    return facts


@pytest.mark.parametrize(
    "other",
    [
        {"attention": "xla"}, {"matmul": "xla"}, {"dtype": "float32"}, {"kv_dtype": "int8"}, {"num_devices": 2},
        {"platform": "tpu", "device_kind": "TPU v6 lite"}, {"platform": "gpu", "device_kind": "NVIDIA H200"},
        {"batch_invariant": False}, {"instructions": "TDPBF16PS"},
    ],
    ids=str,
)  # fmt: skip
def test_what_computes_otherwise_is_another(other: dict[str, Any]) -> None:
    assert arithmetic_of(replace(INVARIANT, **other), CONFIG) != arithmetic_of(INVARIANT, CONFIG)


@pytest.mark.parametrize("other", [{"model name": "model name\t: B CPU"}, {"flags": "flags\t\t: fpu avx2 hypervisor"}])
def test_so_is_another_processor(processor: dict[str, str], other: dict[str, str]) -> None:
    before = arithmetic_of(INVARIANT, CONFIG)
    processor |= other
    assert arithmetic_of(INVARIANT, CONFIG) != before


def test_flags_that_say_nothing_of_vectors_do_not_count(processor: dict[str, str]) -> None:
    before = arithmetic_of(INVARIANT, CONFIG)
    processor["flags"] = "flags\t\t: avx512f fpu avx2 constant_tsc"
    assert arithmetic_of(INVARIANT, CONFIG) == before


@pytest.mark.parametrize(
    "name", ["num_parameters", "kv_cache_tokens", "kv_cache_bytes", "num_state_slots", "vocab_size"]
)
def test_sizes_do_not_count(name: str) -> None:
    sizes: dict[str, Any] = {name: 77}
    assert arithmetic_of(replace(INVARIANT, **sizes), CONFIG) == arithmetic_of(INVARIANT, CONFIG)


@pytest.mark.parametrize(
    "other", [{"max_num_seqs": 8}, {"max_batch_tokens": 64}, {"decode_steps": 4}, {"speculation": "off"}], ids=str
)
def test_what_is_computed_together_counts_where_it_moves_sums(other: dict[str, Any]) -> None:
    config = replace(CONFIG, **other)
    assert arithmetic_of(INVARIANT, config) == arithmetic_of(INVARIANT, CONFIG)
    assert arithmetic_of(INFO, config) != arithmetic_of(INFO, CONFIG)


def test_one_that_a_time_may_choose_is_one_of_its_own() -> None:
    for info in (INFO, INVARIANT):
        assert arithmetic_of(info, replace(CONFIG, same_tokens=False)) != arithmetic_of(info, CONFIG)


def test_what_a_time_chose_counts_where_it_moves_sums() -> None:
    loops: dict[str, Any] = {"loops": ((16, 8),), "timed": ("8 decode steps in a dispatch of up to 16 rows",)}
    off = replace(CONFIG, same_tokens=False)
    of_all = [arithmetic_of(info, off) for info in (INVARIANT, INFO)]
    of_looped = [arithmetic_of(replace(info, **loops), off) for info in (INVARIANT, INFO)]
    assert [one == other for one, other in zip(of_all, of_looped, strict=True)] == [True, False]


def test_and_so_do_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    of_two = [arithmetic_of(info, CONFIG) for info in (INVARIANT, INFO)]
    monkeypatch.setattr(arithmetic, "num_processors", lambda: 4)
    of_four = [arithmetic_of(info, CONFIG) for info in (INVARIANT, INFO)]
    assert [two == four for two, four in zip(of_two, of_four, strict=True)] == [True, False]
