"""Promises of an engine beyond its tokens: limits, ends, failures, shapes, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.engine import Engine, InvalidRequest, PromptTooLong, Request, SamplingParams
from penstock.engine.execution.packing import Batch
from penstock.engine.execution.runner import InFlight
from penstock.engine.execution.sampling_rows import NOTHING_LEFT
from penstock.engine.scheduling.pace import Pace, StepTimes
from penstock.engine.scheduling.slack import StepClock
from tests.engine.engines import EOS, SMALL, VOCAB_SIZE, all_pages_are_free, drive, write_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def some_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(map(int, np.random.default_rng(seed).integers(0, 250, length)))


def tokens_of(engine: Engine, request: Request) -> list[int]:
    return drive(engine, [request])[request.id, 0].token_ids


# --- what is counted ---


def test_tokens_of_prompts_are_counted_once_and_those_looked_up_for_each_choice(engine: Engine) -> None:
    prompt = some_prompt(16)
    drive(engine, [Request("before", prompt, GREEDY)])
    before = engine.stats()
    results = drive(engine, [Request("r", prompt, replace(GREEDY, temperature=1.0), n=2)])
    after = engine.stats()
    assert [results["r", index].num_cached for index in range(2)] == [12, 12]
    names = ("prompt_tokens", "cached_tokens", "prefix_queries", "prefix_hits", "generated_tokens")
    counts = [getattr(after, f"{name}_total") - getattr(before, f"{name}_total") for name in names]
    assert counts == [16, 12, 32, 24, 16]


# --- when a step is planned ---


def test_while_the_device_is_at_a_long_step_the_next_may_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hour_s = dict.fromkeys(engine._runner.geometry.token_buckets, 3600.0)
    monkeypatch.setattr(engine, "_pace", Pace(StepTimes(hour_s, hour_s)))
    monkeypatch.setattr(engine, "_clock", StepClock())  # that of other tests trusts no forecast of these short steps
    assert engine.slack_s() == 0.0
    engine.add(Request("r", some_prompt(5), GREEDY))
    engine.step()
    assert 3000 < engine.slack_s() < 3600
    while engine.has_work():
        engine.step()
    assert engine.slack_s() == 0.0


# --- what is refused ---


def test_what_cannot_be_served_is_refused_and_leaves_nothing(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="the prompt has no tokens"):
        engine.add(Request("r", ()))
    assert not engine.has_work()


def test_what_may_stop_after_its_minimum_is_no_contradiction(engine: Engine) -> None:
    """Only while `min_tokens` forbids stopping would no token be left."""
    request = Request("r", (1,), SamplingParams(temperature=0.0, allowed_token_ids=(EOS,)))
    assert drive(engine, [request])["r", 0].token_ids == [EOS]


def test_a_prompt_of_the_maximum_length_gets_one_token_and_one_longer_is_refused(engine: Engine) -> None:
    limit = engine.max_model_len
    result = drive(engine, [Request("r", some_prompt(limit - 1), GREEDY)])["r", 0]
    assert (len(result.token_ids), result.finish_reason) == (1, "length")
    with pytest.raises(PromptTooLong, match=f"has {limit} tokens; with max_model_len {limit} it can have {limit - 1}"):
        engine.add(Request("r", some_prompt(limit), GREEDY))


def test_an_id_in_use_is_refused(engine: Engine) -> None:
    engine.add(Request("r", (1,), GREEDY))
    with pytest.raises(InvalidRequest, match="'r' is running already"):
        engine.add(Request("r", (1,), GREEDY))


# --- how a sequence ends ---


def test_a_stop_token_ends_without_text_and_min_tokens_holds_it_off(engine: Engine) -> None:
    request = Request("r", some_prompt(9), GREEDY)
    tokens = tokens_of(engine, request)
    stop = tokens[3]
    first = tokens.index(stop)
    stopped = drive(engine, [replace(request, sampling=replace(GREEDY, stop_token_ids=(stop,)))])["r", 0]
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[: first + 1], "stop")
    assert stopped.text == engine.tokenizer.decode(tokens[:first])
    held = drive(engine, [replace(request, sampling=replace(GREEDY, stop_token_ids=(stop,), min_tokens=6))])["r", 0]
    assert stop not in held.token_ids[:6]
    assert len(held.token_ids) >= 6


def test_the_end_of_sequence_token_ends_unless_ignored(engine: Engine) -> None:
    always_eos = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={EOS: 100.0})
    stopped = drive(engine, [Request("r", some_prompt(5), always_eos)])["r", 0]
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == ([EOS], "", "stop")
    ignored = drive(engine, [Request("r", some_prompt(5), replace(always_eos, ignore_eos=True))])["r", 0]
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS] * 5, "length")
    held = drive(engine, [Request("r", some_prompt(5), replace(always_eos, min_tokens=3))])["r", 0]
    assert (held.token_ids.index(EOS), held.finish_reason) == (3, "stop")


def test_a_stop_string_cuts_the_text_and_frees_the_pages_in_the_same_step(engine: Engine) -> None:
    spells = {ord(letter): letter for letter in "abcdefg"}
    ids = {letter: engine.tokenizer.encode(letter)[0] for letter in spells.values()}
    params = SamplingParams(
        temperature=2.0, seed=5, max_tokens=60, allowed_token_ids=tuple(ids.values()), ignore_eos=True
    )
    text = drive(engine, [Request("r", some_prompt(6), params)])["r", 0].text
    stop = text[20:23]
    free_before = engine._pool.num_available
    engine.add(Request("r", some_prompt(6), replace(params, stop=(stop,))))
    joined = ""
    while True:
        outputs = engine.step()
        joined += "".join(output.text for output in outputs)
        if outputs and outputs[-1].finish_reason:
            break
    assert joined == text[: text.index(stop)]
    assert outputs[-1].finish_reason == "stop"
    assert engine._pool.num_available == free_before


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_abort_while_waiting_prefilling_and_decoding(engine: Engine, steps: int) -> None:
    other = Request("other", some_prompt(5, seed=2), GREEDY)
    expected = tokens_of(engine, other)
    engine.add(other)
    engine.add(Request("r", some_prompt(40), GREEDY, n=2))  # three steps of prefill
    outputs = [output for _ in range(steps) for output in engine.step()]
    engine.abort("r", "expired")
    engine.abort("nobody")
    while engine.has_work():
        outputs += engine.step()
        engine._scheduler.check()
    ends = [output for output in outputs if output.request_id == "r" and output.finish_reason]
    assert [(end.index, end.finish_reason) for end in ends] == [(0, "expired"), (1, "expired")]
    assert [token for output in outputs if output.request_id == "other" for token in output.token_ids] == expected
    assert all_pages_are_free(engine)


# --- sampling options, through the whole engine ---


def test_allowed_bad_and_biased_tokens(engine: Engine) -> None:
    params = SamplingParams(temperature=3.0, seed=1, max_tokens=20, ignore_eos=True)
    allowed = tokens_of(engine, Request("r", (5,), replace(params, allowed_token_ids=(7, 8, 9), bad_token_ids=(8,))))
    assert set(allowed) == {7, 9}
    biased = tokens_of(engine, Request("r", (5,), replace(params, logit_bias={11: 100.0})))
    assert set(biased) == {11}


def test_penalties_keep_a_loop_from_repeating(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, allowed_token_ids=tuple(range(20, 40)))
    penalised = tokens_of(engine, Request("r", some_prompt(4), replace(params, frequency_penalty=2.0, logit_bias={})))
    strongly = tokens_of(engine, Request("r", some_prompt(4), replace(params, repetition_penalty=100.0)))
    assert len(penalised) == len(strongly) == 12
    plain = tokens_of(engine, Request("r", some_prompt(4), params))
    assert len(set(strongly)) > len(set(plain))


def test_logprobs_are_those_of_the_distribution(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5)
    result = drive(engine, [Request("r", some_prompt(7), params)])["r", 0]
    assert len(result.logprobs) == 4
    for token_id, entry in zip(result.token_ids, result.logprobs, strict=True):
        assert entry.token_id == entry.top[0].token_id == token_id
        assert (entry.token_id, (entry.token, entry.bytes)) == (token_id, engine.tokenizer.spell(token_id))
        assert all((top.token, top.bytes) == engine.tokenizer.spell(top.token_id) for top in entry.top)
        assert entry.top[0].logprob == pytest.approx(entry.logprob)
        values = [top.logprob for top in entry.top]
        assert values == sorted(values, reverse=True)
        assert sum(np.exp(values)) <= 1.0
    none = drive(engine, [Request("r", some_prompt(7), replace(params, logprobs=None))])["r", 0]
    assert none.logprobs == []
    zero = drive(engine, [Request("r", some_prompt(7), replace(params, logprobs=0))])["r", 0]
    assert [entry.top for entry in zero.logprobs] == [()] * 4


# --- failures ---


class Saboteur:
    """Fails a runner's steps that contain a token of the poisonous prompt."""

    def __init__(self, engine: Engine, poison: int, times: int) -> None:
        self._real = engine._runner.dispatch
        self._poison, self.times = poison, times

    def __call__(self, batch: Batch) -> InFlight:
        if self.times and self._poison in batch.flat[: batch.num_tokens]:
            self.times -= 1
            raise jax.errors.JaxRuntimeError("INTERNAL: sabotage")
        return self._real(batch)


def test_a_request_that_breaks_every_step_is_the_only_one_lost(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    poison = 271
    good = [Request(f"g{i}", some_prompt(10 + i, seed=i), GREEDY) for i in range(3)]
    expected = [tokens_of(engine, request) for request in good]
    monkeypatch.setattr(engine._runner, "dispatch", Saboteur(engine, poison, times=100))
    results = drive(engine, [good[0], good[1], Request("bad", (1, poison, 3), GREEDY), good[2]])
    assert (results["bad", 0].finish_reason, results["bad", 0].token_ids) == ("error", [])
    assert "sabotage" in (results["bad", 0].error or "")
    assert [results[f"g{i}", 0].token_ids for i in range(3)] == expected


def test_logits_that_are_not_finite_end_their_own_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Request("good", some_prompt(9), GREEDY)
    expected = tokens_of(engine, good)
    embedding = next(i for i, array in enumerate(engine._runner._params) if array.shape[0] == VOCAB_SIZE)
    params = list(engine._runner._params)
    params[embedding] = params[embedding].at[271].set(np.nan)
    monkeypatch.setattr(engine._runner, "_params", params)
    engine._runner._watch.start()  # the line above compiled
    results = drive(engine, [Request("bad", (1, 271, 2), GREEDY), good])
    assert (results["bad", 0].finish_reason, results["bad", 0].token_ids) == ("error", [])
    assert results["bad", 0].error == "the model's logits are not finite"
    assert results["good", 0].token_ids == expected


def test_a_row_with_nothing_left_to_sample_ends_its_own_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Request("good", some_prompt(9), GREEDY), Request("bad", (1, 2, 3), GREEDY)
    expected = tokens_of(engine, good)
    real = engine._runner.dispatch

    def dispatch(batch: Batch) -> InFlight:
        """Has the model give minus infinity to every token of the second sequence."""
        step = real(batch)
        ids = [
            [NOTHING_LEFT if place == 1 else token_id for place, token_id in enumerate(row)] for row in step.token_ids()
        ]
        monkeypatch.setattr(step, "token_ids", lambda: ids)
        return step

    monkeypatch.setattr(engine._runner, "dispatch", dispatch)
    results = drive(engine, [good, bad])
    assert (results["bad", 0].finish_reason, results["bad", 0].token_ids) == ("error", [])
    assert "no token is left to sample" in (results["bad", 0].error or "")
    assert results["good", 0].token_ids == expected


@pytest.mark.parametrize(("vocab_size", "max_num_seqs", "attention"), [(512, 4, "xla"), (4096, 16, None)])
def test_a_checkpoint_with_a_nan_in_its_head_gives_no_token(
    tmp_path: Path, vocab_size: int, max_num_seqs: int, attention: str | None
) -> None:
    directory = write_model(tmp_path, vocab_size=vocab_size)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][500] = float("nan")
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = replace(SMALL, max_num_seqs=max_num_seqs, decode_steps=4)
    engine = Engine.from_checkpoint(directory, config if attention is None else replace(config, attention=attention))
    kinds = [GREEDY, replace(GREEDY, temperature=0.8, top_p=0.9), replace(GREEDY, allowed_token_ids=(5, 6))]
    results = drive(engine, [Request(f"r{i}", some_prompt(4, seed=i), kinds[i % 3]) for i in range(9)])
    for result in results.values():
        assert (result.token_ids, result.error) == ([], "the model's logits are not finite")


class LateFailure(InFlight):
    """A step that was dispatched well but whose result is an error, as with asynchronous failures."""

    def token_ids(self) -> list[list[int]]:
        raise jax.errors.JaxRuntimeError("INTERNAL: late sabotage")


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_step_whose_result_fails_is_computed_again(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    requests = [Request(f"g{i}", some_prompt(10, seed=i), GREEDY) for i in range(3)]
    expected = [tokens_of(engine, request) for request in requests]
    real, calls = engine._runner.dispatch, iter(range(1000))

    def dispatch(batch: Batch) -> InFlight:
        step = real(batch)
        return LateFailure(None, None, 0, step._marker) if next(calls) == at else step

    monkeypatch.setattr(engine._runner, "dispatch", dispatch)
    results = drive(engine, requests)
    assert [results[f"g{i}", 0].token_ids for i in range(3)] == expected


def test_a_step_that_fails_once_costs_nobody_anything(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(f"g{i}", (*some_prompt(10, seed=i), 271), GREEDY) for i in range(3)]
    expected = [tokens_of(engine, request) for request in requests]
    faults = engine.stats().faults_total
    monkeypatch.setattr(engine._runner, "dispatch", Saboteur(engine, 271, times=1))
    results = drive(engine, requests)
    assert [results[f"g{i}", 0].token_ids for i in range(3)] == expected
    assert engine.stats().faults_total == faults + 1


# --- shapes and memory ---


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    traffic=st.lists(
        st.tuples(
            st.integers(1, 60),
            st.integers(1, 20),
            st.sampled_from([0.0, 1.0]),
            st.sampled_from([0, 3]),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=10,
    )
)
def test_nothing_compiles_after_warm_up(engine: Engine, traffic: list[tuple[int, int, float, int, int]]) -> None:
    requests = [
        Request(
            f"r{i}",
            some_prompt(length, seed=i),
            SamplingParams(temperature=temperature, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens)),
            n=n,
        )
        for i, (length, max_tokens, temperature, min_tokens, n) in enumerate(traffic)
    ]
    engine._runner.start_watch()  # other tests compile, too
    drive(engine, requests)
    assert engine.stats().compiles_after_warmup_total == 0


def test_the_count_of_compilations_sees_one(engine: Engine) -> None:
    watch = type(engine._runner._watch)()
    watch.start()
    jax.jit(lambda x: x * 3 + 17)(np.arange(5))
    assert watch.count >= 1


@pytest.mark.parametrize("num_tokens", [16])
def test_the_whole_kv_cache_is_donated(engine: Engine, num_tokens: int) -> None:
    compiled = engine._runner.compile_backbone(num_tokens)
    cache_bytes = sum(array.nbytes for array in jax.tree.leaves(engine._runner._cache))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= cache_bytes
    engine._runner._watch.start()  # this test compiled


def test_five_hundred_requests_through_a_pool_far_too_small(tiny_model: Path) -> None:
    engine = Engine.from_checkpoint(tiny_model, replace(SMALL, num_pages=12, max_model_len=40))
    rng = np.random.default_rng(4)
    requests = [
        Request(
            f"r{i}", some_prompt(int(rng.integers(1, 30)), seed=i), replace(GREEDY, max_tokens=int(rng.integers(1, 12)))
        )
        for i in range(500)
    ]
    results = drive(engine, requests)
    assert {result.finish_reason for result in results.values()} == {"length"}
    assert all(len(results[r.id, 0].token_ids) == r.sampling.max_tokens for r in requests)
    assert engine._pool.num_available == 11
