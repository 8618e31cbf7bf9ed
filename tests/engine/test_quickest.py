"""With `same_tokens` off, times at the start choose matmuls and decode steps, and the engine says what they chose."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import Engine, EngineConfig
from penstock.engine.deployment import quickest
from penstock.engine.models.cpu import timing
from penstock.engine.stats import EngineInfo
from tests.engine.engines import SMALL
from tests.support.needs import needs_compiler

OFF = replace(SMALL, same_tokens=False, decode_steps=None)
QUICK, SLOW = (1e-3, 2e-3), (2e-3, 1e-3)  # C++ beside XLA

pytestmark = [needs_compiler, pytest.mark.usefixtures("as_shipped")]


def described(model: Path, config: EngineConfig, *, warm: bool = False) -> EngineInfo:
    engine = Engine.from_checkpoint(model, config)
    if warm:
        engine.warm_up()
    return engine.describe()


def test_each_times_both_and_names_what_it_took(tiny_model: Path) -> None:
    info = described(tiny_model, OFF, warm=True)
    of_matmul, of_loops = info.timed
    rows = rf"\d+\.\d\d for 1, \d+\.\d\d for {SMALL.max_num_seqs}, \d+\.\d\d for {SMALL.max_batch_tokens}"
    assert re.fullmatch(rf"matmul {info.matmul} \(C\+\+ over XLA's time, by rows: {rows}\)", of_matmul)
    assert ("8 decode steps" in of_loops) == bool(info.loops)


def test_the_quicker_one_is_taken_and_is_an_arithmetic_of_its_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for matmul, times_s in (("native", QUICK), ("xla", SLOW)):
        monkeypatch.setattr(quickest, "matmul_times_s", lambda *_, times_s=times_s: {1: times_s, 8: times_s})
        info = found[matmul] = described(tiny_model, OFF)
        assert (info.matmul, info.batch_invariant) == (matmul, matmul == "native")
        assert info.timed[0].startswith(f"matmul {matmul} ")
    found["on"] = described(tiny_model, SMALL)
    assert len({info.arithmetic for info in found.values()}) == len(found)


@pytest.mark.parametrize("setting", [{"same_tokens": True}, {"matmul": "xla"}, {"weights": "int8"}], ids=str)
def test_nothing_is_timed_where_there_is_no_choice(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    monkeypatch.delattr(quickest, "matmul_times_s")
    assert described(tiny_model, replace(OFF, **setting)).timed == ()


def test_xla_is_worth_taking_by_the_mean_over_rows_and_by_a_margin() -> None:
    assert not timing.is_xla_quicker({1: (1.0, 1.0), 64: (1.1, 1.0)})
    assert not timing.is_xla_quicker({1: (1.0, 3.0), 64: (2.0, 1.0)})
    assert timing.is_xla_quicker({1: (1.1, 1.0), 64: (2.0, 1.0)})
