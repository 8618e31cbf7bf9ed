"""Maxima of logits that devices have in parts, which greedy rows are sampled by."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.execution.sampling import Survey, survey
from penstock.engine.execution.split_logits import _of_part

PARTS, VOCAB, PADDED = 4, 30, 32


def split(logits: np.ndarray) -> Survey:
    """What each of four devices finds, of which all must find the same."""
    padded = np.pad(logits, ((0, 0), (0, PADDED - VOCAB)), constant_values=1e9)  # that would win if it were a token
    parts = jnp.asarray(padded.reshape(len(logits), PARTS, -1).transpose(1, 0, 2))
    found: Survey = jax.vmap(partial(_of_part, axes=("part",), vocab_size=VOCAB), axis_name="part")(parts)
    for array in found:
        np.testing.assert_array_equal(array, jnp.broadcast_to(array[:1], array.shape))
    return Survey(*(array[0] for array in found))


def test_parts_give_what_the_whole_gives() -> None:
    logits = np.random.default_rng(0).normal(size=(6, VOCAB)).astype(np.float32)
    logits[1, [5, 9, 29]] = 7.0  # of equal maxima the first, though another part has one too
    logits[2] = -np.inf
    ours, whole = split(logits), survey(jnp.asarray(logits))
    np.testing.assert_array_equal(ours.greedy, whole.greedy)
    np.testing.assert_array_equal(ours.top, whole.top)
    assert ours.greedy[1] == 5
    assert bool(ours.is_sound.all())


def test_a_broken_logit_of_any_part_is_noticed() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, 29], logits[1, 3] = np.nan, np.inf
    np.testing.assert_array_equal(split(logits).is_sound, [False, False, True])
