"""The TPU kernels behind sampling with options, interpreted and compared with the XLA forms."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.engine.execution.sampling.adjust_kernel import adjust_by_kernel
from penstock.engine.execution.sampling.adjusting import adjust, masked
from penstock.engine.execution.sampling.blocks_kernel import fetch_blocks
from penstock.engine.execution.sampling.extended_rows import NO_DRAFT, NO_TARGET, ExtendedRows, seen_drafts
from penstock.engine.execution.sampling.logprobs import _score, _score_by_maxima
from penstock.engine.execution.sampling.sampling import survey
from penstock.engine.execution.sampling.sampling_state import GENERATED, IN_PROMPT, LANES, STOPS, SamplingState
from tests.support.patience import slow

NUM_SLOTS = 5


def asked_of(rng: np.random.Generator, count: int) -> ExtendedRows:
    """Returns rows of all kinds: some ask for nothing, and some follow drafts of the same slot."""
    slot = np.sort(rng.integers(0, NUM_SLOTS, count))
    is_adjusted = rng.random(count) < 0.7
    drafts = np.where(is_adjusted & (rng.random(count) < 0.5), rng.integers(0, 40, count), NO_DRAFT)
    return ExtendedRows(
        slot=jnp.asarray(slot, jnp.int32),
        is_adjusted=jnp.asarray(is_adjusted),
        is_biased=jnp.asarray(rng.random(count) < 0.5),
        repetition_penalty=jnp.asarray(rng.choice([1.0, 2.0, 0.5], count), jnp.float32),  # whose products are exact
        presence_penalty=jnp.asarray(rng.choice([0.0, 0.5], count), jnp.float32),
        frequency_penalty=jnp.asarray(rng.choice([0.0, 0.25], count), jnp.float32),
        min_tokens=jnp.asarray(rng.integers(0, 3, count), jnp.int32),
        target=jnp.full(count, NO_TARGET, jnp.int32),
        draft=jnp.asarray(drafts, jnp.int32),
        is_scored=jnp.ones(count, jnp.bool_),
    )


def state_of(rng: np.random.Generator, vocab: int) -> SamplingState:
    """Returns a state whose padding must never be seen."""
    width = -(-vocab // LANES) * LANES
    words = rng.choice([0, 0, IN_PROMPT, STOPS, GENERATED, 3 * GENERATED + IN_PROMPT], (NUM_SLOTS, width))
    bias = rng.choice([0.0, 0.0, 2.5, -100.0, -1e30], (NUM_SLOTS, width))
    bias[:, vocab:] = np.nan
    return SamplingState(jnp.asarray(words, jnp.int32), jnp.asarray(bias, jnp.float32), vocab)


@pytest.mark.parametrize(
    ("vocab", "count", "has_masks"), [(60, 3, True), (5003, 16, True), slow(128, 9, False), slow(40_000, 12, True)]
)
def test_it_adjusts_as_xla_does(vocab: int, count: int, has_masks: bool) -> None:
    """Rows that break down, forbidden tokens and drafts included; each bit is the same."""
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(count, vocab)) * 3).astype(np.float32)
    logits[0, 5], logits[1, 7], logits[2, vocab - 1] = np.nan, np.inf, -np.inf
    rows, state, index = asked_of(rng, count), state_of(rng, vocab), jnp.ones(count, jnp.int32)
    masks = rng.integers(-(2**31), 2**31, (count, -(-vocab // 32)), np.int32) if has_masks else None
    drafts = seen_drafts(rows)
    assert count < 16 or int(drafts.num_seen.max()) > 1

    by_xla = jax.jit(adjust)(logits, rows, state, index, drafts)
    by_xla = by_xla if masks is None else masked(by_xla, jnp.asarray(masks))
    by_kernel = jax.jit(partial(adjust_by_kernel, at_once=2, interpret=True))
    found = by_kernel(logits, rows, state, index, drafts, masks)
    np.testing.assert_array_equal(found.logits, by_xla)
    np.testing.assert_array_equal(found.is_sound, survey(jnp.asarray(logits)).is_sound)
    whole = np.pad(by_xla, ((0, 0), (0, -vocab % LANES)), constant_values=-np.inf).reshape(count, -1, LANES)
    np.testing.assert_array_equal(np.asarray(found.maxima)[:, : whole.shape[1]], whole.max(axis=2))
    assert (np.asarray(found.maxima)[:, whole.shape[1] :] == -np.inf).all()


def test_the_maxima_may_be_of_the_logits_before() -> None:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(2, 300)), jnp.float32)
    rows = replace(asked_of(rng, 2), draft=jnp.full(2, NO_DRAFT, jnp.int32))
    given: Any = (logits, rows, state_of(rng, 300), jnp.zeros(2, jnp.int32), seen_drafts(rows), None)
    found = jax.jit(partial(adjust_by_kernel, raw_maxima=True, at_once=1, interpret=True))(*given)
    assert found.maxima is not None
    np.testing.assert_array_equal(found.maxima[:, 1], logits[:, LANES : 2 * LANES].max(axis=1))


@pytest.mark.parametrize("vocab", [8, 300, 5003])
def test_rows_are_scored_by_the_maxima_of_their_blocks_as_without(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = jnp.asarray(np.round(rng.normal(size=(5, vocab)) * 20) / 8, jnp.float32)  # with equals
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % LANES)), constant_values=-jnp.inf)
    maxima = jnp.pad(padded.reshape(5, -1, LANES).max(axis=2), ((0, 0), (0, 3)), constant_values=-jnp.inf)
    tokens = jnp.asarray([0, vocab - 1, 3, -1, vocab // 2], jnp.int32)
    scored = partial(_score_by_maxima, maxima=maxima, interpret=True)
    found, expected = jax.jit(scored)(logits, tokens), _score(logits, jnp.maximum(tokens, 0))
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.top, expected.top, atol=1e-5)
    np.testing.assert_allclose(found.sampled, expected.sampled, atol=1e-5)


def test_blocks_are_fetched_from_where_they_lie() -> None:
    logits = jnp.arange(3 * 300, dtype=jnp.float32).reshape(3, 300)
    fetched = jax.jit(partial(fetch_blocks, interpret=True))(logits, jnp.asarray([[0, 2], [1, 1], [2, 0]]))
    np.testing.assert_array_equal(fetched[1], np.broadcast_to(logits[1, LANES : 2 * LANES], (2, LANES)))
    np.testing.assert_array_equal(fetched[2, 0, : 300 - 2 * LANES], logits[2, 2 * LANES :])
    assert (np.asarray(fetched[2, 0, 300 - 2 * LANES :]) == -np.inf).all()
