"""Requests of killed or frozen workers go on elsewhere, token for token, and nothing is written twice."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from penstock.engine.request import Output
from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry
from penstock.tools.chaos.fake_engine import FakeEngine, expected_speech, expected_text, expected_tokens
from penstock.tools.chaos.fake_words import CALL, speech_of
from penstock.worker.publish.chunks import chunk_fields
from penstock.worker.run.choices import ChoiceBuffer
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ranked
from tests.support.programs.worker_harness import (
    Reply,
    add_chunk,
    end_as,
    is_queue_empty,
    read_reply,
    read_until,
    running_worker,
    send,
    take_and_claim,
)
from tests.support.programs.worker_process import WorkerProcess
from tests.support.redis_servers.streams import read_stream

pytestmark = pytest.mark.every_server


def is_chunk(entry: object) -> bool:
    return getattr(entry, "type", None) == "chunk"


async def is_absolved(redis: RedisClient, request_id: str) -> bool:
    return bool(await redis.hmget(keys.state("q", request_id), "crashes", "strikes") == ["0", "0"])


@pytest.mark.parametrize("holds_back", [False, True])
async def test_kill_in_mid_stream(redis_url: str, redis: RedisClient, tmp_path: Path, holds_back: bool) -> None:
    engine = {"step_s": 0.005, "holds_back": holds_back}
    with WorkerProcess(redis_url, tmp_path / "log", engine=engine, name="victim") as victim:
        for i in range(3):
            await send(redis, prompt=f"p{i}", id=f"r{i}", max_tokens=300, n=1 + i % 2, keep_s=250_000, tenant="acme")
        await read_until(redis, "r2", lambda entry: isinstance(entry, ChunkEntry) and entry.offset > 5)
        victim.kill()
        async with running_worker(redis_url, FakeEngine(holds_back=holds_back), name="heir") as heir:
            replies = [await read_reply(redis, f"r{i}") for i in range(3)]
            assert heir.service.metrics.reclaimed._value.get() == 3
            await eventually(lambda: is_queue_empty(redis))
            names = [consumer["name"] for consumer in await redis.xinfo_consumers(keys.requests("q"), keys.GROUP)]
            assert "victim" not in names
    for i, reply in enumerate(replies):
        assert reply.owners == ["victim", "heir"]
        for index in range(1 + i % 2):
            assert reply.text(index) == expected_text(f"p{i}", f"r{i}", 300, index)
            assert len(reply.tokens(index)) == 300
        state = keys.state("q", f"r{i}")
        assert await redis.hmget(state, "crashes", "strikes", "tenant") == ["1", "1", "acme"]
        assert all([240_000 < await redis.ttl(key) <= 250_000 for key in (state, keys.reply("q", f"r{i}"))])


async def test_a_call_goes_on_at_the_byte_where_its_worker_died(redis_url: str, redis: RedisClient) -> None:
    """The last published token may be in the reasoning, in arguments, or between a call's name and its arguments."""
    prompt, num_tokens = CALL + "x", 40
    whole = [expected_tokens(prompt.encode(), 2, index, num_tokens) for index in range(2)]
    for num_published in range(num_tokens):
        request_id = f"x{num_published}"
        await send(redis, prompt=prompt, id=request_id, max_tokens=num_tokens, n=2, seed=2)
        claim = await take_and_claim(redis, "dead", request_id)
        for index, tokens in enumerate(whole):
            buffer = ChoiceBuffer(index)
            speech = speech_of(prompt.encode(), request_id, index, holds_back=False)
            for token in tokens[: num_published - index]:
                said = speech.push(token)
                calls = said.tool_calls
                buffer.add(Output("", index, 0, (token,), said.text, reasoning=said.reasoning, tool_calls=calls))
            fields = chunk_fields(buffer, buffer.take(), num_choices=2)
            entry = dict(zip(fields[::2], fields[1::2], strict=True))
            await redis.xadd(keys.reply("q", request_id), entry, id=f"{claim.epoch}-{1 + index}")  # type: ignore[arg-type]
    async with running_worker(redis_url, name="heir"), AsyncClient(redis_url, queue="q") as client:
        replies = await asyncio.gather(*(client.handle(f"x{at}").result(timeout=WAIT_S) for at in range(num_tokens)))
    for reply in replies:
        for tokens, choice in zip(whole, reply.choices, strict=True):
            expected = expected_speech(prompt, reply.request_id, tokens, choice.index)
            assert choice.tokens == tuple(tokens)
            assert (choice.text, choice.reasoning) == (expected.text, expected.reasoning)
            assert len(choice.tool_calls) > 1
            for at, call in enumerate(choice.tool_calls):
                [begin, *_] = deltas = [delta for delta in expected.tool_calls if delta.index == at]
                assert (call.id, call.name) == (begin.id, begin.name)
                assert call.arguments == "".join(delta.arguments for delta in deltas)


async def test_frozen_worker_wakes_up_to_find_itself_fenced(redis_url: str, redis: RedisClient, tmp_path: Path) -> None:
    with WorkerProcess(redis_url, tmp_path / "log", engine={"step_s": 0.005}, name="zombie") as zombie:
        await send(redis, prompt="x", id="x", max_tokens=4000)  # 20 s at the zombie's pace
        await read_until(redis, "x", is_chunk)
        zombie.send(signal.SIGSTOP)
        engine = FakeEngine()
        async with running_worker(redis_url, engine, name="heir") as heir:
            await eventually(lambda: engine.prefilled == ["x"])
            engine.hold()
            zombie.send(signal.SIGCONT)
            await eventually(lambda: any(event["event"] == "request_dropped" for event in zombie.events()), timeout_s=5)
            await eventually(lambda: is_absolved(redis, "x"))
            engine.allow()
            reply = await read_reply(redis, "x")
            await eventually(lambda: is_queue_empty(redis))
            await heir.drain()
        late = await send(redis, prompt="late", max_tokens=3)  # the zombie is a good worker again
        assert (await read_reply(redis, late)).owners == ["zombie"]
    assert reply.text() == expected_text("x", "x", 4000)
    assert reply.tokens() == expected_tokens(b"x", "x", 0, 4000)
    assert [event["reason"] for event in zombie.events() if event["event"] == "request_dropped"] == ["fenced"]


async def test_of_two_processes_with_one_name_one_goes_on(redis_url: str, redis: RedisClient, tmp_path: Path) -> None:
    """The first was frozen for longer than its heartbeat lasts, and a second took its name."""
    with WorkerProcess(redis_url, tmp_path / "log", engine={"step_s": 0.005}, name="same") as zombie:
        for i in range(3):
            await send(redis, prompt="x", id=f"x{i}", max_tokens=2000)
        await read_until(redis, "x2", is_chunk)
        zombie.send(signal.SIGSTOP)
        await eventually(lambda: _is_free(redis, "same"))
        engine = FakeEngine(step_s=0.002)
        async with running_worker(redis_url, engine, name="same") as heir:
            await eventually(lambda: len(engine.prefilled) == 3)
            zombie.send(signal.SIGCONT)
            later = [await send(redis, prompt="later", max_tokens=50) for _ in range(20)]
            assert await asyncio.to_thread(zombie.wait, 30) == 1
            assert "NameTaken: another process uses the name 'same' in queue 'q'" in zombie.log()
            later += [await send(redis, prompt="later", max_tokens=50) for _ in range(5)]
            for request_id in later:
                assert (await read_reply(redis, request_id)).text() == expected_text("later", request_id, 50)
            for i in range(3):
                reply = await read_reply(redis, f"x{i}")
                assert reply.text() == expected_text("x", f"x{i}", 2000)
                assert reply.owners == ["same", "same"]  # once each: they do not take it from each other in turn
            await eventually(lambda: is_queue_empty(redis))
            assert heir.service.readiness.is_ready
    assert [event["event"] for event in zombie.events()].count("name_taken") == 1


async def _is_free(redis: RedisClient, worker: str) -> bool:
    return not await redis.exists(keys.heartbeat("q", worker))


async def test_sigterm_drains_a_process(redis_url: str, redis: RedisClient, tmp_path: Path) -> None:
    with WorkerProcess(redis_url, tmp_path / "log", engine={"step_s": 0.005}) as process:
        await send(redis, prompt="x", id="x", max_tokens=50)
        await read_until(redis, "x", is_chunk)
        process.send(signal.SIGTERM)
        assert (await read_reply(redis, "x")).text() == expected_text("x", "x", 50)
        assert process.wait(WAIT_S) == 0


async def finish_elsewhere(
    redis_url: str, redis: RedisClient, request_id: str, *, holds_back: bool = False
) -> tuple[Reply, FakeEngine]:
    engine = FakeEngine(holds_back=holds_back)
    async with running_worker(redis_url, engine, name="heir"):
        reply = await read_reply(redis, request_id)
        await eventually(lambda: is_queue_empty(redis))
    return reply, engine


async def test_kill_between_reading_and_claiming(redis_url: str, redis: RedisClient) -> None:
    await redis.xgroup_create(keys.requests("q"), keys.GROUP, id="0", mkstream=True)
    await send(redis, prompt="x", id="x", max_tokens=5)
    await redis.xreadgroup(keys.GROUP, "dead", {keys.requests("q"): ">"}, count=1)
    reply, _ = await finish_elsewhere(redis_url, redis, "x")
    assert reply.text() == expected_text("x", "x", 5)
    assert await redis.hget(keys.state("q", "x"), "crashes") is None


async def test_kill_right_after_the_claim(redis_url: str, redis: RedisClient) -> None:
    await send(redis, prompt="x", id="x", max_tokens=5)
    await take_and_claim(redis, "dead", "x")
    reply, _ = await finish_elsewhere(redis_url, redis, "x")
    assert reply.owners == ["dead", "heir"]
    assert reply.text() == expected_text("x", "x", 5)


async def test_kill_between_the_last_chunk_and_the_end(redis_url: str, redis: RedisClient) -> None:
    await send(redis, prompt="x", id="x", max_tokens=5)
    await take_and_claim(redis, "dead", "x")
    await add_chunk(redis, "x", 1, 0, expected_tokens(b"x", "x", 0, 3))
    await add_chunk(redis, "x", 2, 3, expected_tokens(b"x", "x", 0, 5, 3))
    reply, _ = await finish_elsewhere(redis_url, redis, "x")
    assert reply.tokens() == expected_tokens(b"x", "x", 0, 5)
    assert (reply.end.finish_reason, reply.end.completion_tokens) == ("length", 5)


async def test_kill_between_the_end_and_the_acknowledgement(redis_url: str, redis: RedisClient) -> None:
    await send(redis, prompt="x", id="x", max_tokens=5)
    claim = await take_and_claim(redis, "dead", "x")
    await end_as(redis, "x", claim, "done", finish_reason="stop")
    reply, engine = await finish_elsewhere(redis_url, redis, "x")
    assert ranked(reply.ids) == ["1-0", "1-1"]
    assert engine.prefilled == []


async def test_kill_between_the_end_and_the_dead_letter(redis_url: str, redis: RedisClient) -> None:
    await send(redis, prompt="x", id="x", max_tokens=5)
    claim = await take_and_claim(redis, "dead", "x")
    await end_as(redis, "x", claim, "dead", finish_reason="error", code="too_many_crashes")
    _, engine = await finish_elsewhere(redis_url, redis, "x")
    ((_, letter),) = await read_stream(redis, keys.dead("q"))
    assert (letter["id"], letter["code"], letter["field:prompt"]) == ("x", "given_up", "x")
    assert engine.prefilled == []


async def test_text_of_a_choice_that_has_ended_is_not_given_out_again(redis_url: str, redis: RedisClient) -> None:
    """The engine releases held-back text whenever a choice ends, even one that had ended before."""
    await send(redis, prompt="x", id="x", max_tokens=5, n=2)
    await take_and_claim(redis, "dead", "x")
    tokens = expected_tokens(b"x", "x", 0, 5)
    await add_chunk(redis, "x", 1, 0, tokens, finish_reason="length")
    reply, engine = await finish_elsewhere(redis_url, redis, "x", holds_back=True)
    assert engine.prefilled == ["x"]
    for index in (0, 1):
        assert reply.text(index) == expected_text("x", "x", 5, index)
    assert reply.end.finish_reasons == ("length", "length")


async def test_all_choices_ended_but_not_the_reply(redis_url: str, redis: RedisClient) -> None:
    await send(redis, prompt="x", id="x", max_tokens=9, n=2)
    claim = await take_and_claim(redis, "dead", "x")
    for index in (0, 1):
        await redis.xadd(
            keys.reply("q", "x"),
            {"type": "chunk", "index": index, "offset": 0, "text": "a", "tokens": "7", "finish_reason": "stop"},
            id=f"{claim.epoch}-{index + 1}",
        )
    reply, engine = await finish_elsewhere(redis_url, redis, "x")
    assert engine.prefilled == []
    assert reply.end.finish_reasons == ("stop", "stop")
    assert (reply.end.completion_tokens, reply.end.prompt_tokens) == (2, 1)


async def test_missing_tokens_are_an_error_and_no_guess(redis_url: str, redis: RedisClient) -> None:
    await send(redis, prompt="x", id="x", max_tokens=9)
    await take_and_claim(redis, "dead", "x")
    await add_chunk(redis, "x", 1, 4, [1, 2])
    reply, engine = await finish_elsewhere(redis_url, redis, "x")
    assert (reply.end.finish_reason, reply.end.code) == ("error", "reply_unreadable")
    assert engine.prefilled == []


async def test_poison_runs_alone_and_then_goes_to_the_dead_letters(redis_url: str, redis: RedisClient) -> None:
    await send(redis, prompt="bad\0", id="bad", max_tokens=5)
    for i in range(3):
        await send(redis, prompt=f"p{i}", id=f"good{i}", max_tokens=10)
    for attempt in range(3):
        engine = FakeEngine()
        async with running_worker(redis_url, engine, name=f"victim{attempt}") as victim:
            await eventually(victim.task.done)
            assert "poison" in str(victim.task.exception())
            if attempt == 2:
                assert engine.prefilled[-1] == "bad"
    async with running_worker(redis_url):
        end = (await read_reply(redis, "bad")).end
        for i in range(3):
            assert (await read_reply(redis, f"good{i}")).text() == expected_text(f"p{i}", f"good{i}", 10)
        await eventually(lambda: is_queue_empty(redis))
    assert (end.finish_reason, end.code) == ("error", "too_many_crashes")
    ((_, letter),) = await read_stream(redis, keys.dead("q"))
    assert (letter["id"], letter["code"], letter["crashes"], letter["strikes"]) == ("bad", "too_many_crashes", "3", "3")
    assert letter["field:prompt"] == "bad\0"
