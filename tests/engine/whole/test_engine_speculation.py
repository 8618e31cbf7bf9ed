"""Speculation changes nothing: tokens, texts and log-probabilities are the same with any drafter and with none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.acceptance import Acceptance
from tests.engine.engines import (
    EOS,
    SMALL,
    Result,
    Results,
    all_pages_are_free,
    drive,
    forget_prefixes,
    preempting,
    write_model,
)
from tests.engine.speculation.drafters import Says, TrueContinuation
from tests.engine.whole.test_engine_grammars import SOURCES
from tests.engine.whole.test_engine_invariance import ENDINGS, LETTERS, PARAMS, PROMPT, same

pytestmark = pytest.mark.usefixtures("as_shipped")

REPEATED = (*PROMPT[:9], *PROMPT[:9], *PROMPT[:4])


def requests_of(engine: Engine) -> dict[str, Request]:
    """Makes a request of each kind that sampling distinguishes, with two choices each."""
    hot = SamplingParams(temperature=1.5, seed=7, max_tokens=40)
    found = {name: Request(name, PROMPT, params, n=2) for name, params in PARAMS.items()}
    for name, params in ENDINGS.items():
        allowed = replace(params, seed=5, allowed_token_ids=LETTERS, ignore_eos=True, frequency_penalty=0.4)
        found[name] = Request(name, REPEATED, allowed, n=2)
    for name, source in SOURCES.items():
        found[name] = Request(name, PROMPT, hot, n=2, grammar=engine.grammars.compile(source))
    penalised = replace(hot, repetition_penalty=1.3, logprobs=2)
    grammar = engine.grammars.compile(SOURCES["a schema"])
    found["all at once"] = Request("all at once", PROMPT, penalised, n=2, grammar=grammar)
    return found


@pytest.fixture
def eager(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that verifies all drafts, however often they were wrong."""
    monkeypatch.setattr(Acceptance, "chance", 0.9)
    monkeypatch.setattr(engine, "_pace", Pace())
    monkeypatch.setattr(engine, "_speculation", None)
    return engine


class Plain(dict[tuple[str, int], Result]):
    """Results with a short repr, where hypothesis reports them."""

    def __repr__(self) -> str:
        return f"the results of {len(self)} choices"


@pytest.fixture(scope="module")
def expected(shared_engine: Engine) -> Results:
    """Results of all requests without speculation, one by one."""
    before, shared_engine._speculation = shared_engine._speculation, None
    results = Plain()
    for request in requests_of(shared_engine).values():
        results |= drive(shared_engine, [request])
    shared_engine._speculation = before
    return results


def replies(results: Results) -> dict[tuple[str, int], list[int]]:
    return {key: result.token_ids for key, result in results.items()}


def num_accepted(engine: Engine) -> int:
    return engine.stats().accepted_tokens_total


def all_same(results: Results, expected: Results) -> None:
    for key, result in results.items():
        same(result, expected[key])


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_alone_and_beside_others(eager: Engine, expected: Results, acceptance: float) -> None:
    eager.speculate(TrueContinuation(replies(expected), acceptance))
    before = eager.stats()
    for request in requests_of(eager).values():
        all_same(drive(eager, [request]), expected)
    all_same(drive(eager, requests_of(eager).values()), expected)
    drafted = eager.stats().drafted_tokens_total - before.drafted_tokens_total
    accepted = eager.stats().accepted_tokens_total - before.accepted_tokens_total
    assert 0 < accepted < drafted  # all drafts are wrong but those that grammars force
    assert accepted > 0.7 * drafted or acceptance < 1
    assert all_pages_are_free(eager)
    assert not eager._speculation._records  # type: ignore[union-attr]


# None: the right token.
HOSTILE: st.SearchStrategy[list[int | None]] = st.lists(st.one_of(st.integers(-3, 300), st.none()), max_size=20)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scripts=st.lists(HOSTILE, min_size=1, max_size=5), every=st.integers(2, 9))
def test_whatever_is_drafted(eager: Engine, expected: Results, scripts: list[list[int | None]], every: int) -> None:
    """Drafts have invalid ids, tokens that end a reply, more than was asked for, and right ones; requests are preempted
    too.
    """

    def says(sequence: Sequence) -> tuple[int, ...]:
        start = len(sequence.token_ids) - sequence.num_prompt
        right = expected[sequence.request.id, sequence.index].token_ids[start:]
        script = scripts[start % len(scripts)]
        right += [EOS] * (len(script) - len(right))
        return tuple(token if said is None else said for said, token in zip(script, right, strict=False))

    eager.speculate(Says(says))
    all_same(drive(eager, requests_of(eager).values(), before_step=preempting(eager, every)), expected)
    assert all_pages_are_free(eager)


def test_resumed_after_each_output(eager: Engine, expected: Results) -> None:
    for name, request in requests_of(eager).items():
        if name == "seeded by the id":
            continue
        whole = [expected[name, index].token_ids for index in range(request.n)]
        resumed = [
            replace(request, id=f"{name} {k}", generated=tuple(tuple(tokens[:k]) for tokens in whole))
            for k in range(1, min(map(len, whole)), 3)
        ]
        rest = {(r.id, i): tokens[len(r.generated[i]) :] for r in resumed for i, tokens in enumerate(whole)}
        eager.speculate(TrueContinuation({(r.id, i): whole[i] for r in resumed for i in range(2)}, 0.8))
        assert replies(drive(eager, resumed)) == rest


def test_the_text_of_a_prompt_is_looked_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine does so by default."""
    monkeypatch.setattr(engine, "_pace", Pace())
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    request = Request("r", REPEATED, params)
    before = engine.stats()
    results = drive(engine, [request])
    after = engine.stats()
    assert (
        after.accepted_tokens_total > before.accepted_tokens_total
    )  # a greedy tiny model says the same again and again
    assert after.steps_total - before.steps_total < 60
    monkeypatch.setattr(engine, "_speculation", None)
    same(drive(engine, [request])["r", 0], results["r", 0])


def test_pages_behind_wrong_drafts_are_not_found_by_others(eager: Engine) -> None:
    """A page can be found once its tokens are known and computed. Wrong drafts fill pages too, for one step."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    request = Request("r", PROMPT, params)
    plain = drive(eager, [request])["r", 0]
    forget_prefixes(eager)
    eager.speculate(Says(lambda sequence: (3, 1, 4, 1, 5, 9, 2, 6)))
    same(drive(eager, [request])["r", 0], plain)
    more = replace(request, prompt_token_ids=(*PROMPT, *plain.token_ids[:20]), sampling=replace(params, max_tokens=10))
    eager.speculate(TrueContinuation({("r", 0): plain.token_ids[20:]}, 0.5))
    result = drive(eager, [more])["r", 0]
    assert result.num_cached >= 36
    assert result.token_ids == plain.token_ids[20:]


def test_windows_that_free_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acceptance, "chance", 0.9)
    path = write_model(tmp_path / "windows", "mistral", sliding_window=7)
    engine = Engine.from_checkpoint(path, replace(SMALL, speculation="off", num_pages=24))
    requests = [
        Request(f"r{i}", PROMPT[i:], SamplingParams(temperature=i % 2, seed=i, max_tokens=40, ignore_eos=True))
        for i in range(4)
    ]
    plain = drive(engine, requests)
    for acceptance in (0.3, 0.8):
        engine.speculate(TrueContinuation(replies(plain), acceptance))
        before = num_accepted(engine)
        all_same(drive(engine, requests), plain)
        assert num_accepted(engine) > before


def test_a_length_that_ends_inside_a_draft(eager: Engine) -> None:
    """No page and no position behind the longest possible sequence is used."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    request = Request("r", PROMPT, params)
    plain = drive(eager, [request])["r", 0]
    assert len(plain.token_ids) == eager.max_model_len - len(PROMPT)
    eager.speculate(TrueContinuation({("r", 0): [*plain.token_ids, 1, 2, 3, 4, 5, 6, 7, 8]}))
    same(drive(eager, [request])["r", 0], plain)


def test_an_abort_while_drafts_are_verified(eager: Engine, expected: Results) -> None:
    eager.speculate(TrueContinuation(replies(expected)))
    request = requests_of(eager)["greedy"]
    drive(eager, [request], before_step=lambda step: eager.abort("greedy") if step == 2 else None)
    assert all_pages_are_free(eager)


def test_a_drafter_that_raises_ends_that_request_alone(eager: Engine, expected: Results) -> None:
    def says(sequence: Sequence) -> tuple[int, ...]:
        if sequence.request.id == "bad":
            raise RuntimeError("no idea")
        return (5, 6)

    eager.speculate(Says(says))
    bad = Request("bad", PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
    results = drive(eager, [bad, requests_of(eager)["greedy"]])
    assert results["bad", 0].error is not None
    assert "no idea" in results["bad", 0].error
    same(results["greedy", 0], expected["greedy", 0])
    same(results["greedy", 1], expected["greedy", 1])


def test_a_step_with_drafts_that_fails_is_run_again(
    eager: Engine, expected: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager.speculate(TrueContinuation(replies(expected), 0.8))
    dispatch, before = eager._runner.dispatch, eager.stats().drafted_tokens_total
    failed: list[object] = []

    def fails_once(batch: object) -> object:
        if not failed and eager.stats().drafted_tokens_total > before:
            failed.append(batch)
            raise RuntimeError("the device stumbles")
        return dispatch(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(eager._runner, "dispatch", fails_once)
    requests = [requests_of(eager)[name] for name in ("greedy", "penalised, with logprobs")]
    all_same(drive(eager, requests), expected)
    assert failed
