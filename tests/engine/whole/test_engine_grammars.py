"""Replies under a grammar are always in the grammar, and the same whatever happens beside them."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from penstock.engine import Engine, InvalidRequest, Request, SamplingParams
from penstock.engine.execution.packing import Batch
from penstock.engine.execution.runner import InFlight, Started
from penstock.engine.execution.sampling.masks import MaskBuilder
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Row, StepPlan
from penstock.engine.structured import Grammar, GrammarCompiler, GrammarFailed, Matcher
from penstock.engine.structured import compiler as compiler_module
from penstock.engine.structured import grammar as grammar_module
from penstock.engine.text.vocabulary import vocabulary_of
from tests.engine.engines import (
    EOS,
    SMALL,
    Result,
    Results,
    all_pages_are_free,
    drive,
    forget_prefixes,
    preempt_all,
    write_model,
)

PROMPT = tuple(range(40, 60))
HOT = SamplingParams(temperature=1.5, seed=7, max_tokens=60)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "of": {"enum": ["é", "yy"]}, "on": {"type": "boolean"}},
    "required": ["n", "of", "on"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SOURCES = {
    "a schema": "start: %json " + json.dumps(SCHEMA),
    "Lark": 'start: "[" word ("," word)* "]"\nword: /[a-zé]{2,4}/',
    "a token that is named": 'start: /[0-9]+/ <|start|> "the end" | <|start|> /.{3}/ <|start|>',
    "JSON of llguidance": json.dumps({"grammars": [{"lark_grammar": "start: /(ab|ba|é){6,9}/"}]}),
}
each_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


def request_of(engine: Engine, source: str, name: str = "r", params: SamplingParams = HOT, n: int = 1) -> Request:
    return Request(name, PROMPT, params, n=n, grammar=engine.grammars.compile(source))


def alone(engine: Engine, request: Request) -> list[Result]:
    results = drive(engine, [request])
    forget_prefixes(engine)
    return [results[request.id, index] for index in range(request.n)]


def neighbours(engine: Engine) -> list[Request]:
    plain = [
        Request(f"n{i}", tuple(range(i, 3 * i + 2)), SamplingParams(temperature=i % 2 * 1.0, max_tokens=5 + i))
        for i in range(4)
    ]
    held = [replace(request_of(engine, source), id=source) for source in SOURCES.values()]
    return [*plain, *held, replace(plain[3], id="counts", sampling=replace(HOT, frequency_penalty=0.5, logprobs=2))]


def same(one: Result, other: Result) -> None:
    assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)


# --- what is said follows the grammar ---


def test_replies_are_valid_and_end_where_the_grammar_does(engine: Engine) -> None:
    requests = [request_of(engine, SOURCES["a schema"], f"r{i}", replace(HOT, seed=i)) for i in range(12)]
    results = drive(engine, requests)
    ended = [result for result in results.values() if result.finish_reason == "stop"]
    assert len(ended) >= 6
    assert {result.finish_reason for result in results.values()} <= {"stop", "length"}
    for result in ended:
        jsonschema.validate(json.loads(result.text), SCHEMA)
        assert result.token_ids[-1] == EOS


def test_a_reply_that_a_limit_cuts_off_is_not_repaired(engine: Engine) -> None:
    whole = alone(engine, request_of(engine, SOURCES["a schema"]))[0]
    cut = alone(engine, request_of(engine, SOURCES["a schema"], params=replace(HOT, max_tokens=5)))[0]
    assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:5])
    assert whole.text.startswith(cut.text)


def test_choices_of_one_request_differ_and_each_follows(engine: Engine) -> None:
    results = alone(engine, request_of(engine, SOURCES["Lark"], n=3))
    assert len({tuple(result.token_ids) for result in results}) == 3
    for result in results:
        assert re.fullmatch(r"\[[a-zé]{2,4}(,[a-zé]{2,4})*\]?|\[.*", result.text)
        assert result.finish_reason == "length" or re.fullmatch(r"\[[a-zé]{2,4}(,[a-zé]{2,4})*\]", result.text)


def test_special_tokens_come_only_where_the_grammar_names_them(engine: Engine) -> None:
    start = engine.tokenizer.encode("<|start|>")[0]
    for seed in range(8):
        spelled = alone(engine, request_of(engine, "start: /(.|\\n)*/", params=replace(HOT, seed=seed)))[0]
        assert start not in spelled.token_ids
        named = alone(engine, request_of(engine, SOURCES["a token that is named"], params=replace(HOT, seed=seed)))[0]
        assert start in named.token_ids or named.finish_reason == "length"


def test_the_name_of_a_special_token_as_text_is_text(engine: Engine) -> None:
    result = alone(engine, request_of(engine, 'start: "a <|end|> b <|start|>"'))[0]
    assert (result.text, result.finish_reason) == ("a <|end|> b <|start|>", "stop")
    assert EOS not in result.token_ids[:-1]


# --- the same, whatever happens beside it ---


@each_source
def test_in_company(engine: Engine, source: str) -> None:
    request = request_of(engine, source, n=2)
    expected = alone(engine, request)
    plain = {r.id: alone(engine, r)[0] for r in neighbours(engine)}
    results = drive(engine, [*neighbours(engine)[:2], request, *neighbours(engine)[2:]])
    for index in range(2):
        same(results["r", index], expected[index])
    for name, result in plain.items():
        same(results[name, 0], result)


@each_source
def test_preempted_at_every_step(engine: Engine, source: str) -> None:
    request = request_of(engine, source)
    expected = alone(engine, request)[0]
    for at in range(len(expected.token_ids) + 3):

        def preempt(step: int, at: int = at) -> None:
            if step == at:
                preempt_all(engine)

        forget_prefixes(engine)
        same(drive(engine, [request], before_step=preempt)["r", 0], expected)


@each_source
def test_resumed_from_every_token(engine: Engine, source: str) -> None:
    request = request_of(engine, source)
    expected = alone(engine, request)[0]
    for count in range(len(expected.token_ids) + 1):
        rest = drive(engine, [replace(request, generated=(tuple(expected.token_ids[:count]),))])["r", 0]
        assert rest.token_ids == expected.token_ids[count:]
        assert expected.text.endswith(rest.text)
        assert rest.finish_reason == expected.finish_reason


class Faults:
    """A runner whose next call of one kind fails."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, at: str, number: int) -> None:
        self._at, self._number = at, number
        self.has_failed = False
        self._start, self._finish, self._dispatch = (
            engine._runner.start,
            engine._runner.finish,
            engine._runner.dispatch,
        )
        for name in ("start", "finish", "dispatch"):
            patch.setattr(engine._runner, name, getattr(self, name))

    def start(self, batch: Batch) -> Started:
        self._count("start")
        return self._start(batch)

    def finish(self, started: Started, masks: np.ndarray | None = None) -> InFlight:
        self._count("finish")
        return self._watched(self._finish(started, masks))

    def dispatch(self, batch: Batch) -> InFlight:
        return self._watched(self._dispatch(batch))

    def _watched(self, in_flight: InFlight) -> InFlight:
        read = in_flight.token_ids

        def token_ids() -> list[list[int]]:
            self._count("read")
            return read()

        in_flight.token_ids = token_ids  # type: ignore[method-assign]
        return in_flight

    def _count(self, call: str) -> None:
        self._number -= call == self._at
        if call == self._at and self._number < 0 and not self.has_failed:
            self.has_failed = True
            raise jax.errors.JaxRuntimeError("INTERNAL: sabotage")


@pytest.mark.parametrize("at", ["start", "finish", "read"])
@pytest.mark.parametrize("number", [0, 1, 2, 5, 11])
def test_after_a_failure_of_the_device(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: str, number: int) -> None:
    held = replace(request_of(engine, SOURCES["a schema"], n=2), prompt_token_ids=(1, 2, 3))
    requests = [held, *neighbours(engine)[1:3]]  # all in the first step: a row that fails alone is given up
    expected = drive(engine, requests)
    forget_prefixes(engine)
    faults = Faults(engine, monkeypatch, at, number)
    results = drive(engine, requests)
    assert faults.has_failed
    for key, result in expected.items():
        same(results[key], result)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**63 - 1),
    names=st.lists(st.sampled_from(sorted(SOURCES)), min_size=1, max_size=3),
    preempted=st.sets(st.integers(0, 40), max_size=6),
    aborted=st.integers(0, 40),
    fault=st.tuples(st.sampled_from(["start", "finish", "read"]), st.integers(0, 40)),
)
def test_whatever_happens_at_once(
    engine: Engine, seed: int, names: list[str], preempted: set[int], aborted: int, fault: tuple[str, int]
) -> None:
    params = replace(HOT, seed=seed, frequency_penalty=seed % 3 * 0.5)
    held = [request_of(engine, SOURCES[name], f"h{i}", params, n=1 + i % 2) for i, name in enumerate(names)]
    requests = [*held, *neighbours(engine)[:2], replace(neighbours(engine)[4], id="aborted")]
    expected = drive(engine, requests)
    forget_prefixes(engine)

    def disturb(step: int) -> None:
        if step in preempted:
            preempt_all(engine)
        if step == aborted:
            engine.abort("aborted")

    with pytest.MonkeyPatch.context() as patch:
        Faults(engine, patch, *fault)
        results = drive(engine, requests, before_step=disturb)
    for key, result in expected.items():
        is_given_up = "sabotage" in (results[key].error or "")  # it was in the step that failed, alone
        if key[0] != "aborted" and not is_given_up:
            same(results[key], result)
    assert not engine._masks._matchers
    assert all_pages_are_free(engine)


def test_with_several_steps_in_a_dispatch_for_others(tiny_model: Path) -> None:
    """The others take several steps a dispatch while no row is constrained, and their tokens are the same before and
    after.
    """
    engine = Engine.from_checkpoint(tiny_model, replace(SMALL, decode_steps=4))
    plain = [Request(f"p{i}", (i, 5), replace(HOT, max_tokens=40, ignore_eos=True)) for i in range(2)]
    held = request_of(engine, SOURCES["JSON of llguidance"])
    expected = drive(engine, plain) | drive(engine, [held])
    for delay in range(5):
        forget_prefixes(engine)

        def add(step: int, delay: int = delay) -> None:
            if step == delay:
                engine.add(held)

        results: Results = {key: Result() for key in expected}
        for request in plain:
            engine.add(request)
        for step in range(200):
            add(step)
            for output in engine.step():
                results[output.request_id, output.index].take(output, 0)
        for key, result in expected.items():
            same(results[key], result)


def test_nothing_compiles_after_warm_up(engine: Engine) -> None:
    before = engine.stats().compiles_after_warmup_total
    drive(engine, [*neighbours(engine), request_of(engine, SOURCES["Lark"], n=4)])
    assert engine.stats().compiles_after_warmup_total == before


# --- the order of a step ---


def order_of(engine: Engine, patch: pytest.MonkeyPatch, request: Request) -> list[str]:
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("start", "finish"):
        patch.setattr(engine._runner, name, noted(name, getattr(engine._runner, name)))
    patch.setattr(InFlight, "token_ids", noted("read", InFlight.token_ids))
    patch.setattr(engine, "_advance", noted("text", engine._advance))
    patch.setattr(engine, "_speculation", None)
    drive(engine, [request])
    patch.undo()
    return events


def test_masks_need_the_tokens_before_and_texts_come_after(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    held = order_of(engine, monkeypatch, replace(request_of(engine, 'start: "abcd"'), prompt_token_ids=(1,)))
    assert held[:8] == ["start", "finish", "start", "read", "finish", "text", "start", "read"]
    plain = Request("r", (1,), SamplingParams(max_tokens=3, ignore_eos=True))
    assert order_of(engine, monkeypatch, plain)[:6] == ["start", "finish", "start", "finish", "read", "text"]


def plan_of(sequence: Sequence, num_in_flight: int) -> StepPlan:
    num_known = len(sequence.token_ids)
    row = Row(sequence, num_known - 1 + num_in_flight, 1, 1 - num_in_flight, 1, num_known - sequence.num_prompt)
    return StepPlan((row,), 1)


@pytest.mark.parametrize("last", [EOS, 5, -1])
def test_a_row_that_has_just_ended_has_all_bits(engine: Engine, last: int) -> None:
    """The head runs for that row all the same; with no bit set it would report that no token is left."""
    request = request_of(engine, 'start: "ab"', params=replace(HOT, stop_token_ids=(5,)))
    sequence = Sequence(request, 0, 0)
    masks = MaskBuilder(272, (EOS,))
    (first,) = masks.build(plan_of(sequence, 0), {})
    assert 0 < sum(word.bit_count() for word in first.view(np.uint32).tolist()) < 272
    (second,) = masks.build(plan_of(sequence, 1), {sequence: last})
    assert second.tolist() == [-1] * 9
    assert masks.take_ended() == []


@pytest.mark.parametrize("eos", [(EOS,), (), (999,)])
@pytest.mark.parametrize("size", [256, 257, 287, 288])
def test_masks_are_as_wide_as_the_vocabulary(engine: Engine, size: int, eos: tuple[int, ...]) -> None:
    compiler = GrammarCompiler(lambda: vocabulary_of(engine.tokenizer, size, eos))
    sequence = Sequence(Request("r", (1,), grammar=compiler.compile("start: /a*/")), 0, 0)
    masks = MaskBuilder(size, eos).build(plan_of(sequence, 0), {})
    assert masks.shape == (1, -(-size // 32))
    assert masks.flags.c_contiguous
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    assert {int(id_) for id_ in np.nonzero(bits)[0] if id_ < size} == {64, *(id_ for id_ in eos if id_ < size)}


# --- ends ---


def test_a_complete_grammar_ends_without_a_token_where_none_says_so(tmp_path: Path) -> None:
    engine = Engine.from_checkpoint(write_model(tmp_path, eos_token_id=None), SMALL)
    assert engine.defaults.eos_token_ids == ()
    request = request_of(engine, 'start: "abc" /[0-9]{3}/')
    expected = alone(engine, request)[0]
    assert re.fullmatch("abc[0-9]{3}", expected.text)
    assert expected.finish_reason == "stop"
    for count in range(len(expected.token_ids) + 1):
        rest = drive(engine, [replace(request, generated=(tuple(expected.token_ids[:count]),))])["r", 0]
        assert (rest.token_ids, rest.finish_reason) == (expected.token_ids[count:], "stop")
    open_ended = alone(engine, request_of(engine, "start: /[a-c]*/"))[0]
    assert (open_ended.finish_reason, len(open_ended.token_ids)) == ("length", 60)


def test_a_complete_grammar_ends_without_a_token_that_is_forbidden(engine: Engine) -> None:
    params = replace(HOT, bad_token_ids=(EOS,))
    result = alone(engine, request_of(engine, 'start: "abc"', params=params))[0]
    assert (result.text, result.finish_reason) == ("abc", "stop")
    assert EOS not in result.token_ids


def test_stops_biases_and_bad_tokens_hold_within_a_grammar(engine: Engine) -> None:
    letters = {letter: engine.tokenizer.encode(letter)[0] for letter in "abc"}
    source = "start: /[a-c]{40}/"
    stopped = alone(engine, request_of(engine, source, params=replace(HOT, stop=("ab",))))[0]
    assert stopped.finish_reason == "stop"
    assert "ab" not in stopped.text
    by_token = alone(engine, request_of(engine, source, params=replace(HOT, stop_token_ids=(letters["b"],))))[0]
    assert (by_token.finish_reason, by_token.token_ids[-1]) == ("stop", letters["b"])
    without = alone(engine, request_of(engine, source, params=replace(HOT, bad_token_ids=(letters["a"],))))[0]
    assert set(without.text) == {"b", "c"}
    biased = alone(engine, request_of(engine, source, params=replace(HOT, logit_bias={letters["c"]: 100.0})))[0]
    assert set(biased.text) == {"c"}
    penalised = alone(engine, request_of(engine, source, params=replace(HOT, frequency_penalty=2.0)))[0]
    assert set(penalised.text) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 3}, r"min_tokens \(3\) contradicts the grammar"),
        ({"ignore_eos": True}, r"ignore_eos \(True\) contradicts the grammar"),
        ({"allowed_token_ids": (5, 6)}, r"allowed_token_ids \(2 ids\) contradicts the grammar"),
    ],
)
def test_what_contradicts_a_grammar_is_refused_by_name(engine: Engine, params: dict[str, Any], message: str) -> None:
    request = request_of(engine, 'start: "a"', params=replace(HOT, **params))
    with pytest.raises(InvalidRequest, match=message):
        engine.add(request)
    drive(engine, [replace(request, grammar=None, sampling=replace(request.sampling, max_tokens=4))])


# --- what fails ends alone ---


def failing(patch: pytest.MonkeyPatch, method: str, at: int) -> None:
    real = Matcher.advance

    def advance(self: Matcher, token_ids: list[int]) -> None:
        real(self, token_ids)
        if self.num_tokens >= at and not self.can_end:  # the bad one, by its bad token
            if method == "advance":
                raise GrammarFailed("the reply's grammar failed: sabotage")
            self.state.consume_token(0)  # as a limit that is met in a mask: it is in its error state from here on

    patch.setattr(Matcher, "advance", advance)


@pytest.mark.parametrize("method", ["advance", "fill"])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_matcher_that_fails_ends_its_row_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str, at: int
) -> None:
    others = [request_of(engine, SOURCES["Lark"], n=2), *neighbours(engine)[:2]]
    expected = drive(engine, others)
    bad = request_of(engine, 'start: "abcdefghijk"', "bad", replace(HOT, bad_token_ids=(EOS,)))
    unharmed = alone(engine, bad)[0]
    failing(monkeypatch, method, at)
    monkeypatch.setattr(engine, "_speculation", None)  # it takes several tokens of what is forced at once
    results = drive(engine, [*others, bad])
    for key, result in expected.items():
        same(results[key], result)
    assert results["bad", 0].finish_reason == "error"
    assert "the reply's grammar failed" in (results["bad", 0].error or "")
    assert results["bad", 0].token_ids == unharmed.token_ids[:at]
    assert unharmed.text.startswith(results["bad", 0].text)
    assert not engine._masks._matchers


def test_while_a_hostile_grammar_is_refused_others_go_on(engine: Engine) -> None:
    """Refusing the grammar takes half a second of its own process, which is many steps."""
    plain = neighbours(engine)
    expected = drive(engine, plain)
    forget_prefixes(engine)
    hostile = "start: %json " + json.dumps({"properties": {f"x{i}": {"type": "string"} for i in range(15_000)}})
    is_asked = threading.Event()
    meanwhile = 0

    def count(step: int) -> None:
        nonlocal meanwhile
        meanwhile += not refused.done()

    with ThreadPoolExecutor(1) as threads:

        def ask() -> None:
            is_asked.set()
            engine.grammars.compile(hostile)

        refused = threads.submit(ask)
        is_asked.wait()
        results = drive(engine, plain, before_step=count)
        assert isinstance(refused.exception(), InvalidRequest)
    assert meanwhile > 1
    for key, result in expected.items():
        same(results[key], result)


def test_tokens_of_an_earlier_run_that_the_grammar_does_not_have(engine: Engine) -> None:
    request = replace(request_of(engine, 'start: "ab"'), generated=((200, 201),))
    result = drive(engine, [request])["r", 0]
    assert (result.finish_reason, result.token_ids) == ("error", [])
    assert "doesn't satisfy the grammar" in (result.error or "")


def test_a_sampled_token_is_known_to_the_matcher_before_it_is_text(engine: Engine) -> None:
    """An abort between two steps leaves nothing of a matcher behind."""
    engine.add(request_of(engine, SOURCES["Lark"], n=2))
    for _ in range(6):
        engine.step()
    assert len(engine._masks._matchers) == 2
    engine.abort("r")
    while engine.has_work():
        engine.step()
    assert not engine._masks._matchers


GROWING = "start: /[abc]*a[abc]{18}/ | /[abc]*b[abc]{17}/"  # its lexer has a state for nearly every token


def test_a_lexer_that_is_full_is_renewed_for_the_replies_that_share_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(HOT, max_tokens=70)
    expected = alone(engine, request_of(engine, GROWING, params=params, n=4))
    limits = LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(compiler_module, "LIMITS", limits)
    monkeypatch.setattr(engine.grammars, "_kept", compiler_module._Kept())
    request = request_of(engine, GROWING, params=params, n=4)
    results = [drive(engine, [replace(request, id=f"r{i}")])[f"r{i}", 0] for i in range(4)]
    assert request.grammar is not None
    assert request.grammar._num_renewals > 0
    for result in results:
        same(result, expected[0])
    for index, result in enumerate(alone(engine, request)):
        same(result, expected[index])


def test_long_replies_do_not_fill_each_other_s_lexers_until_one_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(HOT, max_tokens=76, bad_token_ids=(264,))  # it never ends
    expected = alone(engine, request_of(engine, GROWING, params=params, n=4))
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=300, verbose_errors=False))
    monkeypatch.setattr(engine.grammars, "_kept", compiler_module._Kept())
    request = request_of(engine, GROWING, params=params, n=4)
    given: list[int] = []
    original = Grammar.instead_of

    def counted(grammar: Grammar, failed: Matcher) -> Matcher | None:
        given.append(failed.num_lexers)
        return original(grammar, failed)

    monkeypatch.setattr(Grammar, "instead_of", counted)
    for index, result in enumerate(alone(engine, request)):
        same(result, expected[index])
    assert sorted(given) == [1, 1, 1, 1, 2, 2, 2, 2]  # no reply changes its lexer again and again


def test_what_compiles_too_long_to_be_renewed_is_compiled_again_for_the_next_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(HOT, max_tokens=70)
    expected = alone(engine, request_of(engine, GROWING, params=params))[0]
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=300, verbose_errors=False))
    monkeypatch.setattr(grammar_module, "RENEWABLE_S", 0.0)
    monkeypatch.setattr(engine.grammars, "_kept", compiler_module._Kept())
    errors = []
    for seed in range(8):
        request = request_of(engine, GROWING, params=replace(params, seed=seed))
        errors.append(alone(engine, request)[0].error)
        assert request.grammar is not None
        assert request.grammar.is_spent == (errors[-1] is not None)
    assert any("too many states" in error for error in errors if error)
    assert not any(error and after for error, after in itertools.pairwise(errors))
    same(alone(engine, request_of(engine, GROWING, params=params))[0], expected)
    assert engine.grammars._kept._num_bytes == len(GROWING)


def test_a_reply_that_fills_a_lexer_by_itself_ends_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    others = neighbours(engine)
    expected = drive(engine, others)
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=60, verbose_errors=False))
    monkeypatch.setattr(engine.grammars, "_kept", compiler_module._Kept())
    bad = request_of(engine, GROWING, "bad")
    results = drive(engine, [*others, bad])
    assert "too many states" in (results["bad", 0].error or "")
    for key, result in expected.items():
        same(results[key], result)
