"""Layers share pages in groups, some of which leave a part unused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine import ConfigError, EngineConfig
from penstock.engine.deployment.cache_sizes import useful_pages, with_pages
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.models import LayerGroups, ModelConfig, layer_groups, stacked_layers
from penstock.engine.models.layer_groups import LayerPlace
from penstock.engine.scheduling.memory.amounts import Amount
from penstock.tools.plan.device.roofline import kv_sequence_bytes
from tests.engine.engines import TINY

TOKEN_BYTES = 2 * 2 * 16 * 4  # K and V, heads, head_dim, f32: of TINY, in one layer


def model(*windows: int | None, max_position: int = 1000) -> ModelConfig:
    block = TINY.blocks[0]
    blocks = tuple(block.with_attention(sliding_window=window) for window in windows)
    return replace(TINY, blocks=blocks, max_position=max_position)


def layer_places(groups: LayerGroups) -> list[LayerPlace]:
    return [place for place in groups.places if isinstance(place, LayerPlace)]


def places(groups: LayerGroups) -> list[tuple[int, int]]:
    return [(place.group, place.array) for place in layer_places(groups)]


def size_of(groups: LayerGroups) -> int:
    (kind,) = groups.page_kinds
    return kind.size


def deployed(config: ModelConfig, **settings: int) -> Deployment:
    fixed = {"max_num_seqs": 4, "max_batch_tokens": 16, "page_size": 4, **settings}
    return deploy(EngineConfig(**fixed, attention="xla", matmul="xla"), config)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 7])
def test_layers_of_one_kind_are_one_group_in_their_order(window: int | None) -> None:
    groups = layer_groups(model(*[window] * 5))
    assert (size_of(groups), groups.windows) == (5, (window,))
    assert places(groups) == [(0, layer) for layer in range(5)]


def test_kinds_of_as_many_layers_share_arrays_and_leave_nothing_unused() -> None:
    groups = layer_groups(model(8, None, 8, None))
    assert (size_of(groups), groups.windows) == (2, (8, None))
    assert places(groups) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_one_full_layer_in_six_makes_a_group_of_each_place_in_the_pattern() -> None:
    """Gemma 3 27B has 62 layers, of which 10 see everything. Eight arrays of a sliding group are left unused."""
    config = model(*[*[1024] * 5, None] * 10, 1024, 1024, max_position=131072)
    groups = layer_groups(config)
    assert size_of(groups) == 10
    assert sorted(map(str, groups.windows)) == [*["1024"] * 6, "None"]
    for layers in stacked_layers(config):  # so that no loop over layers has to choose among tables
        assert len({layer_places(groups)[layer].group for layer in layers}) == 1


def test_unused_arrays_are_those_that_keep_the_fewest_tokens() -> None:
    few = layer_groups(model(*[None] * 3, *[8] * 10))
    assert size_of(few) == 3  # one of four groups with a window has two unused arrays; none where all is kept
    many = layer_groups(model(*[None] * 10, *[8] * 3))
    assert size_of(many) == 10  # seven unused arrays of eight tokens are worth five groups fewer
    assert size_of(layer_groups(model(*[None] * 10, *[500] * 3))) == 2  # and of 500 tokens they are not


def test_places_are_each_taken_once() -> None:
    for config in (model(8, None, 8, None, 8), model(*[None] * 28, *[50] * 8), model(5, 6, 7, None, None)):
        groups = layer_groups(config)
        assert len(set(groups.places)) == config.num_layers
        assert all(place.array < size_of(groups) for place in layer_places(groups))
        for block, place in zip(config.blocks, layer_places(groups), strict=True):
            assert block.attention.sliding_window == groups.windows[place.group]


def test_a_page_holds_the_layers_of_one_group() -> None:
    here = deployed(model(8, None, 8, None))
    assert here.page_bytes == 4 * 2 * TOKEN_BYTES
    assert [kind.num_layers for kind in here.cache_spec(Amount.of(9)).kinds] == [2]
    assert here.geometry(100).num_groups == 2


def test_pages_that_can_be_of_use_count_windows() -> None:
    here = deployed(model(8, None, 8, None))
    # Everything in 250 pages; and of 8 - 1 + 16 tokens, wherever a chunk begins, at most 7 pages.
    assert useful_pages(here) == Amount.of(4 * (250 + 7) + 1)
    assert with_pages(here, 2**40).counts == useful_pages(here).counts


def test_the_longest_sequence_is_told_with_what_windows_give_back() -> None:
    spec = with_pages(deployed(model(8, None, 8, None), num_pages=104), 0)
    info = deployed(model(8, None, 8, None), num_pages=104).describe(spec)
    assert info.max_model_len == 4 * 100  # beside three pages with the window
    assert info.kv_cache_tokens == 4 * 51  # while no window has passed any


def test_fewer_pages_than_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_pages must be 3 or more, not 2: the model has 2 groups of layers"):
        with_pages(deployed(model(8, None), num_pages=2), 0)
    with pytest.raises(ConfigError, match="the KV cache holds 2 pages of 1024 bytes, and needs 3 at least"):
        with_pages(deployed(model(8, None), kv_cache_bytes=2 * 1024), 0)


def test_the_kv_of_a_sequence_is_planned_with_windows_by_hand() -> None:
    config = model(8, None, 8, None)
    assert kv_sequence_bytes(config, "float32", 100) == (2 * 100 + 2 * 8) * TOKEN_BYTES
    assert kv_sequence_bytes(config, "float32", 5) == 4 * 5 * TOKEN_BYTES
    needs = deployed(config).needs
    assert needs.most(100, 1) == 25 + 3  # eight tokens touch three pages at most
