"""Several processes compile the same functions of a plan as one process in turn."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigError, EngineError
from penstock.engine.models import ModelConfig
from penstock.tools.plan import Bucket, plan, preset
from penstock.tools.plan.side_by_side import PlanInputs, compiled_by_processes
from tests.support.needs import needs_libtpu

pytestmark = needs_libtpu

CONFIG = EngineConfig(max_num_seqs=16, max_batch_tokens=16, max_model_len=2048)


def small() -> ModelConfig:
    model = preset("Qwen3-0.6B")
    assert model is not None
    return replace(model, blocks=model.blocks[:2])


@pytest.mark.slow
def test_processes_compile_the_same_in_the_same_order() -> None:
    reported: list[tuple[int, int, str]] = []
    only = frozenset({16})
    found = plan(
        small(),
        "v5e:2x2",
        CONFIG,
        only=only,
        processes=2,
        progress=lambda done, of, name: reported.append((done, of, name)),
    )
    expected = plan(small(), "v5e:2x2", CONFIG, only=only)
    assert [untimed(bucket) for bucket in found.buckets] == [untimed(bucket) for bucket in expected.buckets]
    assert len(found.buckets) == 3
    assert [done for done, _, _ in reported] == [1, 2, 3]
    assert {name for _, _, name in reported} == {"backbone of 16", "head of 16", "head, all options of 16"}
    assert all(bucket.compile_cpu_s > 0 for bucket in found.buckets)


def test_what_a_process_refuses_is_said_here() -> None:
    source = PlanInputs(small(), "v5e:2x2", replace(CONFIG, tensor_parallel=3))
    with pytest.raises(ConfigError, match=r"tensor_parallel = 3 does not divide the 4 devices of v5e:2x2"):
        compiled_by_processes(source, [("backbone", 16), ("head", 16)], 2, None)


class _Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return os._exit, (11,)


def test_a_process_that_dies_is_an_error() -> None:
    source = PlanInputs(small(), "v5e:2x2", _Deadly())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"one of 2 compiling processes was killed, .* or crashed: try fewer"):
        compiled_by_processes(source, [("backbone", 16), ("head", 16)], 2, None)


def untimed(bucket: Bucket) -> Bucket:
    return replace(bucket, compile_s=0.0, compile_cpu_s=0.0)
