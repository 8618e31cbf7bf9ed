"""Sampling against plain numpy, and against transformers' own processors."""

from __future__ import annotations

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

from penstock.engine.batch import Geometry, unpack_extended
from penstock.engine.sampling import NEVER, SamplingRows, _filter, extend, logprobs_of, sample

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


draw = jax.jit(sample)


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
