"""Runs of layers that one compiled loop of a stacked decoder can compute, though neighbours differ.

Families repeat a short pattern of layers: all equal, or for example five with a window and then one of full attention.
A run is a pattern and its number of repeats; the loop's body has each of the pattern's layers once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from penstock.engine.models.config import BlockConfig, ModelConfig

LONGEST_PATTERN = 8


@dataclass(frozen=True, slots=True)
class LayerRun:
    """The layers of `pattern`, `repeats` times, from layer `first` on."""

    first: int
    pattern: tuple[BlockConfig, ...]
    repeats: int

    @property
    def end(self) -> int:
        return self.first + len(self.pattern) * self.repeats

    def layers(self, place: int) -> tuple[int, ...]:
        """Returns the layers at `place` in the pattern."""
        return tuple(range(self.first + place, self.end, len(self.pattern)))


@cache
def layer_runs(config: ModelConfig) -> tuple[LayerRun, ...]:
    """Returns the layers in runs whose patterns have as few layers in total as possible."""
    numbers = {block: number for number, block in enumerate(dict.fromkeys(config.blocks))}
    kinds = [numbers[block] for block in config.blocks]
    return tuple(
        LayerRun(first, config.blocks[first : first + length], repeats) for first, length, repeats in _cheapest(kinds)
    )


@cache
def stacked_layers(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Returns the layers that each block of a stacked decoder holds."""
    return tuple(run.layers(place) for run in layer_runs(config) for place in range(len(run.pattern)))


def _cheapest(kinds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields each run's first layer, the length of its pattern, and its repeats; at equal cost, long runs first."""
    costs = [0] * (len(kinds) + 1)  # of the layers from each one on
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
    """Yields each possible length of a pattern that begins at `first`, and its number of repeats."""
    for length in range(1, min(LONGEST_PATTERN, len(kinds) - first) + 1):
        end = first + length
        while end < len(kinds) and kinds[end] == kinds[end - length]:
            end += 1
        yield length, (end - first) // length
