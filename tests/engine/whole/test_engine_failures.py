"""A request over which the engine stumbles ends alone: neighbours, pages and batch slots stay as they were."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import Engine, EngineDriver, Output, Request, SamplingParams
from penstock.engine.choice import ChoiceState
from penstock.engine.execution import packing as packing_module
from penstock.engine.execution.sampling.options import HeadRow
from penstock.engine.logprobs import PromptLogprobs
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.text.detokenizer import Detokenizer
from penstock.engine.text.reply import ReplyStreams
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.engines import (
    EOS,
    SMALL,
    VOCAB_SIZE,
    Results,
    all_pages_are_free,
    drive,
    forget_prefixes,
    outputs_of,
    write_model,
)
from tests.support.patience import WAIT_S

POISON = 200
CLEAN = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True, bad_token_ids=(POISON,))
NEIGHBOURS = [
    Request("one", (1, 2, 3, 4, 5), CLEAN),
    Request("two", tuple(range(30)), replace(CLEAN, temperature=0.0, stop=("zz",), frequency_penalty=0.5), n=2),
]
POISONED = replace(CLEAN, bad_token_ids=(), allowed_token_ids=(POISON,), prompt_logprobs=1)
BAD = Request("bad", tuple(range(60, 70)), POISONED)


class Oops(Exception):
    """An error that nobody expects."""


class StumblingTokenizer:
    """A tokenizer whose detokenizers raise: when they see POISON, or when they are to flush after it."""

    def __init__(self, real: Tokenizer, at: str) -> None:
        self._real, self._at = real, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def detokenizer(self, **options: Any) -> Detokenizer:
        return StumblingDetokenizer(self._real.detokenizer(**options), self._at)


class StumblingDetokenizer:
    def __init__(self, real: Detokenizer, at: str) -> None:
        self._real, self._at = real, at
        self._has_seen = False

    def push(self, token_id: int) -> str:
        self._has_seen |= token_id == POISON
        if self._at == "push" and self._has_seen:
            raise Oops("at push")
        return self._real.push(token_id)

    def flush(self) -> str:
        if self._at == "flush" and self._has_seen:
            raise Oops("at flush")
        return self._real.flush()


def stumble_in_text(engine: Engine, patch: pytest.MonkeyPatch, at: str = "push") -> None:
    streams = ReplyStreams(StumblingTokenizer(engine.tokenizer, at))  # type: ignore[arg-type]
    patch.setattr(engine._new_choices, "_streams", streams)


def stumble_at_the_end_of_text(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    stumble_in_text(engine, patch, "flush")


def stumble_in_planning(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    admit = engine._scheduler._admit

    def stumble(sequence: Sequence, *args: Any) -> int | None:
        if sequence.request.id == BAD.id:
            raise Oops("at planning")
        return admit(sequence, *args)

    patch.setattr(engine._scheduler, "_admit", stumble)


def stumble_in_growing(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Fails a request that already runs, while others of the step have their pages."""
    hold_pages = engine._scheduler._hold_pages

    def make(sequence: Any, num_tokens: int, chosen: Any) -> int:
        if sequence.request.id == "bad" and num_tokens > 12:
            raise Oops("at growing")
        return hold_pages(sequence, num_tokens, chosen)

    patch.setattr(engine._scheduler, "_hold_pages", make)


def stumble_in_packing(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    words = packing_module._sampling_words

    def sampling_words(row: HeadRow) -> tuple[int, ...]:
        if row.row.sequence.request.id == "bad" and row.output_index >= 3:
            raise Oops("at packing")
        return words(row)

    patch.setattr(packing_module, "_sampling_words", sampling_words)


def stumble_in_committing(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    page_hash = Sequence.page_hash

    def hash_of(sequence: Sequence, number: int, page_size: int) -> bytes:
        if POISON in sequence.token_ids[number * page_size : (number + 1) * page_size]:
            raise Oops("at committing")
        return page_hash(sequence, number, page_size)

    patch.setattr(Sequence, "page_hash", hash_of)


def stumble_in_logprobs(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Fails where the host reads what the device sampled."""

    def logprob(choice: Any, *_: Any) -> None:
        if choice._sequence.request.id == "bad":
            raise Oops("at log-probabilities")

    patch.setattr(ChoiceState, "logprob", logprob)


def stumble_in_scoring(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Fails where the log-probabilities of the prompt are read, for the first choice."""
    take = PromptLogprobs.take

    def taken(self: PromptLogprobs, *args: Any) -> None:
        if self._token_ids == BAD.prompt_token_ids:
            raise Oops("at scoring")
        take(self, *args)

    patch.setattr(PromptLogprobs, "take", taken)


STUMBLES = [
    stumble_in_text,
    stumble_at_the_end_of_text,
    stumble_in_planning,
    stumble_in_growing,
    stumble_in_packing,
    stumble_in_committing,
    stumble_in_logprobs,
]
each_stumble = pytest.mark.parametrize("stumble", STUMBLES, ids=lambda stumble: stumble.__name__)


def undisturbed(engine: Engine) -> Results:
    results = drive(engine, NEIGHBOURS)
    forget_prefixes(engine)
    return results


def assert_as_before(engine: Engine, results: Results, expected: Results) -> None:
    for key, result in expected.items():
        assert (results[key].token_ids, results[key].text) == (result.token_ids, result.text)
        assert results[key].finish_reason == result.finish_reason
    assert all_pages_are_free(engine)
    engine._scheduler.check()


def test_a_choice_whose_prompt_cannot_be_scored_ends_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(engine)
    stumble_in_scoring(engine, monkeypatch)
    results = drive(engine, [NEIGHBOURS[0], replace(BAD, n=2), NEIGHBOURS[1]])
    assert_as_before(engine, results, expected)
    assert (results["bad", 0].finish_reason, results["bad", 1].finish_reason) == ("error", "length")
    assert "at scoring" in (results["bad", 0].error or "")


@each_stumble
@pytest.mark.parametrize("n", [1, 2])
def test_a_sequence_that_raises_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stumble: Callable[[Engine, pytest.MonkeyPatch], None], n: int
) -> None:
    expected = undisturbed(engine)
    stumble(engine, monkeypatch)
    results = drive(engine, [NEIGHBOURS[0], replace(BAD, n=n), NEIGHBOURS[1]])
    assert_as_before(engine, results, expected)
    for index in range(n):
        assert results["bad", index].finish_reason == "error"
        assert "Oops: at" in (results["bad", index].error or "")
    monkeypatch.undo()
    again = drive(engine, [*NEIGHBOURS, replace(BAD, n=n)])  # the engine is as good as new
    assert_as_before(engine, again, expected)
    assert again["bad", 0].finish_reason == "length"


@each_stumble
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_is_answered_whatever_raises(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stumble: Callable[[Engine, pytest.MonkeyPatch], None], steps: int
) -> None:
    stumble(engine, monkeypatch)
    engine.add(BAD)
    outputs = [output for _ in range(steps) for output in engine.step()]
    engine.abort("bad")
    while engine.has_work():
        outputs += engine.step()
    engine._scheduler.check()
    assert [output.finish_reason for output in outputs if output.finish_reason] in (["cancelled"], ["error"])
    assert all_pages_are_free(engine)


def test_a_request_that_cannot_be_added_leaves_nothing_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(engine)
    stumble_in_text(engine, monkeypatch)
    resumed = replace(BAD, n=2, generated=((), (POISON,)))  # the second choice raises when the first one is ready
    with pytest.raises(Oops):
        engine.add(resumed)
    assert not engine.has_work()
    assert (engine._sequences, engine._choices) == ({}, {})
    assert_as_before(engine, drive(engine, NEIGHBOURS), expected)


def test_a_salt_that_is_no_text_ends_its_request(engine: Engine) -> None:
    """Planning hashes the salt, and half a character has no bytes: nothing is injected here."""
    expected = undisturbed(engine)
    results = drive(engine, [*NEIGHBOURS, replace(BAD, cache_salt="\ud800", n=2)])
    assert "UnicodeEncodeError" in (results["bad", 0].error or "")
    assert "UnicodeEncodeError" in (results["bad", 1].error or "")
    assert_as_before(engine, results, expected)


def test_planning_that_no_sequence_can_be_blamed_for_raises(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that concerns a whole step ends the engine's thread."""

    def prompt_budget(*_: Any) -> None:
        raise Oops("the pace itself")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._pace), "prompt_budget", prompt_budget)
        engine.add(BAD)
        with pytest.raises(Oops):
            engine.step()
    while engine.has_work():
        engine.step()
    engine._scheduler.check()


async def collect(driver: EngineDriver, request: Request) -> list[Output]:
    async with asyncio.timeout(WAIT_S):
        return [output async for output in outputs_of(driver, request)]


async def test_the_thread_outlives_a_request_that_cannot_be_added(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(engine)
    stumble_in_text(engine, monkeypatch)
    driver = EngineDriver(engine)
    await driver.start()
    resumed = replace(BAD, n=2, generated=((POISON, POISON), (POISON,)))
    beside, failed = await asyncio.gather(collect(driver, NEIGHBOURS[0]), collect(driver, resumed))
    assert [(output.index, output.offset, output.finish_reason) for output in failed] == [
        (0, 2, "error"),
        (1, 1, "error"),
    ]
    assert all(output.error == "the engine failed at this request: Oops: at push" for output in failed)
    assert all(isinstance(output.cause, Oops) for output in failed)
    assert [token for output in beside for token in output.token_ids] == expected["one", 0].token_ids
    assert not driver.is_active("bad")
    again = await collect(driver, NEIGHBOURS[0])
    assert [token for output in again for token in output.token_ids] == expected["one", 0].token_ids
    await driver.stop()
    assert all_pages_are_free(engine)
    engine._scheduler.check()


def test_an_end_id_that_the_model_never_samples_fails_no_step(tmp_path: Path) -> None:
    engine = Engine.from_checkpoint(write_model(tmp_path, eos_token_id=[EOS, VOCAB_SIZE, 5000]), SMALL)
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=3, repetition_penalty=1.2)
    result = drive(engine, [Request("r", (1, 2, 3), params)])["r", 0]
    assert (result.finish_reason, engine.stats().faults_total) == ("length", 0)
    assert engine.defaults.eos_token_ids == (EOS,)
