"""Which layers share a page of the KV cache, and where each finds its part of it.

All pages of a cache are of one size, so that memory goes where it is needed: a page has `size` arrays, each of which
holds some tokens of one layer. Layers that see the same window are put into groups of at most that many, and a sequence
has a list of pages per group. A group with a window gives back what lies behind it; the others keep everything.

Layer j of a group is in array j of its pages, whatever the group. What a group has fewer layers than `size`, its pages
leave unused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.runs import stacked_layers

MOST_GROUPS = 8
"""Each takes the host's time in every step, for a table of pages."""

FORGONE = 0.02
"""Of memory, for fewer groups."""


class LayerPlace(NamedTuple):
    """Where a layer's keys and values are."""

    group: int
    array: int  # of each page of the group


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's layers."""

    size: int  # arrays in a page, as many as the largest group has layers
    windows: tuple[int | None, ...]  # of each group
    places: tuple[LayerPlace, ...]  # of each layer


@cache
def layer_groups(config: ModelConfig) -> LayerGroups:
    """The groups for a model: one, where all layers see the same window."""
    kinds = _kinds(config)
    size = _best_size({window: len(layers) for window, layers in kinds.items()}, config.max_position)
    windows: list[int | None] = []
    places: dict[int, LayerPlace] = {}
    for window, layers in kinds.items():
        for start in range(0, len(layers), size):
            group = layers[start : start + size]
            places |= {layer: LayerPlace(len(windows), array) for array, layer in enumerate(group)}
            windows.append(window)
    return LayerGroups(size, tuple(windows), tuple(places[layer] for layer in range(config.num_layers)))


def _kinds(config: ModelConfig) -> dict[int | None, list[int]]:
    """The layers of each window. Those that a stacked decoder computes in one loop stand together: where they are in
    one group, it need not choose among tables in each round.
    """
    windows = [block.attention.sliding_window for block in config.blocks]
    if len(set(windows)) == 1:
        return {windows[0]: list(range(config.num_layers))}
    kinds: dict[int | None, list[int]] = {window: [] for window in windows}
    for layer in chain.from_iterable(stacked_layers(config)):
        kinds[windows[layer]].append(layer)
    return kinds


def _best_size(counts: dict[int | None, int], context: int) -> int:
    """How many layers a group has, so that a sequence of `context` tokens takes little memory, unused arrays included:
    the sum over all groups of size x tokens that they keep. Of the sizes that take about the least the largest, for
    fewer tables.
    """

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts.values())

    def cost(size: int) -> int:
        kept = {window: context if window is None else min(window, context) for window in counts}
        return sum(-(-count // size) * size * kept[window] for window, count in counts.items())

    largest = max(counts.values())
    sizes = [size for size in range(1, largest + 1) if num_groups(size) <= MOST_GROUPS] or [largest]
    enough = min(map(cost, sizes)) * (1 + FORGONE)
    return max(size for size in sizes if cost(size) <= enough)
