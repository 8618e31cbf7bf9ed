"""Groups of layers that share a page of the KV cache, and where each layer finds its part of a sequence.

All layers with the same number and size of KV heads use one kind of page, so that memory goes where it is needed. A
page has `size` arrays, and each array holds some tokens of one layer. Layers with the same window are put into groups
of at most `size`, and a sequence has a list of pages per group. A group with a window frees the pages behind it; other
groups keep everything.

Layer j of a group uses array j of the group's pages. If a group has fewer layers than `size`, its pages leave arrays
unused. Layers with another number or size of KV heads have groups and pages of another kind. A page holds the same
number of tokens in all kinds, but not of bytes. A layer that reads another layer's keys and values shares its place.

Layers without attention have no part of a page. They keep states, each kind in arrays of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from penstock.engine.models.config import ModelConfig, StateArray
from penstock.engine.models.layer_scans import stacked_layers

MOST_GROUPS = 8
"""Upper limit of groups: each costs host time in every step, for a page table."""

FORGONE = 0.02
"""Share of memory that may be given up for fewer groups."""


class LayerPlace(NamedTuple):
    """Location of a layer's keys and values."""

    group: int
    array: int  # in each page of the group
    kind: int = 0  # of these pages


class StatePlace(NamedTuple):
    """Location of a layer's states."""

    kind: int
    number: int  # index of the layer among those of its kind


@dataclass(frozen=True, slots=True)
class PageKind:
    """Pages whose arrays have one shape."""

    num_kv_heads: int
    head_dim: int
    size: int  # arrays in a page: the number of layers in the largest group


@dataclass(frozen=True, slots=True)
class StateKind:
    """Layers that keep states of the same shapes."""

    arrays: tuple[StateArray, ...]  # of each layer
    num_layers: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """A model's groups of layers with the kinds of their pages, and the kinds of states of layers without pages."""

    page_kinds: tuple[PageKind, ...]
    windows: tuple[int | None, ...]  # of each group
    kinds: tuple[int, ...]  # of each group's pages
    places: tuple[LayerPlace | StatePlace, ...]  # of each layer
    state_kinds: tuple[StateKind, ...] = ()

    @property
    def pages(self) -> tuple[LayerPlace, ...]:
        """Places of the layers with attention, in order."""
        return tuple(place for place in self.places if isinstance(place, LayerPlace))

    def page_array(self, place: LayerPlace) -> int:
        """Returns the index of the cache with this layer's keys and values, in a decoder that is not stacked: kind by
        kind.
        """
        return sum(kind.size for kind in self.page_kinds[: place.kind]) + place.array

    def state_array(self, place: StatePlace) -> int:
        """Returns the index of the cache with this layer's states, in a decoder that is not stacked: they come after
        the pages.
        """
        num_pages = sum(kind.size for kind in self.page_kinds)
        return num_pages + sum(kind.num_layers for kind in self.state_kinds[: place.kind]) + place.number


@cache
def layer_groups(config: ModelConfig) -> LayerGroups:
    """Returns the groups of a model: a single one, if all layers have the same KV heads and window."""
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
    """Returns the layers of each window, by the number and size of their KV heads.

    Layers that a stacked decoder computes in one loop stand together: if they are in one group, no iteration has to
    choose among tables.
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
    """Returns the layers without attention by what they keep, those of one loop together."""
    kinds: dict[tuple[StateArray, ...], list[int]] = {}
    if config.has_states:
        for layer in chain.from_iterable(stacked_layers(config)):
            if not config.blocks[layer].has_attention:
                kinds.setdefault(config.blocks[layer].states(config.dtype), []).append(layer)
    return kinds


def _best_size(counts: dict[int | None, int], context: int) -> int:
    """Returns the number of layers per group.

    The cost of a size is the memory of a sequence of `context` tokens, unused arrays included: the sum over all groups
    of size x kept tokens. Among the sizes that cost about the least, the largest is chosen, for fewer tables.
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
