"""A request gives the same output alone, in company, preempted at any step, and resumed from any token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import product
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine import Engine, Request, SamplingParams
from tests.engine.engines import EOS, SMALL, VOCAB_SIZE, Result, all_pages_are_free, drive, forget_prefixes, preempt_all

pytestmark = pytest.mark.usefixtures("as_shipped")

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
    assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
    mine, theirs = ([entry.logprob for entry in result.logprobs] for result in (one, other))
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


def alone(engine: Engine, request: Request) -> list[Result]:
    results = drive(engine, [request])
    forget_prefixes(engine)
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
            if step == at:
                preempt_all(engine)
                preempted.add(at)

        forget_prefixes(engine)
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


def spelled(text: str) -> tuple[int, ...]:
    """Returns the tokens of printable ASCII without spaces, with which the byte-level alphabet begins."""
    return tuple(ord(letter) - ord("!") for letter in text)


# Five letters, of which one ends a choice, and short stop strings: choices end early, each at another point and way.
LETTERS = spelled("abcde")
ENDINGS = {
    "a stop string": SamplingParams(stop=("ab", "cad", "bb"), max_tokens=12),
    "a stop token": SamplingParams(stop_token_ids=LETTERS[4:], max_tokens=12),
    "a stop token, not too early": SamplingParams(stop_token_ids=LETTERS[4:], min_tokens=4, max_tokens=12),
    "a stop string or token, included": SamplingParams(
        stop=("ab", "cad", "bb", "de"),
        stop_token_ids=LETTERS[4:],
        max_tokens=12,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    ),
    "the length": SamplingParams(max_tokens=3),
    "any of them": SamplingParams(stop=("dd", "abc"), stop_token_ids=LETTERS[4:], min_tokens=2, max_tokens=7),
}


@dataclass
class Whole:
    """A choice that ran undisturbed, token by token."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # what each token released
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def whole(engine: Engine, request: Request) -> list[Whole]:
    assert not engine.has_work()
    choices = [Whole() for _ in range(request.n)]
    engine.add(request)
    while engine.has_work():
        for output in engine.step():
            choices[output.index].token_ids += output.token_ids
            choices[output.index].texts += [output.text] * len(output.token_ids)
            choices[output.index].finish_reason = output.finish_reason
            choices[output.index].stop_reason = output.stop_reason
    return choices


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 1.0, 5.0]),
    penalties=st.sampled_from([{}, {"repetition_penalty": 1.4}, {"presence_penalty": 0.7, "frequency_penalty": -0.4}]),
    n=st.integers(2, 3),
)
def test_every_choice_resumed_from_any_of_its_tokens(
    engine: Engine, ending: SamplingParams, seed: int, temperature: float, penalties: dict[str, Any], n: int
) -> None:
    params = replace(
        ending, seed=seed, temperature=temperature, allowed_token_ids=LETTERS, ignore_eos=True, **penalties
    )
    request = Request("r", PROMPT, params, n=n, echo="é ab")
    choices = whole(engine, request)
    assert all(choice.texts[0].startswith("é ab") for choice in choices)
    assert all((choice.stop_reason is None) == (choice.finish_reason == "length") for choice in choices)
    counts = list(product(*(range(len(choice.token_ids) + 1) for choice in choices)))
    ends = tuple(len(choice.token_ids) for choice in choices)
    one_ended = [count for count in counts if sum(map(eq, count, ends)) == 1]
    chosen = {ends, *random.Random(seed).sample(counts, min(10, len(counts)))}
    chosen |= set(random.Random(seed).sample(one_ended, min(10, len(one_ended))))
    resumed = {
        f"r{count}": replace(
            request,
            id=f"r{count}",
            generated=tuple(tuple(choice.token_ids[:k]) for choice, k in zip(choices, count, strict=True)),
        )
        for count in chosen
        if any(count)
    }
    results = drive(engine, resumed.values(), limit=1000)
    for count in chosen:
        for index, (choice, done) in enumerate(zip(choices, count, strict=True)):
            if any(count):
                rest = results[f"r{count}", index]
                assert rest.token_ids == choice.token_ids[done:]
                assert "".join(choice.texts[:done]) + rest.text == "".join(choice.texts)
                assert rest.finish_reason == choice.finish_reason
                assert rest.stop_reason == choice.stop_reason
    assert all_pages_are_free(engine)


@pytest.mark.parametrize(
    ("generated", "reasons"),
    [
        (((5, 6, 7), (5,)), ("length", "length")),  # the first has ended, by its length
        (((5,), (5, 6, 7)), ("length", "length")),
        (((5, 6, 7), (5, 6, 7)), ("length", "length")),  # nothing is left to do
        (((5, 8), (5,)), ("stop", "length")),  # by a stop token
        (((5, 8), (8,)), ("stop", "stop")),
        ((spelled("xy"), (5,)), ("stop", "length")),  # by a stop string
        (((5,), spelled("xy")), ("length", "stop")),
        (((5, 6, 7), spelled("xy")), ("length", "stop")),
    ],
)
def test_resumed_with_choices_that_have_ended(
    engine: Engine, generated: tuple[tuple[int, ...], ...], reasons: tuple[str, str]
) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=3,
        stop=("xy",),
        stop_token_ids=(8,),
        bad_token_ids=(8, *spelled("x")),
        ignore_eos=True,
    )
    results = drive(engine, [Request("r", PROMPT, params, n=2, generated=generated), *neighbours(2)])
    assert (results["r", 0].finish_reason, results["r", 1].finish_reason) == reasons
    for index, tokens in enumerate(generated):
        is_over = len(tokens) == 3 or reasons[index] == "stop"
        assert len(results["r", index].token_ids) == (0 if is_over else 3 - len(tokens))
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("include", [False, True], ids=["without what stopped it", "with what stopped it"])
def test_special_tokens_and_echo_after_a_preemption_at_every_step(engine: Engine, include: bool) -> None:
    special = (EOS - 1, EOS)
    params = SamplingParams(
        temperature=5.0,
        seed=4,
        allowed_token_ids=(*LETTERS, *special),
        min_tokens=6,
        max_tokens=40,
        skip_special_tokens=False,
        include_stop_str_in_output=include,
    )
    request = Request("r", PROMPT, params, echo="the prompt: ")
    expected = alone(engine, request)[0]
    *generated, last = expected.token_ids
    assert (expected.finish_reason, expected.stop_reason, last) == ("stop", EOS, EOS)
    spelled_out = b"".join(engine.tokenizer.spell(token_id)[1] for token_id in generated).decode()
    assert expected.text == "the prompt: " + spelled_out + "<|end|>" * include
    assert "<|start|>" in spelled_out
    for at in range(len(expected.token_ids)):

        def preempt(step: int, at: int = at) -> None:
            if step == at:
                preempt_all(engine)

        same(drive(engine, [request], before_step=preempt)["r", 0], expected)


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
