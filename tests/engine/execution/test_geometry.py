"""Shapes of steps are a closed set; the parts of their arrays have names."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.engine.execution.geometry import ArrayLayout, Geometry

GEOMETRY = Geometry(
    max_num_seqs=48, max_batch_tokens=256, max_model_len=100, page_size=16, vocab_size=10, few_shapes=False
)


def test_buckets_lie_closer_where_compiling_is_quick() -> None:
    geometry = Geometry(48, 256, 100, 4, 10)
    assert geometry.token_buckets == (16, 32, 48, 64, 96, 128, 192, 256)
    assert geometry.row_buckets == (16, 32, 48)
    assert replace(geometry, few_shapes=True).token_buckets == (16, 32, 64, 128, 256)
    assert replace(geometry, few_shapes=True).row_buckets == (16, 32, 64)


@pytest.mark.parametrize("few", [False, True])
def test_a_step_is_padded_to_the_next_bucket_and_none_is_padded_to_twice_its_size(few: bool) -> None:
    geometry = replace(GEOMETRY, few_shapes=few)
    for count in range(1, 257):
        bucket = geometry.token_bucket(count)
        assert bucket in geometry.token_buckets
        assert count <= bucket <= max(16, 2 * count - 1)
        assert all(other < count for other in geometry.token_buckets if other < bucket)


def test_extended_sampling_has_one_shape_where_compiling_is_slow() -> None:
    assert GEOMETRY.row_bucket(3, extended=True) == 16
    few = replace(GEOMETRY, few_shapes=True)
    assert (few.row_bucket(3), few.row_bucket(17, extended=True), few.max_rows) == (16, 64, 64)


def test_pages_of_a_sequence_hold_its_longest() -> None:
    assert GEOMETRY.pages_per_seq == 7  # pages have 16 tokens: 100 begin a seventh
    assert replace(GEOMETRY, max_model_len=96).pages_per_seq == 6


@pytest.mark.parametrize("page_size", [1, 2, 5, 16, 300])
def test_a_step_has_room_for_every_state_that_its_rows_could_leave(page_size: int) -> None:
    """Each row begins at a page's last token: all its n tokens are page ends unless pages are larger."""
    geometry = replace(GEOMETRY, page_size=page_size, has_states=True)
    for length in range(1, 256):
        for num_rows in range(1, min(geometry.max_num_seqs, 256 // length) + 1):
            on_the_way = len(range(page_size, page_size - 1 + length, page_size))
            room = geometry.state_writes(geometry.token_bucket(num_rows * length))
            assert num_rows * (1 + on_the_way) <= room
    assert geometry.state_writes(96) == min(96, 2 * 48 + 96 // page_size)
    assert replace(geometry, has_states=False).state_writes(96) == 0


def test_what_is_packed_by_name_is_unpacked_by_name() -> None:
    layout = ArrayLayout(first=(2, 3), count=(1,), second=(4,))
    flat, parts = layout.empty()
    assert flat.shape == (layout.size,) == (11,)
    parts["first"][1], parts["count"][0], parts["second"][:] = (7, 8, 9), 5, range(4)
    unpacked = layout.unpack(jnp.asarray(flat))
    np.testing.assert_array_equal(unpacked["first"], [[0, 0, 0], [7, 8, 9]])
    np.testing.assert_array_equal(unpacked["count"], [5])
    np.testing.assert_array_equal(unpacked["second"], range(4))


def test_each_array_is_new_as_the_device_may_still_read_the_last_one() -> None:
    layout = GEOMETRY.step_layout(16)
    flat, parts = layout.empty()
    parts["token_ids"][:] = 3
    again, _ = layout.empty()
    assert flat.any()
    assert not again.any()


def test_a_small_step_uploads_no_more_sequences_than_it_has_tokens() -> None:
    _, parts = GEOMETRY.step_layout(16).empty()
    assert parts["kv_lens"].shape == (16,)
    assert parts["page_indices"].shape == (1, 16, 7)
    _, parts = GEOMETRY.step_layout(256).empty()
    assert parts["kv_lens"].shape == (GEOMETRY.max_rows,)
