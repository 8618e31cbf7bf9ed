"""Which layers share a page of the KV cache, and where each layer finds what it keeps of a sequence.

Pages are of one kind for all layers with as many KV heads of the same size, so that memory goes where it is needed: a
page has `size` arrays, each of which holds some tokens of one layer. Layers that see the same window are put into
groups of at most that many, and a sequence has a list of pages per group. A group with a window gives back what lies
behind it; the others keep everything.

Layer j of a group is in array j of its pages, whatever the group. What a group has fewer layers than `size`, its pages
leave unused. Layers whose KV heads are of other numbers or sizes have groups, and pages, of another kind: a page holds
as many tokens in all kinds, and not as many bytes. A layer that reads the keys and values of another is where that is.

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
    kind: int = 0  # of these pages


class StatePlace(NamedTuple):
    """Where a layer's states are."""

    kind: int
    number: int  # of the layer, among those of its kind


@dataclass(frozen=True, slots=True)
class PageKind:
    """Pages whose arrays are of one shape."""

    num_kv_heads: int
    head_dim: int
    size: int  # arrays in a page, as many as its largest group has layers


@dataclass(frozen=True, slots=True)
class StateKind:
    """Layers that keep states of the same shapes."""

    arrays: tuple[StateArray, ...]  # of each of them
    num_layers: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's layers with the kinds of their pages, and the kinds of states of those without."""

    page_kinds: tuple[PageKind, ...]
    windows: tuple[int | None, ...]  # of each group
    kinds: tuple[int, ...]  # of each group's pages
    places: tuple[LayerPlace | StatePlace, ...]  # of each layer
    state_kinds: tuple[StateKind, ...] = ()

    @property
    def pages(self) -> tuple[LayerPlace, ...]:
        """The places of the layers with attention, in order."""
        return tuple(place for place in self.places if isinstance(place, LayerPlace))

    def page_array(self, place: LayerPlace) -> int:
        """Which of the caches of a decoder that is not stacked has this layer's keys and values: kind by kind."""
        return sum(kind.size for kind in self.page_kinds[: place.kind]) + place.array

    def state_array(self, place: StatePlace) -> int:
        """Which of the caches of a decoder that is not stacked has this layer's states: they come behind the pages."""
        num_pages = sum(kind.size for kind in self.page_kinds)
        return num_pages + sum(kind.num_layers for kind in self.state_kinds[: place.kind]) + place.number


@cache
def layer_groups(config: ModelConfig) -> LayerGroups:
    """The groups for a model: one, where all layers have the same KV heads and see the same window."""
    windows: list[int | None] = []
    page_kinds: list[PageKind] = []
    kinds: list[int] = []
    places: dict[int, LayerPlace | StatePlace] = {}
    for heads, windows_of in _layers_by_kind(config).items():
        size = _best_size({window: len(layers) for window, layers in windows_of.items()}, config.max_position)
        for window, layers in windows_of.items():
            for start in range(0, len(layers), size):
                group = layers[start : start + size]
                places |= {layer: LayerPlace(len(windows), i, len(page_kinds)) for i, layer in enumerate(group)}
                windows.append(window)
                kinds.append(len(page_kinds))
        page_kinds.append(PageKind(*heads, size))
    for layer, block in enumerate(config.blocks):
        if block.has_attention and block.attention.kv_layer is not None:
            places[layer] = places[block.attention.kv_layer]
    states = _state_kinds(config)
    for kind, layers in enumerate(states.values()):
        places |= {layer: StatePlace(kind, number) for number, layer in enumerate(layers)}
    return LayerGroups(
        tuple(page_kinds),
        tuple(windows),
        tuple(kinds),
        tuple(places[layer] for layer in range(config.num_layers)),
        tuple(StateKind(arrays, len(layers)) for arrays, layers in states.items()),
    )


def _layers_by_kind(config: ModelConfig) -> dict[tuple[int, int], dict[int | None, list[int]]]:
    """The layers of each window, by the number and the size of their KV heads. Those that a stacked decoder computes in
    one loop stand together: where they are in one group, it need not choose among tables in each round.
    """
    attentions = {layer: block.attention for layer, block in enumerate(config.blocks) if block.has_pages}
    kinds: dict[tuple[int, int], dict[int | None, list[int]]] = {}
    for attention in attentions.values():
        heads = attention.num_kv_heads, attention.head_dim
        kinds.setdefault(heads, {}).setdefault(attention.sliding_window, [])
    is_one = len(kinds) == 1 and all(len(windows) == 1 for windows in kinds.values())
    for layer in attentions if is_one else chain.from_iterable(stacked_layers(config)):
        if layer in attentions:
            own = attentions[layer]
            kinds[own.num_kv_heads, own.head_dim][own.sliding_window].append(layer)
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
