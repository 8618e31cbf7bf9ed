"""Speculation changes nothing: the same tokens, texts and log-probabilities with any drafter as with none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drafters import TrueContinuation
from engines import Results, drive
from test_engine_grammars import SOURCES
from test_engine_invariance import ENDINGS, LETTERS, PARAMS, PROMPT, same

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.scheduling.pace import Pace
from penstock.engine.speculation.acceptance import Acceptance

REPEATED = (*PROMPT[:9], *PROMPT[:9], *PROMPT[:4])


def requests_of(engine: Engine) -> dict[str, Request]:
    """Of each kind that sampling distinguishes, two choices of each."""
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
    """An engine that verifies all drafts there are, however often they were wrong."""
    monkeypatch.setattr(Acceptance, "chance", 0.9)
    monkeypatch.setattr(engine, "_pace", Pace())
    monkeypatch.setattr(engine, "_speculation", None)
    return engine


@pytest.fixture(scope="module")
def expected(shared_engine: Engine) -> Results:
    """What all requests give without speculation, one by one."""
    before, shared_engine._speculation = shared_engine._speculation, None
    results: Results = {}
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
    assert drafted > 0
    assert (accepted > 0) == (acceptance > 0)
    assert acceptance < 1 or accepted == drafted
    assert eager._pool.num_available == eager._pool.num_pages - 1
