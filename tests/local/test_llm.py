"""`LLM` on an engine whose every token is known: order, errors, leaving early, threads, closing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.cli.shared.programs import load_settings
from penstock.engine import ConfigError, EngineConfig, Output, Request
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.setting import declared
from penstock.engine.text.conversation import Conversation, EncodedChat
from penstock.engine.text.fewest_tokens import Check, let_pass
from penstock.local import llm as module
from penstock.local.engine_options import EngineOptions, engine_config
from penstock.local.llm import AHEAD, LLM
from penstock.producer import BulkProgress, GenerateRequest, Message, ReplyTimeout, RequestFailed, RequestRefused
from penstock.producer.request import Prompt
from penstock.tools.chaos.fake_engine import (
    POISON,
    FakeEngine,
    FakeText,
    expected_speech,
    expected_text,
    expected_tokens,
)
from penstock.tools.chaos.fake_words import CALL
from penstock.worker.errors import EngineFailed
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually

NO_DEFAULTS = GenerationDefaults(eos_token_ids=())
UNREAD: dict[str, Any] = {"max_tokens": 10**6}  # what goes on until it is ended


def over(engine: FakeEngine, text: FakeText | None = None) -> LLM:
    return LLM.from_engine(engine, text or FakeText(), NO_DEFAULTS)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def llm(engine: FakeEngine) -> Iterator[LLM]:
    with over(engine) as llm:
        yield llm
        wait_until(lambda: not engine.has_work())  # whatever a test did, the engine is let go


def wait_until(condition: Callable[[], object]) -> None:
    asyncio.run(eventually(condition))


class Breaking(FakeEngine):
    """Fails over prompts that begin with `!`."""

    def enqueue(self, request: Request) -> None:
        if request.prompt_token_ids[:1] == (ord("!"),):
            raise ZeroDivisionError("this prompt breaks it")
        super().enqueue(request)


class BreakingText(FakeText):
    def encode(self, text: str, check: Check = let_pass) -> Sequence[int]:
        if text.startswith("?"):
            raise ZeroDivisionError("this prompt breaks it")
        return super().encode(text, check)


# --- one prompt, many prompts


def test_one_prompt_gives_one_reply(llm: LLM) -> None:
    reply = llm.generate("hello", max_tokens=9, seed=7)
    assert (reply.text, list(reply.tokens)) == (expected_text("hello", 7, 9), expected_tokens(b"hello", 7, 0, 9))
    assert (reply.finish_reason, reply.choices[0].finish_reason) == ("length", "length")
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens, reply.usage.completion_tokens) == (5, 4, 9)
    assert None not in (reply.timings.queued_ms, reply.timings.ttft_ms, reply.timings.total_ms)


@pytest.mark.parametrize(
    "prompt",
    [
        "user:hi",
        list(b"user:hi"),
        tuple(b"user:hi"),
        [{"role": "user", "content": "hi"}],
        [Message(role="user", content="hi")],
        GenerateRequest(prompt="user:hi", seed=1, max_tokens=3),
    ],
    ids=["text", "token ids", "tuple", "messages", "Message", "request"],
)
def test_a_prompt_has_the_forms_of_the_clients(llm: LLM, prompt: Prompt) -> None:
    sampling: dict[str, Any] = {} if isinstance(prompt, GenerateRequest) else {"seed": 1, "max_tokens": 3}
    assert llm.generate(prompt, **sampling).text == expected_text("user:hi", 1, 3)
    (result,) = llm.generate([prompt], **sampling)
    assert (result.index, result.prompt, result.text) == (0, prompt, expected_text("user:hi", 1, 3))
    assert "".join(chunk.text for chunk in llm.stream(prompt, **sampling)) == expected_text("user:hi", 1, 3)


@given(
    st.lists(
        st.tuples(st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=5),
                  st.integers(1, 30), st.integers(1, 3), st.integers(0, 5)),
        max_size=40,
    )
)  # fmt: skip
def test_order_is_kept_whatever_ends_first(drawn: list[tuple[str, int, int, int]]) -> None:
    requests = [GenerateRequest(prompt=text, max_tokens=count, n=n, seed=seed) for text, count, n, seed in drawn]
    with over(FakeEngine(max_num_seqs=3)) as llm:
        results = llm.generate(requests)
    assert [result.index for result in results] == list(range(len(drawn)))
    for result, request, (text, count, n, seed) in zip(results, requests, drawn, strict=True):
        assert result.prompt is request
        assert result.reply is not None
        texts = [choice.text for choice in result.reply.choices]
        assert texts == [expected_text(text, seed, count, index) for index in range(n)]
        assert result.reply.usage.completion_tokens == n * count


def test_no_prompts_give_no_results(llm: LLM) -> None:
    prompts: list[str] = []
    assert llm.generate(prompts) == []
    assert llm.generate(iter(())) == []
    conversations: list[list[Message]] = []
    assert llm.chat(conversations) == []


def test_a_long_list_does_not_pile_up_in_the_engine() -> None:
    engine = FakeEngine(max_num_seqs=4)
    with over(engine) as llm:
        results = llm.generate((f"p{number}" for number in range(300)), max_tokens=3, seed=1)
    assert [result.text for result in results] == [expected_text(f"p{number}", 1, 3) for number in range(300)]
    assert engine.most_rows <= AHEAD * 4


def test_map_reads_prompts_as_it_needs_them(llm: LLM) -> None:
    read: list[int] = []

    def prompts() -> Iterator[str]:
        for number in range(10**9):
            read.append(number)
            yield f"p{number}"

    results = llm.map(prompts(), max_in_flight=2, max_tokens=2, seed=1)
    assert [next(results).text for _ in range(20)] == [expected_text(f"p{number}", 1, 2) for number in range(20)]
    assert len(read) < 60
    assert isinstance(results, Generator)
    results.close()


def test_chat_answers_one_conversation_or_many(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert llm.chat(chat, seed=1, max_tokens=3).text == expected_text("user:hi", 1, 3)
    results = llm.chat([chat, [*chat, {"role": "assistant", "content": "x"}], chat], seed=1, max_tokens=3)
    assert [result.error is None for result in results] == [True, False, True]
    with pytest.raises(RequestRefused, match="the last message must be the user's"):
        results[1].text  # noqa: B018  it raises


@pytest.mark.parametrize("bad", ["hello", ["hello"], [1, 2], [[1, 2]], {"role": "user", "content": "x"}, 7])
def test_chat_takes_nothing_but_messages(llm: LLM, bad: Any) -> None:
    with pytest.raises(TypeError, match="messages"):
        llm.chat(bad)


@pytest.mark.parametrize("bad", [7, None, {"role": "user", "content": "x"}, Message(role="user", content="x")])
def test_what_is_no_prompt_is_named(llm: LLM, bad: Any) -> None:
    with pytest.raises(TypeError, match="a prompt is text, token ids, a list of messages or a GenerateRequest, not "):
        llm.generate(bad)


# --- seeds


def test_without_a_seed_each_call_draws_anew_and_with_one_the_same(llm: LLM) -> None:
    assert llm.generate("x", max_tokens=8).text != llm.generate("x", max_tokens=8).text
    assert llm.generate("x", max_tokens=8, seed=3).text == llm.generate("x", max_tokens=8, seed=3).text
    assert llm.generate("x", max_tokens=8, id="mine").text == expected_text("x", "mine", 8)
    first, second = llm.generate(["x", "x"], max_tokens=8)
    assert first.text != second.text


# --- errors


def test_an_error_in_the_middle_is_that_prompts_alone() -> None:
    prompts = ["a", "", "!", "?", "b"]
    with over(Breaking(), BreakingText()) as llm:
        results = llm.generate(prompts, max_tokens=3, seed=1)
        alone = [error_of(llm, prompt) for prompt in prompts[1:4]]
    assert [results[index].text for index in (0, 4)] == [expected_text(text, 1, 3) for text in "ab"]
    errors = [results[index].error for index in (1, 2, 3)]
    for error, same in zip(errors, alone, strict=True):
        assert type(error) is type(same)
        assert (error.code, error.message) == (same.code, same.message)
    assert [getattr(error, "code", None) for error in errors] == ["invalid_request", "engine_error", "internal_error"]
    assert isinstance(errors[0], RequestRefused)
    for error in errors[1:]:
        assert isinstance(error, RequestFailed)
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert error.reply.finish_reason == "error"


def error_of(llm: LLM, prompt: str) -> RequestRefused | RequestFailed:
    with pytest.raises((RequestRefused, RequestFailed)) as caught:
        llm.generate(prompt, max_tokens=3, seed=1)
    assert isinstance(caught.value, RequestRefused | RequestFailed)
    return caught.value


def test_what_is_wrong_with_all_prompts_is_raised_once(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(RequestRefused, match="temprature"):
        llm.generate(["a", "b"], temprature=0)  # type: ignore[call-overload]
    with pytest.raises(RequestRefused, match="top_p"):
        list(llm.map(["a", "b"], top_p=2))
    with pytest.raises(ValueError, match="one id 'x' can't name many requests"):
        llm.generate(["a", "b"], id="x")
    with pytest.raises(TypeError, match="set seed in the GenerateRequest"):
        llm.generate([GenerateRequest(prompt="a")], seed=1)
    with pytest.raises(TypeError, match="stream takes one prompt"):
        llm.stream(["a", "b"])  # type: ignore[arg-type]
    assert engine.prefilled == []


@pytest.mark.parametrize(
    ("name", "value", "purpose"),
    [
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "a worker's logs"),
        ("tracestate", "a=b", "a worker's traces"),
        ("tenant", "acme", "a worker's logs"),
        ("keep_s", 90.0, "replies in Redis"),
    ],
)
def test_what_only_a_queue_has_is_refused(llm: LLM, name: str, value: Any, purpose: str) -> None:
    with pytest.raises(RequestRefused, match=f"{name} {value} is for {purpose}"):
        llm.generate("x", **{name: value})


def test_an_id_names_one_request_at_a_time(llm: LLM, engine: FakeEngine) -> None:
    engine.hold()
    with ThreadPoolExecutor() as threads:
        chunks = threads.submit(list, llm.stream("x", id="mine", seed=1, max_tokens=50))
        wait_until(lambda: engine.prefilled)
        with pytest.raises(RequestRefused, match="'mine' is running already"):
            llm.generate("y", id="mine")
        engine.allow()
        text = "".join(chunk.text for chunk in chunks.result(WAIT_S))
    assert text == expected_text("x", 1, 50)  # the refusal did not end it


def test_how_far_a_long_prompt_is_is_told_before_the_first_chunk() -> None:
    seen: list[tuple[int, int]] = []
    with (
        over(FakeEngine(prefill_steps=4, step_s=0.05)) as llm,
        llm.stream("abcdefghij", seed=1, max_tokens=3) as stream,
    ):
        stream.on_prefill(lambda prefill: seen.append((prefill.done, prefill.total)))
        assert "".join(chunk.text for chunk in stream) == expected_text("abcdefghij", 1, 3)
    assert seen
    assert set(seen) <= {(2, 10), (4, 10), (6, 10), (8, 10)}
    assert seen == sorted(seen)


def test_an_engine_that_ends_ends_all_calls(engine: FakeEngine) -> None:
    with over(engine) as llm:
        stream = llm.stream("x", **UNREAD)
        next(stream)
        for _ in range(2):  # also when it has ended before
            with pytest.raises(EngineFailed, match="is poison") as caught:
                llm.generate(["y", chr(POISON)])
            assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineFailed, match="is poison"):
            list(stream)


# --- streams


def test_a_stream_brings_the_text_as_it_comes(llm: LLM, engine: FakeEngine) -> None:
    engine.hold()
    engine.allow(1)
    stream = llm.stream("x", seed=1, max_tokens=3, n=2)
    first = [next(stream), next(stream)]
    assert [(chunk.index, chunk.offset, chunk.text) for chunk in first] == [
        (index, 0, expected_text("x", 1, 1, index)) for index in (0, 1)
    ]
    engine.allow()
    rest = list(stream)
    assert stream.reply is not None
    for choice in stream.reply.choices:
        chunks = [chunk for chunk in [*first, *rest] if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in chunks) == choice.text == expected_text("x", 1, 3, choice.index)
        assert chunks[-1].finish_reason == "length"
    assert stream.reply.request_id == stream.request_id


def test_tokens_wait_for_their_text() -> None:
    with over(FakeEngine(holds_back=True)) as llm:
        stream = llm.stream("x", seed=1, max_tokens=20, logprobs=1)
        chunks = list(stream)
    assert all(chunk.text for chunk in chunks)
    assert [token for chunk in chunks for token in chunk.tokens] == expected_tokens(b"x", 1, 0, 20)
    assert stream.reply is not None
    assert stream.reply.choices[0].logprobs is not None
    assert [logprob.id for logprob in stream.reply.choices[0].logprobs] == list(stream.reply.tokens)


def test_reasoning_and_tool_calls_come_apart_from_the_text(llm: LLM) -> None:
    prompt = CALL + "x"
    tokens = expected_tokens(prompt.encode(), 1, 0, 60)
    said = expected_speech(prompt, "mine", tokens, 0)
    stream = llm.stream(prompt, id="mine", seed=1, max_tokens=60)
    chunks = list(stream)
    reply = stream.reply
    assert reply is not None
    for answer in (reply, llm.generate(prompt, id="mine", seed=1, max_tokens=60)):
        assert (answer.text, answer.reasoning) == (said.text, said.reasoning)
        assert len(answer.tool_calls) > 1
        for index, call in enumerate(answer.tool_calls):
            [begin, *_] = deltas = [delta for delta in said.tool_calls if delta.index == index]
            assert (call.id, call.name) == (begin.id, begin.name)
            assert call.arguments == "".join(delta.arguments for delta in deltas)
    assert all(chunk.text or chunk.reasoning or chunk.tool_calls for chunk in chunks)
    assert "".join(chunk.reasoning for chunk in chunks) == said.reasoning
    assert reply.message["tool_calls"][0]["function"]["name"] == reply.tool_calls[0].name


@pytest.mark.parametrize("n", [1, 2])
def test_what_stopped_a_choice_is_told(llm: LLM, n: int) -> None:
    """A token that ends a call or the text stops it: the reason says whether there was a call."""
    called, said = (
        llm.generate(prompt, seed=1, max_tokens=60, n=n, stop_token_ids=expected_tokens(prompt.encode(), 1, 0, 60)[-1:])
        for prompt in (CALL + "x", "x")
    )
    assert (called.finish_reason if n == 1 else called.choices[0].finish_reason) == "tool_calls"
    assert called.choices[0].stop_reason == called.tokens[-1]
    assert (said.choices[0].finish_reason, said.choices[0].stop_reason) == ("stop", said.tokens[-1])
    if n == 2:
        assert (said.choices[1].finish_reason, said.choices[1].stop_reason) == ("length", None)


@pytest.mark.parametrize("leave", ["break", "close", "with"])
def test_leaving_a_stream_early_ends_its_request(llm: LLM, engine: FakeEngine, leave: str) -> None:
    stream = llm.stream("x", id="mine", **UNREAD)
    if leave == "with":
        with stream:
            next(stream)
    else:
        for _ in stream:
            break
    if leave == "close":
        stream.close()
    del stream
    wait_until(lambda: not engine.has_work())
    assert llm.generate("x", id="mine", max_tokens=2).text == expected_text("x", "mine", 2)


def test_streams_and_calls_run_together(llm: LLM) -> None:
    streams = [llm.stream(f"s{number}", seed=1, max_tokens=40) for number in range(3)]
    texts = ["".join(next(stream).text) for stream in streams]
    results = llm.generate(["a", "b"], seed=1, max_tokens=5)
    assert [result.text for result in results] == [expected_text(text, 1, 5) for text in "ab"]
    for number, stream in enumerate(streams):
        whole = texts[number] + "".join(chunk.text for chunk in stream)
        assert whole == expected_text(f"s{number}", 1, 40)


def test_a_stream_keeps_its_llm(engine: FakeEngine) -> None:
    stream = over(engine).stream("x", seed=1, max_tokens=3)
    gc.collect()
    assert "".join(chunk.text for chunk in stream) == expected_text("x", 1, 3)


# --- time


def test_the_callers_patience_ends_the_request(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(ReplyTimeout, match=r"within 0\.05 s"):
        llm.generate("x", timeout=0.05, **UNREAD)
    wait_until(lambda: not engine.has_work())
    (result,) = llm.generate(["x"], timeout=0.05, **UNREAD)
    assert isinstance(result.error, ReplyTimeout)


def test_a_deadline_ends_a_request_with_what_there_is(llm: LLM) -> None:
    reply = llm.generate("x", timeout_s=0.05, seed=1, **UNREAD)
    assert reply.finish_reason == "expired"
    assert reply.text == expected_text("x", 1, len(reply.tokens))


def test_a_deadline_passes_while_a_prompt_is_encoded() -> None:
    passed = threading.Event()

    class Slow(FakeText):
        def encode(self, text: str, check: Check = let_pass) -> Sequence[int]:
            assert passed.wait(WAIT_S)
            return super().encode(text, check)

    engine = FakeEngine()
    with over(engine, Slow()) as llm, ThreadPoolExecutor() as pool:
        late = pool.submit(llm.generate, "x", timeout_s=0.001)
        beside = pool.submit(llm.generate, list(b"y"), seed=1, max_tokens=1, timeout_s=60)
        assert beside.result(60).text == expected_text("y", 1, 1)
        llm.generate(list(b"z"), max_tokens=10**6, timeout_s=0.05)  # ends later than the late one
        passed.set()
        assert (late.result(60).finish_reason, late.result().tokens) == ("expired", ())
    assert len(engine.prefilled) == 2


# --- Ctrl-C, threads, closing


class Interrupting(FakeEngine):
    """Interrupts the program, as Ctrl-C does, once it has long been waiting.

    A signal that comes as a thread goes to sleep wakes it only with the next one: that is a gap of Python's.
    """

    def __init__(self) -> None:
        super().__init__(step_s=0.005)

    def step(self) -> list[Output]:
        outputs = super().step()
        if self._steps == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return outputs


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate("one", **UNREAD),
        lambda llm: llm.generate(["many"] * 50, **UNREAD),
        lambda llm: list(llm.map(["many"] * 50, **UNREAD)),
        lambda llm: list(llm.stream("one", **UNREAD)),
    ],
    ids=["one", "many", "map", "stream"],
)
def test_ctrl_c_ends_what_was_asked_for_and_nothing_else(ask: Callable[[LLM], object]) -> None:
    engine = Interrupting()
    with over(engine) as llm:
        with pytest.raises(KeyboardInterrupt):
            ask(llm)
        wait_until(lambda: not engine.has_work())
        assert llm.generate("after", seed=1, max_tokens=5).text == expected_text("after", 1, 5)


def test_threads_share_one_llm(llm: LLM) -> None:
    def ask(number: int) -> str:
        return llm.generate(f"p{number}", seed=1, max_tokens=10).text

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(100))) == [expected_text(f"p{number}", 1, 10) for number in range(100)]


def test_closing_ends_those_who_wait(engine: FakeEngine) -> None:
    llm = over(engine)
    stream = llm.stream("x", **UNREAD)
    next(stream)
    prompts: list[Any] = ["y", ["z"] * 100]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(partial(llm.generate, prompt, **UNREAD)) for prompt in prompts]
        wait_until(lambda: len(engine.prefilled) > 3)
        llm.close()
        for call in calls:
            with pytest.raises(EngineFailed, match="the LLM is closed"):
                call.result(60)
    llm.close()
    for ask in (lambda: llm.generate("x"), lambda: llm.generate(["x"]), lambda: llm.stream("x"),
                lambda: list(llm.map(["x"])), lambda: llm.chat([{"role": "user", "content": "x"}])):  # fmt: skip
        with pytest.raises(EngineFailed, match="the LLM is closed"):
            ask()


def test_closing_ends_those_whose_prompts_are_encoded() -> None:
    encoding, passed = threading.Event(), threading.Event()

    class Slow(FakeText):
        def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
            encoding.set()
            assert passed.wait(WAIT_S)
            return super().encode_chat(chat, check)

    llm = over(FakeEngine(), Slow())
    with ThreadPoolExecutor() as pool:
        call = pool.submit(llm.chat, [[{"role": "user", "content": "x"}]] * 20)
        assert encoding.wait(WAIT_S)
        llm.close()
        passed.set()
        with pytest.raises(EngineFailed, match="the LLM is closed"):
            call.result(60)


def test_closing_lets_go_of_the_model() -> None:
    engine = FakeEngine()
    gone = weakref.ref(engine)
    llm = over(engine)
    llm.generate(["x", "y"], max_tokens=3)
    del engine
    llm.close()
    gc.collect()
    assert gone() is None


def run_program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)


def test_a_program_ends_without_closing() -> None:
    code = """
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.tools.chaos.fake_engine import FakeEngine, FakeText
from penstock import LLM
llm = LLM.from_engine(FakeEngine(), FakeText(), GenerationDefaults(eos_token_ids=()))
print(llm.generate(["x"], max_tokens=3)[0].reply.finish_reason)
stream = llm.stream("x", max_tokens=10**9)
print(next(stream).offset)
"""
    done = run_program(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "length\n0\n", "")


# --- what is shown


def test_progress_is_shown_on_a_terminal(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b", "c"], max_tokens=2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "has_viewer", lambda: True)
    llm.generate(["a", "b", "c"], max_tokens=2, progress=False)
    llm.generate("a", max_tokens=2)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b", "c"], max_tokens=2)
    assert "3/3" in capsys.readouterr().err


def test_progress_can_be_a_function(llm: LLM) -> None:
    states: list[BulkProgress] = []
    llm.generate(["a", "", "c"], max_tokens=2, progress=states.append)
    assert (states[-1].total, states[-1].done, states[-1].failed, states[-1].completion_tokens) == (3, 3, 1, 4)


def test_what_the_model_asks_for_and_does_not_get_is_warned_of() -> None:
    defaults = GenerationDefaults(eos_token_ids=(), ignored=("num_beams=4",))
    with pytest.warns(UserWarning, match="sets fields that are not supported: num_beams=4"):
        LLM.from_engine(FakeEngine(), FakeText(), defaults).close()


# --- options, imports


def test_options_have_the_types_that_the_engine_declares_and_bytes_and_paths_may_be_text() -> None:
    types = {name: field.type for name, field in declared(EngineConfig).items()}
    text = {name: kind | str for name, kind in types.items() if name.endswith("_bytes") or Path in get_args(kind)}
    assert get_type_hints(EngineOptions) == types | text


def test_options_are_the_engine_settings_of_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names = {field.name for field in fields(EngineConfig)}
    settings = load_settings({})
    assert settings.compile_cache_dir is not None
    defaults = {name: getattr(settings, name) for name in names}
    defaults["compile_cache_dir"] = settings.compile_cache_dir.expanduser()
    assert {name: getattr(engine_config({}), name) for name in names} == defaults
    given = engine_config({"kv_cache_bytes": "512MiB", "max_num_seqs": 8, "compile_cache_dir": "~/x"})
    assert (given.kv_cache_bytes, given.max_num_seqs) == (512 << 20, 8)
    assert given.compile_cache_dir == Path.home() / "x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "unknown option 'max_num_seq'; did you mean max_num_seqs?"),
        ({"gpu_memory_utilization": 0.9}, "unknown option 'gpu_memory_utilization'"),
        ({"queue": "x"}, "unknown option 'queue'"),
        ({"max_num_seqs": "many"}, "max_num_seqs: Input should be a valid integer.*, not 'many'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be 1 or more, not 0"),
        ({"kv_cache_bytes": "lots"}, "kv_cache_bytes: .*, not 'lots'"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(options: EngineOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **options)


def test_it_is_loaded_when_it_is_asked_for() -> None:
    code = """
import sys
import penstock
from penstock import *
print(sorted(sys.modules.keys() & {"jax", "numpy", "transformers", "penstock.engine", "penstock.worker"}))
from penstock import LLM
print(LLM, LLM is penstock.LLM)
from penstock.engine.attention import selection
print(sorted(sys.modules.keys() & {"jax", "jax.experimental.pallas.tpu", "jax.experimental.pallas.triton"}))
"""
    done = run_program(code)
    loaded = "['jax', 'jax.experimental.pallas.tpu']"  # Triton's dialect, of which no CPU or TPU has a use, takes time
    assert done.stdout == f"[]\n<class 'penstock.local.llm.LLM'> True\n{loaded}\n", done.stderr
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'LMM'"):
        _ = penstock.LMM  # type: ignore[attr-defined]


def test_a_light_install_is_told_what_to_install() -> None:
    done = run_program("import sys; sys.modules['jax'] = None\nfrom penstock import LLM")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    how = "pip install '.[worker]' in a clone"
    assert last == f"ModuleNotFoundError: LLM needs jax, which is not installed; install it with: {how}"
