"""The worker's values: configuration, admission, entries as they are written, the journal as it is read."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import re
import time
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import InvalidRequest, PromptTooLong
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import Output, TokenLogprob
from penstock.producer.redis.connection import connect
from penstock.producer.tasks import end_tasks
from penstock.producer.wire import ChunkEntry, GenerateRequest, decode_reply, encode_reply
from penstock.producer.wire import TokenLogprob as WireLogprob
from penstock.worker.chaos.fake_engine import FakeText
from penstock.worker.config import WorkerConfig, default_name
from penstock.worker.delivery import writes
from penstock.worker.delivery.admission import check_limits, encode_prompt, to_engine_request
from penstock.worker.delivery.ending import end_entry, printable
from penstock.worker.delivery.entries import QueueEntry
from penstock.worker.delivery.journal import JournalError, read_journal
from penstock.worker.delivery.requests import LiveRequest
from penstock.worker.errors import BadWorkerConfig, WorkerError
from penstock.worker.logs import configure_logs
from penstock.worker.protocol import faults
from penstock.worker.protocol.scripts import Claim
from penstock.worker.tasks import Shared, Signal


def make_live(n: int = 1) -> LiveRequest:
    claim = Claim(3, "i", False, False, 1_700_000_000_500, 1_700_000_000_400, 1, 0, 0, 0)
    entry, asked = QueueEntry("1700000000000-0", {}, 0), GenerateRequest(prompt="x", n=n)
    live = LiveRequest("q", "r", entry, claim, time.monotonic(), asked, structlog.get_logger())
    live.resume([type(live.choices[0])(index) for index in range(n)])
    return live


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue", "a{b}"),
        ("name", ""),
        ("name", "unowned"),
        ("heartbeat_ttl_s", 0),
        ("block_ms", 10_001),
        ("flush_interval_ms", -1),
        ("max_prompt_tokens", 0),
        ("health_host", ""),
        ("health_port", 65_536),
        ("max_attempts", 0),
    ],
)
def test_bad_config_names_the_value(name: str, value: Any) -> None:
    with pytest.raises(BadWorkerConfig, match=f"{name} must be .* not {value!r}"):
        WorkerConfig(**{name: value})


def test_names_of_processes_differ() -> None:
    assert default_name() != default_name()
    assert WorkerConfig().name != WorkerConfig().name


def test_exit_statuses_differ() -> None:
    statuses = [error.exit_status for error in WorkerError.__subclasses__()]
    assert len(set(statuses)) == len(statuses)
    assert 0 not in statuses


def test_open_fields_take_the_model_s_defaults() -> None:
    defaults = GenerationDefaults((2,), temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    request = GenerateRequest(id="r", prompt="x")
    sampling = to_engine_request(request, (1,), defaults).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.9)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.1, None)


def test_what_the_request_says_wins_over_the_defaults_even_at_zero() -> None:
    defaults = GenerationDefaults((2,), temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    request = GenerateRequest(
        id="r", prompt="x", temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0
    )
    sampling = to_engine_request(request, (1,), defaults).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 1.0)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.0, 1.0, 0)


def test_every_field_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 7,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {1: 2.0},
        "allowed_token_ids": (1, 2), "bad_token_ids": (3,), "stop": ("a",), "stop_token_ids": (4,), "ignore_eos": True,
        "logprobs": 2,
    }  # fmt: skip
    request = GenerateRequest(id="r", prompt="x", n=2, priority=5, **fields)
    result = to_engine_request(request, (8, 9), GenerationDefaults(()), ((1,), (2, 3)))
    assert {name: getattr(result.sampling, name) for name in fields} == fields
    assert {field.name for field in dataclasses.fields(result.sampling)} == set(fields)
    assert (result.id, result.n, result.priority, result.prompt_token_ids) == ("r", 2, 5, (8, 9))
    assert result.generated == ((1,), (2, 3))


def test_three_forms_of_a_prompt() -> None:
    config = WorkerConfig()
    message = {"role": "user", "content": "a"}
    assert encode_prompt(GenerateRequest(prompt="ab"), FakeText(), config) == (97, 98)
    assert encode_prompt(GenerateRequest(prompt_token_ids=(5, 6)), FakeText(), config) == (5, 6)
    assert encode_prompt(GenerateRequest(messages=(message,)), FakeText(), config) == tuple(b"user:a")


def test_limits_are_named() -> None:
    with pytest.raises(PromptTooLong, match="3 tokens, the limit max_prompt_tokens is 2"):
        encode_prompt(GenerateRequest(prompt="abc"), FakeText(), WorkerConfig(max_prompt_tokens=2))
    with pytest.raises(InvalidRequest, match="n is 3, the limit max_n is 2"):
        check_limits(GenerateRequest(prompt="x", n=3), WorkerConfig(max_n=2))


@given(
    tokens=st.lists(st.integers(0, 10**6), max_size=5),
    text=st.text(st.characters(exclude_categories=("Cs",))),
    offset=st.integers(0, 10**6),
    logprob=st.none() | st.floats(-1e6, 0.0),
    several=st.booleans(),
)
def test_chunks_are_written_as_the_schema_would_write_them(
    tokens: list[int], text: str, offset: int, logprob: float | None, several: bool
) -> None:
    live = make_live(n=2 if several else 1)
    choice = live.choices[0]
    choice.num_published = offset
    logprobs = None if logprob is None else tuple(TokenLogprob(logprob, ((token, logprob),)) for token in tokens)
    live.add(Output("r", 0, offset, tuple(tokens), text, logprobs, finish_reason="stop" if several else None))
    write = writes.take_chunk(live, choice)
    fields = [str(part) for part in write.command[4:]]
    entry = ChunkEntry(
        index=0,
        offset=offset,
        text=text,
        tokens=tuple(tokens),
        logprobs=tuple(WireLogprob(logprob=logprob, top={token: logprob}) for token in tokens)
        if logprob is not None and tokens
        else None,
        finish_reason="stop" if several else None,
    )
    written = dict(zip(fields[::2], fields[1::2], strict=True))
    assert decode_reply(written) == entry
    assert {**written, "logprobs": None} == {**encode_reply(entry), "logprobs": None}
    assert write.command[:4] == ("XADD", "penstock:q:{r}:reply", "NOMKSTREAM", "3-1")


def test_a_chunk_put_back_is_taken_again_in_order_under_a_new_id() -> None:
    live = make_live()
    live.add(Output("r", 0, 0, (1, 2), " a b"))
    first = writes.take_chunk(live, live.choices[0])
    live.add(Output("r", 0, 2, (3,), " c"))
    writes.put_back(first)
    second = writes.take_chunk(live, live.choices[0])
    assert (second.token_ids, second.text, second.entry_id) == ([1, 2, 3], " a b c", "3-2")
    assert not writes.has_news(live, live.choices[0])


def test_the_whole_takes_the_gravest_reason() -> None:
    live = make_live(n=3)
    for index, reason in enumerate(("stop", "length", "stop")):
        assert live.finish_reason is None
        live.add(Output("r", index, 0, (1,), "a", finish_reason=reason))  # type: ignore[arg-type]
    end = end_entry(live)
    assert (end.finish_reason, end.finish_reasons) == ("length", ("stop", "length", "stop"))
    assert (end.queued_ms, end.completion_tokens) == (400, 3)
    assert end.ttft_ms is not None
    assert 500 <= end.ttft_ms <= (end.total_ms or 0) < 2000


def test_messages_become_printable_and_short() -> None:
    assert printable("a\ud800b") == "a\\ud800b"
    assert len(printable("x" * 10**6)) <= 2000


@pytest.mark.parametrize(
    ("chunks", "generated", "reasons"),
    [
        ([], (), [None, None]),
        ([(0, 0, "1,2", None), (1, 0, "9", None), (0, 2, "3", None)], ((1, 2, 3), (9,)), [None, None]),
        ([(0, 0, "1,2", None), (0, 1, "2,3", None), (0, 0, "1", None)], ((1, 2, 3), ()), [None, None]),
        ([(1, 0, "1", None), (1, 1, "", "stop")], ((), (1,)), [None, "stop"]),
    ],
)
async def test_journal(redis_url: str, chunks: list[Any], generated: Any, reasons: list[str | None]) -> None:
    redis = connect(redis_url, decode=False)
    await redis.xadd("penstock:q:{r}:reply", {"type": "own", "worker": "w", "epoch": 1})
    for index, offset, tokens, reason in chunks:
        fields = {"type": "chunk", "index": index, "offset": offset, "tokens": tokens, "text": ""}
        await redis.xadd("penstock:q:{r}:reply", {**fields, **({"finish_reason": reason} if reason else {})})
    journal = await read_journal(redis, "penstock:q:{r}:reply", n=2)
    await redis.aclose()
    assert journal.generated == generated
    assert journal.finish_reasons == reasons


@pytest.mark.parametrize(
    "fields",
    [
        {"index": 0, "offset": 1, "tokens": "1"},
        {"index": 2, "offset": 0, "tokens": "1"},
        {"index": 0, "offset": 0, "tokens": "x"},
        {"index": 0, "offset": 0},
    ],
)
async def test_unreadable_journal(redis_url: str, fields: dict[str, Any]) -> None:
    redis = connect(redis_url, decode=False)
    await redis.xadd("penstock:q:{r}:reply", {"type": "chunk", **fields}, id="1-1")
    with pytest.raises(JournalError, match="1-1"):
        await read_journal(redis, "penstock:q:{r}:reply", n=2)
    await redis.aclose()


def test_backoff_grows_and_is_bounded() -> None:
    backoff = faults.Backoff(first_s=0.1, longest_s=1.0)
    waits = [backoff.next_s() for _ in range(50)]
    assert 0.05 <= waits[0] <= 0.1
    assert all(0.5 <= wait <= 1.0 for wait in waits[5:])
    backoff.reset()
    assert backoff.next_s() <= 0.1


async def test_signal_wakes_all_who_wait_and_none_later() -> None:
    signal = Signal()
    waiters = [asyncio.ensure_future(signal.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    signal.fire()
    await asyncio.gather(*waiters)
    late = asyncio.ensure_future(signal.wait())
    await asyncio.sleep(0)
    assert not late.done()
    late.cancel()


async def test_tasks_are_ended_even_if_a_library_swallows_the_first_cancellation() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks([task], patience_s=0.001)
    assert task.cancelled()
    assert swallowed == 3


async def test_what_is_shared_runs_once_at_a_time() -> None:
    may_end = asyncio.Event()
    num_runs = 0

    async def work() -> int:
        nonlocal num_runs
        num_runs += 1
        await may_end.wait()
        return num_runs

    shared = Shared(work)
    first, *others = [asyncio.create_task(shared()) for _ in range(5)]
    await asyncio.sleep(0)
    first.cancel()  # whose call started it
    await asyncio.wait({first})
    may_end.set()
    assert await asyncio.gather(*others) == [1] * 4
    assert await shared() == 2  # nobody gets an outcome from before they asked
    may_end.clear()
    last = asyncio.create_task(shared())
    await asyncio.sleep(0)
    await shared.stop()
    await asyncio.wait({last})
    assert last.cancelled()


def test_tracebacks_are_logged_without_local_variables() -> None:
    for style in ("json", "console"):
        stream = io.StringIO()
        configure_logs("info", style, stream)  # type: ignore[arg-type]
        hidden = "SEC" + "RET"
        try:
            int(hidden[:0])
        except ValueError:
            structlog.get_logger().exception("failed")
        structlog.reset_defaults()
        assert "ValueError" in stream.getvalue()
        assert "SECRET" not in stream.getvalue()


def test_nothing_that_comes_from_outside_steers_the_terminal() -> None:
    """The renderer colours its own parts, so each hostile text must be there, and only in escapes."""
    hostile = {
        "clear": "\x1b[2J",
        "title": "\x1b]0;t\x07",
        "c1": "\x9b31m",
        "back": "a\rb",
        "bidi": "\u202e",
        "half": "\ud800",
    }

    def fail(message: str) -> None:
        raise ValueError(message)

    stream = io.StringIO()
    configure_logs("info", "console", stream)
    log = structlog.get_logger().bind(request_id="plain", **hostile)
    log.warning(hostile["clear"], spaced="a b " + hostile["clear"], error=ValueError(hostile["clear"]))
    try:
        fail("".join(hostile.values()) + "\nsecond line")
    except ValueError:
        log.exception("failed")
    structlog.reset_defaults()
    shown = stream.getvalue()
    for text in hostile.values():
        assert text not in shown
        assert repr(text) in shown
    assert "\nValueError: " + repr("".join(hostile.values()))[1:-1] + "\nsecond line" in shown
    assert "request_id" in shown
    assert "'plain'" not in shown
    assert all(part.isprintable() for part in re.sub(r"\x1b\[\d+m", "", shown).split("\n"))


def test_log_level_and_format() -> None:
    stream = io.StringIO()
    configure_logs("warning", "auto", stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud", n=1)
    structlog.reset_defaults()
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line).items() >= {"event": "loud", "level": "warning", "n": 1}.items()
    with pytest.raises(ValueError, match="shout"):
        configure_logs("shout")
