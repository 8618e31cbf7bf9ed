"""Sampling against plain numpy, and against transformers' own processors."""

from __future__ import annotations

from dataclasses import replace
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
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling import (
    NEVER,
    NOT_A_TOKEN,
    NOTHING_LEFT,
    ExtendedRows,
    SamplingRows,
    _filter,
    _first_past,
    are_sound,
    extend,
    logprobs_of,
    sample,
)
from penstock.engine.execution.unpacking import unpack_extended
from penstock.engine.request import MAX_LOGIT_BIAS

VOCAB = 60


def rows(count: int, **values: Any) -> SamplingRows:
    fields: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "output_index": 0}
    fields |= values
    arrays = {
        name: jnp.broadcast_to(
            jnp.asarray(value, jnp.int32 if name in ("top_k", "output_index") else jnp.float32), count
        )
        for name, value in fields.items()
        if name != "seed"
    }
    seed = jnp.asarray(fields.get("seed", np.arange(2 * count).reshape(count, 2)), jnp.uint32)
    return SamplingRows(seed=seed, **arrays)


def logits(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, VOCAB)).astype(np.float32) * 2


draw = jax.jit(lambda scores, rows: sample(scores, rows, are_sound(scores)))


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
    kept = chain(torch.zeros((200, 1), dtype=torch.long), torch.tensor(scores)).numpy() > -np.inf
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


def test_penalties_are_those_of_transformers_and_openai() -> None:
    scores, prompt, output = logits(3), [4, 5, 5], [6, 6, 7]
    geometry = Geometry(max_num_seqs=4, max_batch_tokens=16, max_model_len=12, page_size=4, vocab_size=VOCAB)
    layout = geometry.extended_layout(3)
    flat, parts = layout.empty()
    for name in ("history", "bias_ids", "blocked_ids"):
        parts[name][:] = VOCAB
    parts["sources"][:] = [-1, 2, -1]
    as_words = np.array([1.5, 0.7, 0.3], np.float32).view(np.int32)
    parts["words"][:] = (3, *as_words, 0, 5)
    parts["history"][:, :6] = [*prompt, *output]
    parts["history"][1, 5] = VOCAB  # still in flight, as the token at place 2 of the last step
    parts["blocked_ids"][2, 0] = 9
    unpacked = unpack_extended(layout, jnp.asarray(flat), jnp.asarray([0, 0, 7, 0], jnp.int32))
    ours = np.array(extend(jnp.asarray(scores), unpacked))

    history = torch.tensor([prompt + output] * 3)
    expected = RepetitionPenaltyLogitsProcessor(1.5)(history, torch.tensor(scores)).numpy().copy()
    expected[:, 6] -= 0.7 + 2 * 0.3
    expected[:, 7] -= 0.7 + 0.3
    assert ours[2, 9] == NEVER
    ours[2, 9] = expected[2, 9]
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_logprobs_are_normalised() -> None:
    scores = logits(4)
    result = logprobs_of(jnp.asarray(scores), jnp.asarray([0, 1, 2, 3], jnp.int32))
    expected = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    np.testing.assert_allclose(result.sampled, expected[np.arange(4), np.arange(4)], atol=1e-5)
    np.testing.assert_allclose(result.top[:, 0], expected.max(-1), atol=1e-5)


# --- numbers at the edge ---

adjust = jax.jit(extend)
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


def extended_rows(count: int, **lists: Any) -> ExtendedRows:
    """Neutral, but for what is given; lists of ids are those of every row."""
    ids = {"history": [], "bias_ids": [], "blocked_ids": [], "bias": [], "is_allowed": []} | lists
    width = max(1, *(len(values) for values in ids.values() if isinstance(values, list)))

    def padded(name: str, padding: float, dtype: Any) -> jax.Array:
        row = [*ids[name], *[padding] * (width - len(ids[name]))]
        return jnp.broadcast_to(jnp.asarray(row, dtype), (count, width))

    def each(value: float, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full((count,), value, dtype)

    return ExtendedRows(
        history=padded("history", VOCAB, jnp.int32),
        num_prompt=each(0, jnp.int32),
        repetition_penalty=each(lists.get("repetition_penalty", 1.0)),
        presence_penalty=each(0.0),
        frequency_penalty=each(lists.get("frequency_penalty", 0.0)),
        bias_ids=padded("bias_ids", VOCAB, jnp.int32),
        bias=padded("bias", 0.0, jnp.float32),
        is_restricted=each(bool(lists.get("is_allowed")), jnp.int32),
        is_allowed=padded("is_allowed", 0, jnp.int32),
        blocked_ids=padded("blocked_ids", VOCAB, jnp.int32),
        targets=each(-1, jnp.int32),
    )


@pytest.mark.parametrize("scale", [1.0, 1e20, 3e37])
def test_no_bias_and_no_penalty_outbids_what_is_forbidden(scale: float) -> None:
    most = MAX_LOGIT_BIAS
    scores = np.abs(logits(200)) * np.float32(-scale)  # the tokens that are allowed are as unlikely as can be
    scores[:, [3, 4, 5]] = scale
    bad = extended_rows(200, bias_ids=[3, 4, 3], bias=[most, most, NEVER], blocked_ids=[4, 5], history=[6] * 9)
    ours = np.asarray(adjust(scores, bad))
    assert (ours[:, [3, 4, 5]] == NEVER).all()
    assert (np.delete(ours, [3, 4, 5], axis=1) > NEVER).all()
    restricted = extended_rows(
        200,
        bias_ids=[3, 8, 9],
        bias=[most, -most, -most],
        is_allowed=[0, 1, 1],
        repetition_penalty=1e-40,
        history=[8, 9],
    )
    for values in KINDS.values():
        drawn = draw(adjust(scores, restricted), rows(200, **values))
        assert set(np.asarray(drawn)) <= {8, 9}


def test_where_all_is_forbidden_nothing_is_drawn() -> None:
    blocked = extended_rows(3, bias_ids=[7], is_allowed=[1], blocked_ids=[7])
    for values in KINDS.values():
        drawn = np.asarray(draw(adjust(logits(3), blocked), rows(3, **values)))
        assert (drawn == NOTHING_LEFT).all()


def test_a_token_without_a_chance_is_not_drawn_for_being_the_only_one_allowed() -> None:
    scores = logits(4)
    scores[:, 7] = -np.inf
    only = extended_rows(4, bias_ids=[7], bias=[0.0], is_allowed=[1])
    assert (np.asarray(draw(adjust(scores, only), rows(4))) == NOTHING_LEFT).all()


def test_a_row_that_broke_down_in_flight_changes_no_other() -> None:
    """Its next step is dispatched before the host knows: the history then ends with what is no token."""
    scores = logits(4)
    penalised = extended_rows(4, history=[5, VOCAB], repetition_penalty=2.0, frequency_penalty=2.0)
    expected = np.asarray(adjust(scores, penalised))
    for no_token in (NOT_A_TOKEN, NOTHING_LEFT):
        history = np.array(penalised.history)
        history[1, 1] = no_token
        np.testing.assert_array_equal(adjust(scores, replace(penalised, history=jnp.asarray(history))), expected)


def test_no_rounding_of_the_sums_draws_a_token_without_weight() -> None:
    """The sums of a parallel scan rise where weights are 0, and their last one is not the largest."""
    rng = np.random.default_rng(0)
    weights = np.exp(rng.normal(size=(64, 4096)) * 3).astype(np.float32)
    weights[rng.random(weights.shape) < 0.9] = 0
    cumulative = np.asarray(jax.jit(partial(jnp.cumsum, axis=-1))(weights))
    row, before = np.nonzero((np.diff(cumulative, axis=-1) > 0) & (weights[:, 1:] == 0))
    row, target = np.append(row, np.arange(64)), np.append(cumulative[row, before], cumulative.max(axis=-1))
    assert len(row) > 64  # there are such places
    greedy = weights.argmax(-1).astype(np.int32)
    drawn = np.asarray(_first_past(target[:, None], cumulative[row], weights[row], greedy[row]))
    assert (weights[row, drawn] > 0).all()
