"""Layers of a stacked decoder that one compiled loop can serve, though neighbours differ.

Families repeat a short pattern of layers: all alike, or one of full attention behind five with a window. A run is a
pattern and how often it follows itself; its loop has the pattern's layers in its body, once each.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.models.config import BlockConfig, ModelConfig

LONGEST_PATTERN = 8


@dataclass(frozen=True, slots=True)
class LayerRun:
    """`repeats` times the layers of `pattern`, from layer `first` on."""

    first: int
    pattern: tuple[BlockConfig, ...]
    repeats: int

    @property
    def end(self) -> int:
        return self.first + len(self.pattern) * self.repeats

    def layers(self, place: int) -> tuple[int, ...]:
        """Those at `place` in the pattern."""
        return tuple(range(self.first + place, self.end, len(self.pattern)))


def layer_runs(config: ModelConfig) -> tuple[LayerRun, ...]:
    """The layers in runs whose patterns have as few layers together as can be."""
    blocks = config.blocks
    best: list[tuple[int, LayerRun | None]] = [(0, None)] * (len(blocks) + 1)  # from each layer on
    for first in reversed(range(len(blocks))):
        best[first] = min(
            ((len(run.pattern) + best[run.end][0], run) for run in _runs_from(blocks, first)), key=lambda each: each[0]
        )
    runs = []
    place = 0
    while (run := best[place][1]) is not None:
        runs.append(run)
        place = run.end
    return tuple(runs)


def stacked_layers(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The layers that each block of a stacked decoder holds."""
    return tuple(run.layers(place) for run in layer_runs(config) for place in range(len(run.pattern)))


def _runs_from(blocks: tuple[BlockConfig, ...], first: int) -> list[LayerRun]:
    """With each length of pattern, the longest run."""
    runs = []
    for length in range(1, min(LONGEST_PATTERN, len(blocks) - first) + 1):
        pattern = blocks[first : first + length]
        repeats = 1
        while blocks[first + repeats * length : first + (repeats + 1) * length] == pattern:
            repeats += 1
        runs.append(LayerRun(first, pattern, repeats))
    return runs
