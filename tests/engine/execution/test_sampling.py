"""Sampling against plain numpy, and against transformers' own processors."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.engine.deployment.deployment import DEFAULT_BUILD_DIR
from penstock.engine.execution.sampling.sampling import Form, _filter, _first_past, sample, survey
from penstock.engine.execution.sampling_rows import (
    NEVER,
    NOT_A_TOKEN,
    NOTHING_LEFT,
    PARAMETERS,
    SamplingRows,
)
from penstock.engine.kernels.cpu import NativeLibrary
from penstock.engine.request import SamplingParams

pytestmark = pytest.mark.versions

VOCAB = 60


def rows(count: int, **values: Any) -> SamplingRows:
    """Returns rows with these values of fields, for each row or for all; no other parameter changes anything."""
    fields: dict[str, Any] = {name: getattr(SamplingParams(), name) for name in PARAMETERS} | {"output_index": 0}
    seed = jnp.asarray(values.pop("seed", np.arange(2 * count).reshape(count, 2)), jnp.uint32)
    arrays = {
        name: jnp.broadcast_to(jnp.asarray(value, PARAMETERS.get(name, np.int32)), count)
        for name, value in (fields | values).items()
    }
    return SamplingRows(seed=seed, **arrays)


def logits(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, VOCAB)).astype(np.float32) * 2


draw = jax.jit(lambda scores, rows: sample(scores[None], rows, scores.shape[1]))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (20, 0.9, 0.05), (99, 0.01, 0.9)],
)
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    scores = logits(200)
    chain = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    history: Any = torch.zeros((200, 1), dtype=torch.long)
    kept = chain(history, torch.tensor(scores)).numpy() > -np.inf
    ours = np.asarray(jax.jit(_filter)(scores / 0.8, rows(200, top_k=top_k, top_p=top_p, min_p=min_p))) > NEVER
    np.testing.assert_array_equal(ours, kept)


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    scores = np.broadcast_to(logits(1)[:, :8], (count, 8))
    drawn = np.asarray(draw(scores, rows(count, temperature=1.3)))
    expected = np.exp(scores[0] / 1.3) / np.exp(scores[0] / 1.3).sum()
    observed = np.bincount(drawn, minlength=8) / count
    assert np.abs(observed - expected).max() < 5 * np.sqrt(0.25 / count)


def test_a_draw_depends_on_seed_and_output_index_alone() -> None:
    scores = np.broadcast_to(logits(1), (8, VOCAB))
    seed = np.array([[1, 2]] * 4 + [[1, 3]] * 4)
    index = np.array([0, 0, 1, 2, 0, 0, 1, 2])
    drawn = np.asarray(draw(scores * 0.1, rows(8, seed=seed, output_index=index)))
    assert drawn[0] == drawn[1]
    assert drawn[4] == drawn[5]
    assert len(set(drawn[[0, 2, 3, 4, 6, 7]])) >= 4
    alone = np.asarray(draw(scores[:1] * 0.1, rows(1, seed=seed[6:7], output_index=index[6:7])))
    assert alone[0] == drawn[6]


def test_greedy_rows_beside_sampled_ones_stay_greedy() -> None:
    scores = logits(50)
    temperature = np.where(np.arange(50) % 2, 5.0, 0.0)
    drawn = np.asarray(draw(scores, rows(50, temperature=temperature)))
    np.testing.assert_array_equal(drawn[::2], scores.argmax(-1)[::2])
    assert (drawn[1::2] != scores.argmax(-1)[1::2]).any()


def test_a_filtered_token_is_never_drawn() -> None:
    scores = np.broadcast_to(logits(1), (5_000, VOCAB))
    drawn = np.asarray(draw(scores, rows(5_000, top_k=3, temperature=100.0)))
    assert set(drawn) == set(np.argsort(-scores[0])[:3])


# --- numbers at the edge ---

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
}


# XLA's maximum on CPU finds a NaN in the first and third shape, and drops it in the others.
@pytest.mark.parametrize(("count", "vocab"), [(1, 60), (16, 272), (3, 1000), (8, 1000), (1, 4096), (16, 32_001)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_a_nan_or_plus_infinity_gives_no_token(kind: str, vocab: int, count: int) -> None:
    scores = np.random.default_rng(vocab).normal(size=(count, vocab)).astype(np.float32)
    good = np.asarray(draw(scores, rows(count, **KINDS[kind])))
    assert (good >= 0).all()
    for place in (0, 1, 50, vocab // 2, vocab - 1):
        for value in (np.nan, -np.nan, np.inf):
            broken = scores.copy()
            broken[::2, place] = value
            drawn = np.asarray(draw(broken, rows(count, **KINDS[kind])))
            assert (drawn[::2] == NOT_A_TOKEN).all(), f"{value} at {place}"
            np.testing.assert_array_equal(drawn[1::2], good[1::2])


@pytest.mark.parametrize("kind", KINDS)
def test_minus_infinity_is_a_token_without_a_chance(kind: str) -> None:
    scores = np.full((64, VOCAB), -np.inf, np.float32)
    scores[:, [7, 9]] = 0.5
    scores[1] = -np.inf
    drawn = np.asarray(draw(scores, rows(64, **KINDS[kind])))
    assert drawn[1] == NOTHING_LEFT
    assert set(np.delete(drawn, 1)) == ({7} if kind == "greedy" else {7, 9})


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 1e-45},
        {"top_p": 1e-30},
        {"min_p": 1.0},
        {"min_p": float(np.nextafter(np.float32(1), np.float32(0)))},
        {"top_k": 1},
        {"temperature": 1e-45},
        {"temperature": 1e-38},
        {"temperature": 1.2e-38},
        {"temperature": 1e-20, "top_p": 1e-45, "min_p": 1.0, "top_k": 1},
        {"temperature": 100.0, "top_k": 1},
    ],
    ids=str,
)
def test_the_strictest_values_leave_the_most_likely_token(values: dict[str, Any], scale: float) -> None:
    scores = logits(100) * np.float32(scale)
    np.testing.assert_array_equal(np.asarray(draw(scores, rows(100, **values))), scores.argmax(-1))


@pytest.mark.parametrize("values", [{"min_p": 1e-45}, {"top_k": 2**31 - 1}, {"top_p": 1.0}], ids=str)
def test_the_laxest_values_filter_nothing(values: dict[str, Any]) -> None:
    scores = logits(500)
    np.testing.assert_array_equal(draw(scores, rows(500, **values)), draw(scores, rows(500)))


def test_no_rounding_of_the_sums_draws_a_token_without_weight() -> None:
    """Sums of a parallel scan rise where weights are 0, and the last one is not the largest."""
    rng = np.random.default_rng(0)
    weights = np.exp(rng.normal(size=(64, 4096)) * 3).astype(np.float32)
    weights[rng.random(weights.shape) < 0.9] = 0
    cumulative = np.asarray(jax.jit(partial(jnp.cumsum, axis=-1))(weights))
    row, before = np.nonzero((np.diff(cumulative, axis=-1) > 0) & (weights[:, 1:] == 0))
    row, target = np.append(row, np.arange(64)), np.append(cumulative[row, before], cumulative.max(axis=-1))
    assert len(row) > 64  # there are such places
    greedy = weights.argmax(-1).astype(np.int32)
    drawn = np.asarray(_first_past(*map(jnp.asarray, (target[:, None], cumulative[row], weights[row], greedy[row]))))
    assert (weights[row, drawn] > 0).all()


@pytest.mark.parametrize("vocab", [1, 5, 60, 64, 8192, 50257])
def test_the_kernel_finds_what_xla_finds(vocab: int) -> None:
    """Rows have first maxima, or are broken, at any place."""
    if NativeLibrary(DEFAULT_BUILD_DIR / "native").load_for("kernels", "auto") is None:
        pytest.skip("needs a C++ compiler")
    rng = np.random.default_rng(vocab)
    scores = rng.normal(size=(37, vocab)).astype(np.float32)
    scores[1] = np.round(scores[1])  # equal maxima
    scores[2], scores[3], scores[4] = 0.0, -np.inf, -0.0
    scores[4, vocab // 2] = 0.0
    scores[5, -1], scores[6, 0] = 1e30, 1e30
    for row, value in enumerate((np.nan, np.inf, -np.inf), 7):
        scores[row, rng.integers(vocab)] = value
    expected = jax.jit(survey)(jnp.asarray(scores))
    found = jax.jit(partial(survey, form=Form.NATIVE))(jnp.asarray(scores))
    np.testing.assert_array_equal(found.is_sound, expected.is_sound)
    sound = np.asarray(expected.is_sound)
    assert list(np.flatnonzero(~sound)) == [7, 8]
    np.testing.assert_array_equal(np.asarray(found.greedy)[sound], np.asarray(expected.greedy)[sound])
