"""Log-probabilities of a prompt's own tokens equal the reference, whatever happens while they are computed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from penstock.engine import Engine, Output, Request, SamplingParams, TokenLogprob
from penstock.engine.execution.runner import InFlight
from penstock.engine.execution.sampling_rows import NOT_A_TOKEN
from penstock.engine.scheduling.pace import Pace
from tests.engine.checkpoints import reference_logits
from tests.engine.engines import SMALL, VOCAB_SIZE, drive, forget_prefixes, preempt_all

TOP = 3
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=TOP)
PLAIN = replace(PARAMS, prompt_logprobs=None)


def some_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(map(int, np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)))


PROMPT = some_prompt(40)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    """Log-probabilities of every token behind each token of a prompt, f32 [num_tokens, vocab]."""

    def compute(prompt: tuple[int, ...]) -> np.ndarray:
        logits = reference_logits(tiny_model, list(prompt)).astype(np.float64)
        logprobs: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return logprobs

    return compute


def check(
    found: tuple[TokenLogprob | None, ...], prompt: tuple[int, ...], expected: np.ndarray, engine: Engine
) -> None:
    assert len(found) == len(prompt)
    assert found[0] is None
    for place, entry in enumerate(found[1:], start=1):
        assert entry is not None
        before = expected[place - 1]
        assert entry.token_id == prompt[place]
        assert (entry.token, entry.bytes) == engine.tokenizer.spell(prompt[place])
        assert entry.logprob == pytest.approx(before[prompt[place]], abs=2e-4)
        assert [top.logprob for top in entry.top] == pytest.approx(sorted(before)[::-1][:TOP], abs=2e-4)
        assert [before[top.token_id] for top in entry.top] == pytest.approx(
            [top.logprob for top in entry.top], abs=2e-4
        )


def run(engine: Engine, *requests: Request, before_step: Any = lambda step: None) -> list[Output]:
    """Returns all outputs that have tokens or an end; `drive` checks that tokens and ends are in order."""
    outputs: list[Output] = []
    real = engine.step

    def step() -> list[Output]:
        new = real()
        outputs.extend(output for output in new if output.prefill is None)
        return new

    engine.step = step  # type: ignore[method-assign]
    try:
        drive(engine, requests, before_step=before_step)
    finally:
        del engine.step
    return outputs


def of_prompt(outputs: list[Output], request_id: str = "r") -> tuple[TokenLogprob | None, ...]:
    """Returns the log-probabilities of a prompt. They come once, with the first token of the first choice."""
    found = [output for output in outputs if output.prompt_logprobs is not None and output.request_id == request_id]
    assert [(output.index, output.offset, len(output.token_ids)) for output in found] == [(0, 0, 1)]
    assert found[0].prompt_logprobs is not None
    return found[0].prompt_logprobs


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40, 91])
def test_they_are_those_of_the_reference(engine: Engine, reference: Any, length: int) -> None:
    prompt = some_prompt(length)
    check(of_prompt(run(engine, Request("r", prompt, PARAMS))), prompt, reference(prompt), engine)


def test_options_of_sampling_do_not_touch_them(engine: Engine, reference: Any) -> None:
    params = replace(
        PARAMS,
        temperature=2.0,
        seed=3,
        repetition_penalty=1.7,
        frequency_penalty=1.0,
        logit_bias={5: 50.0},
        allowed_token_ids=(7, 8, 9),
        logprobs=2,
        min_tokens=3,
    )
    outputs = run(engine, Request("r", PROMPT, params))
    check(of_prompt(outputs), PROMPT, reference(PROMPT), engine)
    alone = run(engine, Request("r", PROMPT, replace(params, prompt_logprobs=None)))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    for mine, theirs in zip(outputs, alone, strict=True):
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        assert mine.logprobs[0].logprob == pytest.approx(theirs.logprobs[0].logprob, abs=1e-4)


def test_a_prompt_that_others_have_in_the_cache_is_computed(engine: Engine, reference: Any) -> None:
    run(engine, Request("first", PROMPT, PLAIN))
    outputs = run(engine, Request("r", PROMPT, PARAMS, n=2), Request("s", PROMPT, PLAIN))
    check(of_prompt(outputs), PROMPT, reference(PROMPT), engine)
    cached = {(output.request_id, output.index): output.num_cached_tokens for output in outputs}
    assert cached == {("r", 0): 0, ("r", 1): 36, ("s", 0): 36}


def test_beside_others_with_fewer_rows_than_tokens(tiny_model: Path, reference: Any) -> None:
    config = replace(SMALL, max_num_seqs=16, max_batch_tokens=64, num_pages=200, decode_steps=4)
    engine = Engine.from_checkpoint(tiny_model, config)
    engine.warm_up()
    plain = [Request(f"p{i}", some_prompt(9 + i, seed=i), replace(PLAIN, max_tokens=20)) for i in range(6)]
    scored = [Request(f"r{i}", some_prompt(60 - i, seed=10 + i), PARAMS, n=2) for i in range(4)]
    expected = {request.id: drive(engine, [request])[request.id, 0].token_ids for request in plain}
    most_rows = 0
    build = engine._builder.build

    def counted(plan: Any) -> Any:
        nonlocal most_rows
        most_rows = max(most_rows, sum(row.num_scored for row in plan.rows))
        return build(plan)

    engine._builder.build = counted  # type: ignore[method-assign]
    outputs = run(engine, *plain[:3], *scored, *plain[3:])
    for request in scored:
        prompt = request.prompt_token_ids
        check(of_prompt(outputs, request.id), prompt, reference(prompt), engine)
    for request in plain:
        tokens = [id_ for output in outputs if output.request_id == request.id for id_ in output.token_ids]
        assert tokens == expected[request.id]
    assert 1 < most_rows <= 16
    assert engine.stats().compiles_after_warmup_total == 0


def test_after_a_preemption_at_every_step(engine: Engine, reference: Any) -> None:
    expected = reference(PROMPT)
    preempted: set[tuple[int, int]] = set()
    for at in range(9):

        def preempt(step: int, at: int = at) -> None:
            if step == at:
                running = engine._scheduler.running
                preempt_all(engine)
                preempted.update((at, sequence.num_scored) for sequence in running)

        outputs = run(engine, Request("r", PROMPT, PARAMS, n=2), before_step=preempt)
        check(of_prompt(outputs), PROMPT, expected, engine)
        forget_prefixes(engine)
    assert {num_scored for _, num_scored in preempted} >= {0, 16, 32, 39}


class LateFailure(InFlight):
    def token_ids(self) -> list[list[int]]:
        raise jax.errors.JaxRuntimeError("INTERNAL: late sabotage")


@pytest.mark.parametrize("at", range(5))
def test_after_a_step_that_failed(engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    real, calls = engine._runner.finish, iter(range(1000))

    def finish(*args: Any) -> InFlight:
        in_flight = real(*args)
        if next(calls) == at:
            in_flight.__class__ = LateFailure
        return in_flight

    monkeypatch.setattr(engine._runner, "finish", finish)
    faults = engine.stats().faults_total
    beside = Request("beside", some_prompt(3), replace(PLAIN, max_tokens=30))  # a request that fails alone is given up
    outputs = run(engine, beside, Request("r", PROMPT, PARAMS), Request("s", PROMPT[::-1], PARAMS))
    assert engine.stats().faults_total == faults + 1
    for name, prompt in (("r", PROMPT), ("s", PROMPT[::-1])):
        check(of_prompt(outputs, name), prompt, reference(prompt), engine)


def test_a_resumed_choice_does_not_repeat_them(engine: Engine, reference: Any) -> None:
    request = Request("r", PROMPT, replace(PARAMS, temperature=1.0, seed=3), n=2)
    whole: dict[int, list[int]] = {0: [], 1: []}
    for output in run(engine, request):
        whole[output.index] += output.token_ids
    for mine in range(6):
        for other in range(6):
            generated = (tuple(whole[0][:mine]), tuple(whole[1][:other]))
            outputs = run(engine, replace(request, generated=generated))
            if mine:
                assert all(output.prompt_logprobs is None for output in outputs)
            else:
                check(of_prompt(outputs), PROMPT, reference(PROMPT), engine)


@pytest.mark.parametrize("is_paced", [False, True])
def test_beside_and_in_a_reply_that_a_grammar_constrains(
    engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch, is_paced: bool
) -> None:
    """Rows that score stand between rows that matchers follow and whose masks they fill."""
    if not is_paced:
        monkeypatch.setattr(engine, "_pace", Pace())
    grammar = engine.grammars.compile(r"start: /(ab|ba|é){6,9}/")
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=30)
    held = Request("held", some_prompt(5), params, grammar=grammar)
    expected = drive(engine, [held])["held", 0]
    assert expected.finish_reason == "stop"
    both = Request("both", PROMPT, replace(params, prompt_logprobs=TOP), n=2, grammar=grammar)
    outputs = run(engine, held, both, Request("r", PROMPT[::-1], PARAMS))
    check(of_prompt(outputs, "both"), PROMPT, reference(PROMPT), engine)
    check(of_prompt(outputs, "r"), PROMPT[::-1], reference(PROMPT[::-1]), engine)
    texts = {(output.request_id, output.index): "" for output in outputs}
    for output in outputs:
        texts[output.request_id, output.index] += output.text
    assert texts["held", 0] == expected.text
    assert all(re.fullmatch("(ab|ba|é){6,9}", texts["both", index]) for index in range(2))


def test_a_request_that_ends_before_its_first_token_has_none(engine: Engine) -> None:
    engine.add(Request("r", PROMPT, PARAMS))
    engine.step()
    engine.step()
    engine.abort("r")
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [(output.finish_reason, output.prompt_logprobs) for output in outputs] == [("cancelled", None)]


def test_a_prompt_inside_which_the_model_breaks_down_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Request("good", some_prompt(9), PLAIN)
    expected = drive(engine, [good])["good", 0].token_ids
    real, calls = engine._runner.finish, iter(range(1000))

    def finish(*args: Any) -> InFlight:
        in_flight = real(*args)
        if next(calls) == 1:
            ids = in_flight.token_ids()
            ids[0][5] = NOT_A_TOKEN
            monkeypatch.setattr(in_flight, "token_ids", lambda: ids)
        return in_flight

    monkeypatch.setattr(engine._runner, "finish", finish)
    results = drive(engine, [Request("bad", PROMPT, PARAMS), good])
    assert (results["bad", 0].finish_reason, results["bad", 0].token_ids) == ("error", [])
    assert results["bad", 0].error == "the model's logits are not finite"
    assert results["good", 0].token_ids == expected
