"""A model is split over devices by heads, features and vocabulary."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec

from penstock.engine import ConfigError
from penstock.engine.models import num_parameters
from penstock.engine.models.axes import logical_axes
from penstock.engine.sharding.placement import place, split_model
from tests.engine.engines import TINY


def test_kv_heads_are_split_while_there_are_enough_and_held_several_times_beyond() -> None:
    assert split_model(TINY, 1) == TINY
    assert split_model(TINY, 2) == TINY  # one KV head each
    spread = split_model(TINY, 4)
    assert (spread.attentions[0].num_kv_heads, {block.attention.kv_copies for block in spread.blocks}) == (4, {2})


@pytest.mark.parametrize(
    ("tensor", "names"),
    [
        (3, "tensor_parallel = 3 does not divide the model's 4 attention heads; 1, 2, 4 do"),
        (8, "tensor_parallel = 8 does not divide the model's 4 attention heads"),
    ],
)
def test_what_does_not_divide_evenly_is_refused_with_what_would(tensor: int, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        split_model(TINY, tensor)


def test_each_axis_of_a_parameter_goes_where_the_rules_say() -> None:
    placement = place(jax.devices()[:1], 1)
    spec = {
        path: placement.spec(logical_axes(path, num_dims))
        for path, num_dims in (
            (("blocks", 0, "attention", "q", "kernel"), 2),
            (("blocks", 0, "attention", "out", "kernel"), 2),
            (("blocks", 0, "mlp", "down", "kernel"), 3),  # stacked
            (("embedding",), 2),
            (("norm", "scale"), 1),
        )
    }
    assert list(spec.values()) == [
        PartitionSpec(None, "tensor"),
        PartitionSpec("tensor", None),
        PartitionSpec(None, "tensor", None),
        PartitionSpec("tensor", None),
        PartitionSpec(None),
    ]


@pytest.mark.parametrize(
    ("vocab_size", "tensor", "rows"),
    [(1003, 1, 1003), (1003, 2, 1024), (1003, 4, 1024), (1025, 2, 1280), (1004, 2, 1004), (3, 4, 512)],
)
def test_a_vocabulary_that_devices_do_not_divide_is_padded_to_shares_of_whole_tiles(
    vocab_size: int, tensor: int, rows: int
) -> None:
    model = replace(TINY, vocab_size=vocab_size)
    split = split_model(model, tensor)
    assert (split.vocab_size, split.vocab_rows) == (vocab_size, rows)
    assert split_model(split, tensor) == split
    assert num_parameters(split) == num_parameters(model)


@pytest.mark.parametrize(("vocab_size", "tensor", "rows"), [(1003, 1, 1024), (1024, 1, 1024), (1008, 2, 1024)])
def test_where_memory_has_tiles_each_share_of_a_vocabulary_is_whole_ones(
    vocab_size: int, tensor: int, rows: int
) -> None:
    split = split_model(replace(TINY, vocab_size=vocab_size), tensor, has_tiles=True)
    assert split.vocab_rows == rows
    assert split_model(split, tensor, has_tiles=True) == split
