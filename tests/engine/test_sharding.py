"""How a model is split over devices: heads, features, vocabulary."""

from __future__ import annotations

import jax
import pytest
from engines import TINY
from jax.sharding import PartitionSpec

from penstock.engine import ConfigError
from penstock.engine.models.axes import logical_axes
from penstock.engine.sharding import gathered, place, split_model


def test_kv_heads_are_split_while_there_are_enough_and_held_several_times_beyond() -> None:
    assert split_model(TINY, 1) == TINY
    assert split_model(TINY, 2) == TINY  # one KV head each
    spread = split_model(TINY, 4)
    assert (spread.num_kv_heads, {block.attention.kv_copies for block in spread.blocks}) == (4, {2})


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
    placement = place(TINY, jax.devices()[:1], 1)
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
        PartitionSpec(None, "tensor"),  # type: ignore[no-untyped-call]
        PartitionSpec("tensor", None),  # type: ignore[no-untyped-call]
        PartitionSpec(None, "tensor", None),  # type: ignore[no-untyped-call]
        PartitionSpec("tensor", None),  # type: ignore[no-untyped-call]
        PartitionSpec(None),  # type: ignore[no-untyped-call]
    ]


def test_a_vocabulary_that_cannot_be_split_evenly_stays_whole() -> None:
    devices = jax.devices() * 3  # a mesh of one device named three times never computes
    assert place(TINY, devices[:1], 1).rules["vocab"] == "tensor"
    assert TINY.vocab_size % 3
    assert place(TINY, devices[:3], 3).rules["vocab"] is None


def test_without_a_mesh_logits_are_left_alone() -> None:
    logits = jax.numpy.ones((2, 3))
    assert gathered(logits, None) is logits
