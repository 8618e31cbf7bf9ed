"""The same request gives the same output: alone, in company, preempted at any step, resumed from any token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import SMALL, VOCAB_SIZE, Result, drive

from penstock.engine import Engine, Request, SamplingParams

PROMPT = tuple(range(40, 60))
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.1, top_p=0.95, top_k=100, seed=7, max_tokens=14, ignore_eos=True),
    "seeded by the id": SamplingParams(temperature=0.9, min_p=0.01, max_tokens=14, ignore_eos=True),
    "penalised, with logprobs": SamplingParams(
        temperature=0.8,
        seed=3,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={50: 2.0},
        bad_token_ids=(41,),
        logprobs=2,
        max_tokens=14,
        min_tokens=5,
        ignore_eos=True,
    ),
}
each_kind = pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)


def same(one: Result, other: Result) -> None:
    assert one.token_ids == other.token_ids
    assert one.text == other.text
    assert one.finish_reason == other.finish_reason
    mine, theirs = ([entry.logprob for entry in result.logprobs] for result in (one, other))
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


def alone(engine: Engine, request: Request) -> list[Result]:
    results = drive(engine, [request])
    engine._pool.forget_contents()
    return [results[request.id, index] for index in range(request.n)]


def neighbours(count: int) -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        Request(
            f"n{i}",
            tuple(map(int, rng.integers(0, VOCAB_SIZE, rng.integers(1, 40)))),
            SamplingParams(temperature=i % 2 * 1.0, max_tokens=int(rng.integers(1, 20))),
        )
        for i in range(count)
    ]


@each_kind
def test_in_company(engine: Engine, params: SamplingParams) -> None:
    request = Request("r", PROMPT, params)
    expected = alone(engine, request)[0]
    same(drive(engine, [*neighbours(3), request, *neighbours(8)[3:]])["r", 0], expected)


@each_kind
def test_preempted_at_every_step(engine: Engine, params: SamplingParams) -> None:
    request = Request("r", PROMPT, params)
    expected = alone(engine, request)[0]
    preempted = set()
    for at in range(18):

        def preempt(step: int, at: int = at) -> None:
            for sequence in engine._scheduler.running if step == at else ():
                engine._scheduler._preempt(sequence)
                preempted.add(at)

        engine._pool.forget_contents()
        same(drive(engine, [request], before_step=preempt)["r", 0], expected)
    assert preempted >= set(range(1, 15))


@each_kind
def test_resumed_from_its_first_tokens(engine: Engine, params: SamplingParams) -> None:
    request = Request("r", PROMPT, params)
    expected = alone(engine, request)[0]
    for count in range(len(expected.token_ids) + 1):
        resumed = replace(request, generated=(tuple(expected.token_ids[:count]),))
        rest = drive(engine, [resumed])["r", 0]
        assert rest.token_ids == expected.token_ids[count:]
        assert expected.text.endswith(rest.text)
        assert rest.finish_reason == expected.finish_reason


def test_text_resumed_at_any_token_joins_to_the_whole(engine: Engine) -> None:
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=30, stop=("zz", "q q"), ignore_eos=True)
    for prompt in (PROMPT, (195, 169), (200, 201, 202)):
        request = Request("r", prompt, params)
        engine.add(request)
        texts: list[str] = []
        tokens: list[int] = []
        while engine.has_work():
            for output in engine.step():
                tokens += output.token_ids
                texts += [output.text] * len(output.token_ids)
        for count in range(1, len(tokens) + 1):
            rest = drive(engine, [replace(request, generated=(tuple(tokens[:count]),))])["r", 0]
            assert "".join(texts[:count]) + rest.text == "".join(texts)


def test_choices_of_one_request_differ_and_each_repeats(engine: Engine) -> None:
    request = Request("r", PROMPT, PARAMS["seeded"], n=3)
    first = alone(engine, request)
    assert len({tuple(result.token_ids) for result in first}) == 3
    for one, other in zip(first, alone(engine, request), strict=True):
        same(one, other)
    partial = tuple(tuple(result.token_ids[:count]) for count, result in zip((0, 5, 14), first, strict=True))
    resumed = drive(engine, [replace(request, generated=partial)])
    for index, (done, whole) in enumerate(zip(partial, first, strict=True)):
        assert list(done) + resumed["r", index].token_ids == whole.token_ids


def test_unseeded_requests_with_other_ids_differ(engine: Engine) -> None:
    results = drive(engine, [Request(f"r{i}", PROMPT, PARAMS["seeded by the id"]) for i in range(3)])
    assert len({tuple(result.token_ids) for result in results.values()}) == 3


def test_a_pool_far_too_small_changes_no_token(engine: Engine, tiny_model: Path) -> None:
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=50, ignore_eos=True)) for r in neighbours(20)]
    expected = {request.id: alone(engine, request)[0] for request in requests}
    small = Engine.from_checkpoint(tiny_model, replace(SMALL, num_pages=26))
    crowded = drive(small, requests)
    assert small.stats().preemptions_total > 0
    for request in requests:
        same(crowded[request.id, 0], expected[request.id])
