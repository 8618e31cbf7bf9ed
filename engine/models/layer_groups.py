"""Which layers share a page of the KV cache, and where each layer finds what it keeps of a sequence.

All pages of a cache are of one size, so that memory goes where it is needed: a page has `size` arrays, each of which
holds some tokens of one layer. Layers that see the same window are put into groups of at most that many, and a sequence
has a list of pages per group. A group with a window gives back what lies behind it; the others keep everything.

Layer j of a group is in array j of its pages, whatever the group. What a group has fewer layers than `size`, its pages
leave unused.

Layers without attention have no part of a page. They keep states, each kind of them in arrays of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from penstock.engine.models.config import ModelConfig, StateArray
from penstock.engine.models.runs import stacked_layers

MOST_GROUPS = 8
"""Each takes the host's time in every step, for a table of pages."""

FORGONE = 0.02
"""Of memory, for fewer groups."""


class LayerPlace(NamedTuple):
    """Where a layer's keys and values are."""

    group: int
    array: int  # of each page of the group


class StatePlace(NamedTuple):
    """Where a layer's states are."""

    kind: int
    number: int  # of the layer, among those of its kind


@dataclass(frozen=True, slots=True)
class StateKind:
    """Layers that keep states of the same shapes."""

    arrays: tuple[StateArray, ...]  # of each of them
    num_layers: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's layers, and the kinds of states of those that have no pages."""

    size: int  # arrays in a page, as many as the largest group has layers
    windows: tuple[int | None, ...]  # of each group
    places: tuple[LayerPlace | StatePlace, ...]  # of each layer
    kinds: tuple[StateKind, ...] = ()

    @property
    def pages(self) -> tuple[LayerPlace, ...]:
        """The places of the layers with attention, in order."""
        return tuple(place for place in self.places if isinstance(place, LayerPlace))

    def state_array(self, place: StatePlace) -> int:
        """Which of the caches of a decoder that is not stacked has this layer's states: they come behind the pages."""
        return self.size + sum(kind.num_layers for kind in self.kinds[: place.kind]) + place.number


@cache
def layer_groups(config: ModelConfig) -> LayerGroups:
    """The groups for a model: one, where all layers see the same window."""
    windows_of = _kinds(config)
    size = _best_size({window: len(layers) for window, layers in windows_of.items()}, config.max_position)
    windows: list[int | None] = []
    places: dict[int, LayerPlace | StatePlace] = {}
    for window, layers in windows_of.items():
        for start in range(0, len(layers), size):
            group = layers[start : start + size]
            places |= {layer: LayerPlace(len(windows), array) for array, layer in enumerate(group)}
            windows.append(window)
    states = _state_kinds(config)
    for kind, layers in enumerate(states.values()):
        places |= {layer: StatePlace(kind, number) for number, layer in enumerate(layers)}
    kinds = tuple(StateKind(arrays, len(layers)) for arrays, layers in states.items())
    return LayerGroups(size, tuple(windows), tuple(places[layer] for layer in range(config.num_layers)), kinds)


def _kinds(config: ModelConfig) -> dict[int | None, list[int]]:
    """The layers of each window. Those that a stacked decoder computes in one loop stand together: where they are in
    one group, it need not choose among tables in each round.
    """
    windows = {
        layer: block.attention.sliding_window for layer, block in enumerate(config.blocks) if block.has_attention
    }
    if len(set(windows.values())) == 1:
        return {next(iter(windows.values())): list(windows)}
    kinds: dict[int | None, list[int]] = {window: [] for window in windows.values()}
    for layer in chain.from_iterable(stacked_layers(config)):
        if layer in windows:
            kinds[windows[layer]].append(layer)
    return kinds


def _state_kinds(config: ModelConfig) -> dict[tuple[StateArray, ...], list[int]]:
    """The layers without attention by what they keep, those of one loop together."""
    kinds: dict[tuple[StateArray, ...], list[int]] = {}
    if config.has_states:
        for layer in chain.from_iterable(stacked_layers(config)):
            if not config.blocks[layer].has_attention:
                kinds.setdefault(config.blocks[layer].states(config.dtype), []).append(layer)
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
