"""Layers of a stacked decoder that one compiled loop can serve, though neighbours differ.

Families repeat a short pattern of layers: all alike, or one of full attention behind five with a window. A run is a
pattern and how often it follows itself; its loop has the pattern's layers in its body, once each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

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


@cache
def layer_runs(config: ModelConfig) -> tuple[LayerRun, ...]:
    """The layers in runs whose patterns have as few layers together as can be."""
    numbers = {block: number for number, block in enumerate(dict.fromkeys(config.blocks))}
    kinds = [numbers[block] for block in config.blocks]
    return tuple(
        LayerRun(first, config.blocks[first : first + length], repeats) for first, length, repeats in _cheapest(kinds)
    )


@cache
def stacked_layers(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The layers that each block of a stacked decoder holds."""
    return tuple(run.layers(place) for run in layer_runs(config) for place in range(len(run.pattern)))


def _cheapest(kinds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where each run begins, the length of its pattern, and how often that is there; of equal ones, long runs first."""
    costs = [0] * (len(kinds) + 1)  # of the layers from each on
    choices = [(1, 1)] * len(kinds)
    for first in reversed(range(len(kinds))):
        costs[first], _, *choice = min(
            (length + costs[first + length * repeats], -length * repeats, length, repeats)
            for length, repeats in _repeats(kinds, first)
        )
        choices[first] = choice[0], choice[1]
    place = 0
    while place < len(kinds):
        length, repeats = choices[place]
        yield place, length, repeats
        place += length * repeats


def _repeats(kinds: Sequence[int], first: int) -> Iterator[tuple[int, int]]:
    """Each length that a pattern from `first` on may have, and how often it is there."""
    for length in range(1, min(LONGEST_PATTERN, len(kinds) - first) + 1):
        end = first + length
        while end < len(kinds) and kinds[end] == kinds[end - length]:
            end += 1
        yield length, (end - first) // length
