"""Penalties, biases, restrictions and log-probabilities, over the state of batch slots."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import SingleDeviceSharding
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling.adjusting import adjust, masked
from penstock.engine.execution.sampling.extended import sample_extended
from penstock.engine.execution.sampling.extended_rows import NO_DRAFT, NO_TARGET, ExtendedRows, seen_drafts
from penstock.engine.execution.sampling.logprobs import Logprobs, logprobs_of
from penstock.engine.execution.sampling.sampling import Form
from penstock.engine.execution.sampling.sampling_state import (
    GENERATED,
    IN_PROMPT,
    SamplingState,
    counted,
    filled,
    sampling_state,
    slot_fill,
    state_bytes,
)
from penstock.engine.execution.sampling_rows import NEVER, NOT_A_TOKEN, NOTHING_LEFT
from penstock.parameters import MAX_LOGIT_BIAS
from penstock.tools.plan.device.topology import devices_of
from tests.engine.execution.test_sampling import KINDS, VOCAB, draw, logits, rows
from tests.support.needs import needs_libtpu

NUM_SLOTS = 6


def geometry(vocab: int = VOCAB, max_model_len: int = 100) -> Geometry:
    return Geometry(
        max_num_seqs=NUM_SLOTS, max_batch_tokens=16, max_model_len=max_model_len, page_size=4, vocab_size=vocab
    )


def state_of(slot: int = 0, vocab: int = VOCAB, **lists: Any) -> SamplingState:
    """Returns a state that is empty except for one slot."""
    empty = sampling_state(geometry(vocab), jnp.zeros)
    given = {"prompt": [], "generated": [], "stops": (), "bias": {}, "allowed": (), "bad": ()} | lists
    fill = slot_fill(geometry(vocab), slot, **given)
    return filled(empty, jnp.asarray(fill.slot), jnp.asarray(fill.tokens), jnp.asarray(fill.bias))


def asking(count: int, scored: tuple[int, ...] = (), **values: Any) -> ExtendedRows:
    """Returns rows of slot 0, all adjusted, neutral except for what is given."""
    defaults: dict[str, Any] = {
        "slot": 0, "is_adjusted": True, "is_biased": True, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "min_tokens": 0, "target": NO_TARGET, "draft": NO_DRAFT,
    }  # fmt: skip
    arrays = {}
    for name, default in defaults.items():
        dtype = {bool: jnp.bool_, int: jnp.int32, float: jnp.float32}[type(default)]
        arrays[name] = jnp.broadcast_to(jnp.asarray(values.get(name, default), dtype), count)
    return ExtendedRows(is_scored=jnp.isin(jnp.arange(count), jnp.asarray(scored, jnp.int32)), **arrays)


def index(count: int, value: int = 0) -> jax.Array:
    return jnp.full(count, value, jnp.int32)


adjusted = jax.jit(lambda scores, rows, state, places: adjust(scores, rows, state, places, seen_drafts(rows)))


def sample_by(scores: Any, *rest: Any, **options: Any) -> Any:
    return sample_extended(lambda order: scores[order], *rest, **options)


sampled = jax.jit(sample_by)


def test_penalties_are_those_of_transformers_and_openai() -> None:
    scores, prompt, output = logits(3), [4, 5, 5], [6, 6, 7]
    state = state_of(2, prompt=prompt, generated=output, stops=[9])
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.3}
    asked = asking(3, slot=2, is_adjusted=[True, True, False], is_biased=False, min_tokens=[3, 4, 4], **penalties)
    ours = np.array(adjusted(scores, asked, state, index(3, 3)))

    history = torch.tensor([prompt + output] * 3)
    expected = RepetitionPenaltyLogitsProcessor(1.5)(history, torch.tensor(scores)).numpy().copy()
    expected[:, 6] -= 0.7 + 2 * 0.3
    expected[:, 7] -= 0.7 + 0.3
    expected[1, 9] = NEVER
    np.testing.assert_allclose(ours[:2], expected[:2], atol=1e-5)
    np.testing.assert_array_equal(ours[2], scores[2])  # did not ask


def test_what_a_row_samples_counts_for_what_it_samples_next() -> None:
    """Several steps on the device give the state that the host would make of all tokens."""
    scores, state = logits(4) * 0.3, state_of(0, prompt=[4])
    for slot in (1, 2):
        fill = slot_fill(geometry(), slot, prompt=[4], generated=[], stops=(), bias={}, allowed=(), bad=())
        state = filled(state, jnp.int32(slot), jnp.asarray(fill.tokens), jnp.asarray(fill.bias))
    asked = asking(4, slot=[2, 0, 1, 0], is_adjusted=[True, True, True, False], frequency_penalty=[0.5, 0.5, 0.0, 0.5])
    drawn = []
    for step in range(12):
        token_ids, _, state = sampled(scores, rows(4, output_index=step), asked, state)
        drawn.append(np.asarray(token_ids))
    for place, slot in ((0, 2), (1, 0)):
        generated = [int(tokens[place]) for tokens in drawn]
        expected = slot_fill(geometry(), slot, prompt=[4], generated=generated, stops=(), bias={}, allowed=(), bad=())
        np.testing.assert_array_equal(state.tokens[slot], expected.tokens)
    assert np.asarray(state.tokens[1]).sum() == IN_PROMPT  # no penalty, nothing counted


@pytest.mark.parametrize("no_token", [NOT_A_TOKEN, NOTHING_LEFT])
def test_a_row_that_broke_down_counts_nothing(no_token: int) -> None:
    state = state_of(0, prompt=[4, 5])
    after = counted(state, jnp.asarray([0, 0]), jnp.asarray([no_token, VOCAB - 1]), jnp.asarray([True, False]))
    np.testing.assert_array_equal(after.tokens, state.tokens)


def test_no_count_outgrows_its_word() -> None:
    of = geometry(max_model_len=100_000)
    fill = slot_fill(of, 0, [], [7] * 100_000, stops=(7,), bias={}, allowed=(), bad=())
    assert fill.tokens[7] // GENERATED == 100_000
    arrays = sampling_state(of, jnp.zeros)
    assert state_bytes(of) == arrays.tokens.nbytes + arrays.bias.nbytes == NUM_SLOTS * 2 * 4 * 128


def test_a_list_of_allowed_tokens_may_be_as_long_as_the_vocabulary() -> None:
    vocab = 5000
    scores = np.random.default_rng(0).normal(size=(50, vocab)).astype(np.float32)
    allowed = tuple(range(0, vocab, 2))
    state = state_of(0, vocab, allowed=allowed, bad=(0, 2), bias={4: 100.0, 5: 100.0, 2: 100.0})
    ours = np.asarray(adjusted(scores, asking(50), state, index(50)))
    assert set(np.flatnonzero(ours[0] > NEVER)) == set(allowed) - {0, 2}
    assert (np.asarray(draw(ours, rows(50))) == 4).all()


@pytest.mark.parametrize("scale", [1.0, 1e20, 3e37])
def test_no_bias_and_no_penalty_outbids_what_is_forbidden(scale: float) -> None:
    most = MAX_LOGIT_BIAS
    scores = np.abs(logits(200)) * np.float32(-scale)  # the tokens that are allowed are as unlikely as can be
    scores[:, [3, 4, 5]] = scale
    bad = state_of(0, prompt=[6] * 9, stops=(4, 5), bias={3: most, 4: most}, bad=(3,))
    ours = np.asarray(adjusted(scores, asking(200, min_tokens=1), bad, index(200)))
    assert (ours[:, [3, 4, 5]] == NEVER).all()
    assert (np.delete(ours, [3, 4, 5], axis=1) > NEVER).all()
    restricted = state_of(0, prompt=[8, 9], bias={3: most, 8: -most, 9: -most}, allowed=(8, 9))
    ours = adjusted(scores, asking(200, repetition_penalty=1e-40), restricted, index(200))
    for values in KINDS.values():
        assert set(np.asarray(draw(ours, rows(200, **values)))) <= {8, 9}


def test_where_all_is_forbidden_nothing_is_drawn() -> None:
    blocked = state_of(0, allowed=(7,), stops=(7,))
    for values in KINDS.values():
        drawn = draw(adjusted(logits(3), asking(3, min_tokens=5), blocked, index(3, 4)), rows(3, **values))
        assert (np.asarray(drawn) == NOTHING_LEFT).all()


def test_a_token_without_a_chance_is_not_drawn_for_being_the_only_one_allowed() -> None:
    scores = logits(4)
    scores[:, 7] = -np.inf
    ours = adjusted(scores, asking(4), state_of(0, allowed=(7,)), index(4))
    assert (np.asarray(draw(ours, rows(4))) == NOTHING_LEFT).all()


@pytest.mark.parametrize("vocab", [31, 32, 60, 8192])
def test_a_mask_lets_through_what_its_bits_say(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    scores = rng.normal(size=(3, vocab)).astype(np.float32)
    may = rng.random((3, vocab)) < 0.3
    padded = np.pad(may, ((0, 0), (0, -vocab % 32)))
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    np.testing.assert_array_equal(
        masked(jnp.asarray(scores), jnp.asarray(words)), np.where(may, scores, np.float32(NEVER))
    )


def test_a_row_with_a_target_gives_it_and_scores_it() -> None:
    scores = logits(4)
    scores[3, 9] = np.nan
    asked = asking(4, (1, 3), is_adjusted=False, is_biased=False, target=[NO_TARGET, 17, NO_TARGET, 5])
    token_ids, logprobs, _ = sampled(scores, rows(4, temperature=0.0), asked, state_of())
    assert token_ids.tolist() == [scores[0].argmax(), 17, scores[2].argmax(), NOT_A_TOKEN]
    expected = scores[1] - np.log(np.exp(scores[1]).sum())
    np.testing.assert_allclose(logprobs.sampled[1], expected[17], atol=1e-5)
    np.testing.assert_allclose(logprobs.top[1, 0], expected.max(), atol=1e-5)


score = jax.jit(logprobs_of)


def scored(scores: np.ndarray, token_ids: list[int], places: list[int]) -> Logprobs:
    found: Logprobs = score(
        scores, jnp.asarray(token_ids), jnp.isin(jnp.arange(len(scores)), jnp.asarray(places, jnp.int32))
    )
    return found


@pytest.mark.parametrize("vocab", [8, 60, 128, 2561, 8192])
def test_logprobs_are_normalised_and_in_order(vocab: int) -> None:
    scores = np.random.default_rng(0).normal(size=(4, vocab)).astype(np.float32) * 2
    found = scored(scores, [0, 1, 2, 3], [0, 1, 2, 3])
    expected = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.sampled, expected[np.arange(4), np.arange(4)], atol=1e-5)
    order = np.argsort(-expected, axis=-1)[:, : min(20, vocab)]
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order, axis=-1), atol=1e-5)


def test_of_equal_logits_the_first_tokens_are_the_most_likely() -> None:
    scores = np.zeros((1, 8192), np.float32)
    scores[0, [5000, 300, 4000]] = 1.0
    np.testing.assert_array_equal(scored(scores, [0], [0]).top_ids[0], [300, 4000, 5000, *range(17)])


def test_rows_that_do_not_ask_get_no_logprobs() -> None:
    found = scored(logits(5), [1] * 5, [3, 1])
    assert (np.asarray(found.sampled) != 0).tolist() == [False, True, False, True, False]
    assert not scored(logits(5), [1] * 5, []).top.any()


@pytest.mark.parametrize("platform", ["cpu", "cuda", pytest.param("tpu", marks=needs_libtpu)])
def test_a_step_has_one_scatter_at_most_and_no_loop_over_rows_on_cuda(platform: str) -> None:
    """Each scatter takes the TPU's compiler many seconds; a CUDA graph can hold branches, but no loops."""
    arguments: Any = (logits(4), rows(4), asking(4), state_of(), jnp.zeros((4, 2), jnp.int32))
    platforms: tuple[str, ...] = (platform,)
    if platform == "tpu":  # its kernel asks which one
        sharding = SingleDeviceSharding(devices_of("v5e:1x1")[0])
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
        platforms = ()
    sample = partial(sample_by, form=Form.on(platform, is_native=False))
    text = jax.jit(sample).trace(*arguments).lower(lowering_platforms=platforms or None).as_text()
    assert ("stablehlo.while" in text) == (platform == "cpu")
    assert text.count('"stablehlo.scatter"(') == 1


def test_the_rows_that_ask_give_the_same_some_at_a_time_as_all_at_once_and_beside_padding() -> None:
    """Wherever they are in a step, and whatever the other rows are: drafts, masks, targets, greedy rows and filters.

    The padding of the vocabulary is larger than any logit.
    """
    count = 24
    rng = np.random.default_rng(3)
    state = state_of(2, prompt=[4, 5], generated=[6, 6], stops=(9,), bias={7: 3.0, 11: -2.0}, bad=(3,))
    drafts = np.full(count, NO_DRAFT)
    drafts[[9, 10, 11, 12]] = [7, 7, 6, 8]
    masks = rng.integers(-(2**31), 2**31, (count, -(-VOCAB // 32)), np.int32)
    masks[rng.random(count) < 0.8] = -1
    is_adjusted = np.isin(np.arange(count), [1, 2, *range(8, 13), 20])
    asked = asking(
        count, (0, 9, 15), slot=np.where(is_adjusted, 2, 0), is_adjusted=is_adjusted, is_biased=rng.random(count) < 0.3,
        repetition_penalty=1.3, frequency_penalty=0.4, draft=drafts, target=[17, *[NO_TARGET] * (count - 1)],
    )  # fmt: skip
    kinds = rows(count, temperature=rng.choice([0.0, 0.9], count), top_p=0.9, top_k=7, output_index=np.arange(count))
    given = logits(count), kinds, asked, state, masks
    some, whole = (jax.jit(partial(sample_by, form=form))(*given) for form in (Form.XLA, Form.GPU))
    padded = jax.jit(sample_by)(np.pad(given[0], ((0, 0), (0, 68)), constant_values=np.inf), *given[1:])
    for one, *others in zip(*map(jax.tree.leaves, (some, whole, padded)), strict=True):
        for other in others:
            np.testing.assert_array_equal(one, other)
    plain = np.asarray(draw(given[0], kinds))
    is_plain = ~np.asarray(asked.asks) & (masks == -1).all(axis=1)
    assert 3 < is_plain.sum() < count - 8
    np.testing.assert_array_equal(np.asarray(some[0])[is_plain], plain[is_plain])
