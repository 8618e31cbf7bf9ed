"""Several decode steps in one dispatch give what single steps give, and end when they should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import ConfigError, Engine, EngineConfig, Request, SamplingParams, TokenLogprob
from penstock.engine.deployment.deployment import Deployment
from penstock.engine.execution.packing import Batch
from penstock.engine.execution.runner import InFlight
from tests.engine.engines import SMALL, VOCAB_SIZE, all_pages_are_free, drive, forget_prefixes, preempt_all

pytestmark = pytest.mark.usefixtures("as_shipped")

STEPS = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "logprobs": 2},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4, "min_tokens": 1},
    {"logprobs": 5},
    {"logit_bias": {7: 5.0, 11: -3.0}, "bad_token_ids": tuple(range(100, 140))},
    {"allowed_token_ids": tuple(range(0, 260, 2)), "frequency_penalty": 0.1},
]
"""Options that each change tokens, because greedy sampling soon repeats itself."""


@pytest.fixture(scope="session")
def looping_engine(tiny_model: Path) -> Engine:
    engine = Engine.from_checkpoint(tiny_model, replace(SMALL, decode_steps=STEPS))
    engine.warm_up()
    return engine


def traffic(count: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            f"r{seed}-{i}",
            tuple(map(int, rng.integers(0, VOCAB_SIZE, rng.integers(1, 30)))),
            SamplingParams(
                temperature=float(i % 2),
                max_tokens=int(rng.integers(1, 40)),
                stop_token_ids=tuple(map(int, rng.integers(0, 250, 20))) if i % 3 == 0 else (),
                stop=("a", "zz") if i % 4 == 0 else (),
                **OPTIONS[i % len(OPTIONS)],
            ),
            n=1 + (i % 5 == 4),
        )
        for i in range(count)
    ]


def top_of(logprob: TokenLogprob) -> dict[int, float]:
    return {top.token_id: top.logprob for top in logprob.top}


@pytest.mark.parametrize("count", [1, 3, 12])
def test_outputs_equal_those_of_single_steps(engine: Engine, looping_engine: Engine, count: int) -> None:
    requests = traffic(count, seed=count)
    expected = drive(engine, requests)
    before = looping_engine.stats()
    results = drive(looping_engine, requests)
    for key, result in results.items():
        assert result.token_ids == expected[key].token_ids
        assert (result.text, result.finish_reason) == (expected[key].text, expected[key].finish_reason)
        for mine, theirs in zip(result.logprobs, expected[key].logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert top_of(mine) == pytest.approx(top_of(theirs), abs=1e-4)
    after = looping_engine.stats()
    assert after.compiles_after_warmup_total == before.compiles_after_warmup_total  # others compile in this process
    assert after.generated_tokens_total - before.generated_tokens_total == sum(
        len(r.token_ids) for r in results.values()
    )


def test_with_few_shapes_a_loop_has_its_own_bucket(
    engine: Engine, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On TPU, the head with all options is compiled for every second bucket."""
    geometry = Deployment.geometry
    monkeypatch.setattr(Deployment, "geometry", lambda self, size: replace(geometry(self, size), few_shapes=True))
    config = replace(SMALL, decode_steps=STEPS, max_num_seqs=20, max_batch_tokens=32, num_pages=128)
    few = Engine.from_checkpoint(tiny_model, config)
    few.warm_up()
    assert few._runner.geometry.extended_row_buckets == (32,)
    requests = traffic(12, seed=7)
    expected, results = drive(engine, requests), drive(few, requests)
    assert {key: result.token_ids for key, result in results.items()} == {
        key: result.token_ids for key, result in expected.items()
    }
    assert (few.stats().faults_total, few.stats().compiles_after_warmup_total) == (0, 0)


def test_a_lone_request_takes_a_fraction_of_the_dispatches(looping_engine: Engine) -> None:
    before = looping_engine.stats().steps_total
    params = SamplingParams(max_tokens=41, ignore_eos=True, repetition_penalty=1.1, logprobs=2)
    drive(looping_engine, [Request("r", (1, 2, 3), params)])
    assert looping_engine.stats().steps_total - before <= 1 + 40 / STEPS + 1


@pytest.mark.parametrize("at", range(1, 9))
def test_preempted_and_aborted_in_flight(engine: Engine, looping_engine: Engine, at: int) -> None:
    kept = Request("kept", (5, 6, 7), SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True))
    expected = drive(engine, [kept])["kept", 0]

    def disturb(step: int) -> None:
        if step == at:
            looping_engine.abort("other", "cancelled")
            preempt_all(looping_engine)

    other = Request("other", (8, 9), SamplingParams(max_tokens=60, ignore_eos=True))
    results = drive(looping_engine, [kept, other], before_step=disturb)
    assert results["kept", 0].token_ids == expected.token_ids
    assert results["other", 0].finish_reason == "cancelled"
    assert all_pages_are_free(looping_engine)


def test_what_ended_a_reply_at_the_end_of_a_page_is_computed_by_whoever_goes_on(
    engine: Engine, looping_engine: Engine
) -> None:
    """No step of the loop computes the last token, so a page that it fills must not be found."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    prompt = (5, 6, 7)
    reply = drive(engine, [Request("r", prompt, params)])["r", 0].token_ids
    ends = [place for place, token in enumerate(reply) if token not in reply[:place]]
    pages = {(len(prompt) + 1 + place) % looping_engine._pool.page_size for place in ends}
    assert len(pages) == looping_engine._pool.page_size
    for place in ends:
        forget_prefixes(looping_engine)
        stopping = Request("stopping", prompt, replace(params, stop_token_ids=(reply[place],)))
        drive(looping_engine, [stopping])
        scored = SamplingParams(temperature=0.0, max_tokens=5, logprobs=1)
        following = Request("following", (*prompt, *reply[: place + 1], 9), scored)
        found = drive(looping_engine, [following])["following", 0]
        forget_prefixes(looping_engine)
        fresh = drive(looping_engine, [following])["following", 0]
        assert found.num_cached >= 4 * (place // 4)
        assert found.token_ids == fresh.token_ids
        ours, theirs = ([token.logprob for token in result.logprobs] for result in (found, fresh))
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_request_that_comes_meanwhile_is_taken_on_after_one_dispatch(looping_engine: Engine) -> None:
    looping_engine.add(Request("long", (1, 2), SamplingParams(max_tokens=90, ignore_eos=True)))
    for _ in range(3):
        looping_engine.step()
    looping_engine.add(Request("new", (3, 4), SamplingParams(max_tokens=2, ignore_eos=True)))
    outputs = [output for _ in range(2) for output in looping_engine.step()]
    assert "new" in {output.request_id for output in outputs}
    looping_engine.abort("long")
    while looping_engine.has_work():
        looping_engine.step()


def test_the_device_stops_early_when_every_row_has_ended(looping_engine: Engine) -> None:
    request = Request("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    stop = drive(looping_engine, [request])["r", 0].token_ids[2]
    seen: list[np.ndarray] = []
    real = looping_engine._runner._run_loop

    def watch(batch: Batch, stops: np.ndarray) -> InFlight:
        in_flight = real(batch, stops)
        seen.append(np.asarray(in_flight._tokens)[:, 0])
        return in_flight

    looping_engine._runner._run_loop = watch  # type: ignore[method-assign]
    try:
        stopping = replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,)))
        assert drive(looping_engine, [stopping])["r", 0].finish_reason == "stop"
    finally:
        looping_engine._runner._run_loop = real  # type: ignore[method-assign]
    ended = next(tokens for tokens in seen if stop in tokens)
    assert not ended[list(ended).index(stop) + 1 :].any()


@pytest.mark.parametrize("steps", [0, 128])
def test_a_number_of_steps_out_of_range_is_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=f"not {steps}"):
        EngineConfig(decode_steps=steps)
