"""Layers of a stacked decoder that are compiled together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine.models import ModelConfig, layer_runs, stacked_layers
from penstock.engine.models.hf.blocks import sliding
from tests.engine.engines import TINY


def windows(*windows: int | None) -> ModelConfig:
    return replace(TINY, blocks=tuple(sliding(TINY.blocks[0], windows)))


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (windows(*[None] * 5), [(0, 1, 2, 3, 4)]),
        (windows(4, None, 4, None), [(0, 2), (1, 3)]),
        (windows(4, None, 4, None, 4), [(0, 2), (1, 3), (4,)]),
        (windows(*[4, 4, None] * 3, 4, 4), [(0, 3, 6), (1, 4, 7), (2, 5, 8), (9, 10)]),
        (windows(None, 8, 8), [(0,), (1, 2)]),
        (windows(8, 8, 8, None), [(0, 1, 2), (3,)]),
    ],
)
def test_a_pattern_that_repeats_is_compiled_once(model: ModelConfig, layers: list[tuple[int, ...]]) -> None:
    assert list(stacked_layers(model)) == layers
    assert sorted(layer for held in layers for layer in held) == list(range(model.num_layers))


def test_runs_follow_each_other() -> None:
    runs = layer_runs(windows(*[4, 4, None] * 3, 4, 4))
    assert [(run.first, len(run.pattern), run.repeats, run.end) for run in runs] == [(0, 3, 3, 9), (9, 1, 2, 11)]
