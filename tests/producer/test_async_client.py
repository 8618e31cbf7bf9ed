"""The asyncio client on a real server with a scripted worker."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.producer import (
    AsyncClient,
    ConnectionLost,
    GenerateRequest,
    ReplyCorrupt,
    ReplyGone,
    ReplyTimeout,
    RequestFailed,
    RequestRefused,
    ServerRefused,
    UnknownRequest,
)
from penstock.producer.aio import MAX_OTHERS, connections_of
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, OwnEntry, TokenLogprob, TopLogprob
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import (
    LossyProxy,
    ScriptedReply,
    ScriptedWorker,
    name_queue_until_cancelled,
    until_cancelled,
)


async def never(reply: ScriptedReply) -> None:
    """Leaves the request alone."""


async def test_generate_returns_the_whole_reply(redis_url: str) -> None:
    async with ScriptedWorker(redis_url) as worker, AsyncClient(redis_url) as client:
        reply = await client.generate("one two three", max_tokens=7, temperature=0.5)
    assert reply.text == "one two three"
    assert reply.tokens == tuple(map(ord, "one two three"))
    assert reply.finish_reason == "stop"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (13, 13)
    assert (reply.timings.queued_ms, reply.timings.ttft_ms, reply.timings.total_ms) == (1, 2, 3)
    (request,) = worker.taken
    assert (request.id, request.max_tokens, request.temperature) == (reply.request_id, 7, 0.5)


async def test_one_client_serves_several_queues_over_its_connections(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, queue="left") as left,
        ScriptedWorker(redis_url, queue="right") as right,
        AsyncClient(redis_url, queue="left") as client,
    ):
        other = client.on("right")
        assert client.on("left") is client
        assert client.on("right") is other
        assert other.on("left").handle("x").queue == "left"
        replies = await asyncio.gather(client.generate("to the left", id="r"), other.generate("to the right", id="r"))
    assert [reply.text for reply in replies] == ["to the left", "to the right"]
    assert [len(worker.taken) for worker in (left, right)] == [1, 1]
    assert replies[0].entry_id is not None
    with pytest.raises(ValueError, match="queue 'a b' is not"):
        client.on("a b")


async def test_queues_that_come_and_go_leave_nothing_behind(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        busy = client.on("busy")
        busy._transport.own("r")  # somebody waits for it
        last = None
        for number in range(3 * MAX_OTHERS):
            last = client.on(f"job-{number}")
        assert len(client._others) == MAX_OTHERS + 1
        assert client.on("busy") is busy
        assert client.on(f"job-{number}") is last
        del last, busy
        gc.collect()
        assert len(client._transports) == MAX_OTHERS + 2


async def test_what_a_forgotten_queue_still_had_is_ended_with_the_client(redis_url: str, redis: RedisClient) -> None:
    async with AsyncClient(redis_url) as client:
        held = client.on("held")
        for number in range(MAX_OTHERS):
            client.on(f"job-{number}")
        assert client.on("held") is not held
        call = asyncio.create_task(held.count_tokens("x", timeout=60))
        await eventually(lambda: redis.exists(keys.calls("held")))
        await eventually(lambda: not connections_of(client).batcher._senders)
    with pytest.raises(ConnectionLost, match="closed"):
        await call


async def test_a_prompt_has_four_forms(redis_url: str) -> None:
    chat = [{"role": "user", "content": "hi"}]
    async with ScriptedWorker(redis_url) as worker, AsyncClient(redis_url) as client:
        await client.generate("text")
        await client.generate(chat)
        await client.generate([1, 2, 3])
        await client.generate(GenerateRequest(prompt="whole", max_tokens=3, id="mine"))
    text, messages, token_ids, whole = worker.taken
    assert text.prompt == "text"
    assert messages.messages is not None
    assert [message.model_dump(exclude_none=True) for message in messages.messages] == chat
    assert token_ids.prompt_token_ids == (1, 2, 3)
    assert (whole.id, whole.prompt, whole.max_tokens) == ("mine", "whole", 3)


async def test_options_beside_a_whole_request_are_a_mistake(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        with pytest.raises(TypeError, match="max_tokens"):
            await client.submit(GenerateRequest(prompt="x"), max_tokens=3)


async def test_ids_are_random_and_long(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        ids = {(await client.submit("x")).id for _ in range(20)}
    assert len(ids) == 20
    assert min(map(len, ids)) >= 22  # 128 bits at 6 bits per character


async def test_chunks_come_as_they_are_written(redis_url: str) -> None:
    gate = asyncio.Event()

    async def gated(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("first")
        await gate.wait()
        await reply.chunk(" second")
        await reply.end("length")

    async with ScriptedWorker(redis_url, gated), AsyncClient(redis_url) as client:
        stream = client.stream("x")
        first = await anext(stream)
        assert (first.text, first.index, first.offset, first.entry_id) == ("first", 0, 0, "1-1")
        before = stream.reply
        gate.set()
        rest = [chunk async for chunk in stream]
        assert [(chunk.text, chunk.offset, chunk.tokens) for chunk in rest] == [
            (" second", 5, tuple(map(ord, " second")))
        ]
        assert before is None
        assert stream.reply is not None
        assert (stream.reply.text, stream.reply.finish_reason) == ("first second", "length")


async def test_choices_are_told_apart(redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        stream = client.stream("a b", n=3)
        assert {chunk.index async for chunk in stream} == {0, 1, 2}
        assert stream.reply is not None
        assert [(choice.index, choice.text) for choice in stream.reply.choices] == [(0, "a b"), (1, "a b"), (2, "a b")]
        assert stream.reply.usage.completion_tokens == 9


async def test_logprobs_arrive(redis_url: str) -> None:
    logprobs = (
        TokenLogprob(
            id=7, token=" x", bytes=b" x", logprob=-0.5, top=(TopLogprob(id=9, token="", bytes=b"\xe6", logprob=-1.25),)
        ),
    )

    async def with_logprobs(reply: ScriptedReply) -> None:
        await reply.own()
        reply.tokens[0] = 1
        await reply.write(ChunkEntry(index=0, offset=0, text="x", tokens=(7,), logprobs=logprobs))
        await reply.end()

    async with ScriptedWorker(redis_url, with_logprobs), AsyncClient(redis_url) as client:
        reply = await client.generate("x", logprobs=2)
    assert reply.choices[0].logprobs == logprobs


async def test_a_submitted_request_can_be_followed_more_than_once_and_from_elsewhere(redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client, AsyncClient(redis_url) as other:
        handle = await client.submit("a b c")
        assert (await handle.result()).text == "a b c"
        assert "".join([chunk.text async for chunk in handle.stream()]) == "a b c"
        assert (await other.handle(handle.id).result(timeout=WAIT_S)).text == "a b c"


async def test_two_readers_of_one_reply_each_get_all_of_it(redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        for text in ("a b c d", "e f g", "h i"):  # a reader may join while a read for another is under way
            handle = await client.submit(text)
            replies = await asyncio.gather(*(handle.result() for _ in range(5)))
            assert {reply.text for reply in replies} == {text}


async def test_sending_an_id_again_gives_the_same_reply(redis_url: str) -> None:
    async with ScriptedWorker(redis_url) as worker, AsyncClient(redis_url) as client:
        first = await client.generate("a b", id="order-7")
        second = await client.generate("something else", id="order-7")
    assert first == second
    assert len(worker.taken) == 1


async def test_a_reader_continues_after_an_entry(redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        handle = await client.submit("a b c d e")
        chunks = [chunk async for chunk in handle.stream()]
        rest = handle.stream(after=chunks[2].entry_id)
        assert [chunk async for chunk in rest] == chunks[3:]
        assert rest.reply == await handle.result()


@pytest.mark.parametrize("after", ["1-99", "7-0"])
async def test_an_unknown_cursor_is_told_and_not_taken_for_the_start(redis_url: str, after: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        handle = await client.submit("a b c")
        await handle.result()
        with pytest.raises(ReplyGone, match=f"entry {after} is not in it"):
            await anext(handle.stream(after=after))
        with pytest.raises(ValueError, match="'nonsense' is not an entry id"):
            await anext(handle.stream(after="nonsense"))


async def test_cancel_ends_the_reply_with_what_there_is(redis: RedisClient, redis_url: str) -> None:
    async with ScriptedWorker(redis_url, until_cancelled), AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        stream = handle.stream()
        assert (await anext(stream)).text == "begun"
        await handle.cancel()
        reply = await stream.read_to_end()
        assert (reply.finish_reason, reply.text) == ("cancelled", "begun")
        for key in (keys.cancel("default", handle.id), keys.cancelled("default")):  # no worker may ever look at it
            assert 86_000 < await redis.ttl(key) <= 86_400


async def test_an_expired_request_is_a_reply(redis_url: str) -> None:
    async def expire(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.end("expired")

    async with ScriptedWorker(redis_url, expire), AsyncClient(redis_url) as client:
        reply = await client.generate("x", timeout_s=0.001)
    assert (reply.finish_reason, reply.text) == ("expired", "")


async def test_a_refusal_and_a_failure_are_exceptions(redis_url: str) -> None:
    async def fail(reply: ScriptedReply) -> None:
        await reply.own()
        if reply.request.prompt == "refuse":
            await reply.end("error", code="too_long", message="the prompt has 9 tokens")
        else:
            await reply.chunk("half")
            await reply.end("error", code="engine_error", message="it broke")

    async with ScriptedWorker(redis_url, fail), AsyncClient(redis_url) as client:
        with pytest.raises(RequestRefused, match="too_long: the prompt has 9 tokens") as refused:
            await client.generate("refuse")
        assert refused.value.code == "too_long"
        with pytest.raises(RequestFailed, match="it broke") as failed:
            await client.generate("fail")
        assert failed.value.reply.text == "half"
        stream = client.stream("fail")
        assert (await anext(stream)).text == "half"
        with pytest.raises(RequestFailed):
            await anext(stream)


async def test_waiting_has_a_limit_and_the_request_goes_on(redis_url: str) -> None:
    gate = asyncio.Event()

    async def gated(reply: ScriptedReply) -> None:
        await reply.own()
        await gate.wait()
        await reply.chunk("late")
        await reply.end()

    async with ScriptedWorker(redis_url, gated), AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        other = asyncio.create_task((await client.submit("y")).result(timeout=WAIT_S))
        with pytest.raises(ReplyTimeout, match=r"within 0\.05 s") as caught:
            await handle.result(timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.request_id == handle.id
        with pytest.raises(ReplyTimeout):
            await anext(handle.stream(timeout=0.01))
        gate.set()
        assert (await handle.result(timeout=WAIT_S)).text == "late"
        assert (await other).text == "late"


async def test_giving_up_on_generate_cancels_the_request(redis: RedisClient, redis_url: str) -> None:
    async with ScriptedWorker(redis_url, until_cancelled) as worker, AsyncClient(redis_url) as client:
        with pytest.raises(ReplyTimeout) as caught:
            await client.generate("x", timeout=0.1)
        await eventually(lambda: redis.exists(keys.cancel("default", caught.value.request_id)))

        task = asyncio.create_task(client.generate("y"))
        await eventually(lambda: any(request.prompt == "y" for request in worker.taken))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: redis.exists(keys.cancel("default", worker.taken[-1].id or "")))


async def test_leaving_a_stream_early_cancels_its_request(redis: RedisClient, redis_url: str) -> None:
    async with ScriptedWorker(redis_url, until_cancelled) as worker, AsyncClient(redis_url) as client:
        async for chunk in client.stream("x"):
            assert chunk.text == "begun"
            break
        gc.collect()
        await eventually(lambda: redis.exists(keys.cancel("default", str(worker.taken[0].id))))

        async with client.stream("y") as stream:
            await anext(stream)
        await eventually(lambda: redis.exists(keys.cancel("default", str(worker.taken[1].id))))


async def test_leaving_the_stream_of_a_named_or_submitted_request_cancels_nothing(
    redis: RedisClient, redis_url: str
) -> None:
    async with ScriptedWorker(redis_url, until_cancelled), AsyncClient(redis_url) as client:
        async with client.stream("x", id="mine") as stream:
            await anext(stream)
        handle = await client.submit("y")
        async with handle.stream() as stream:
            await anext(stream)
    assert not await redis.keys("*:cancel")


async def test_closing_the_client_ends_its_waits_and_cancels_what_only_it_knew(
    redis: RedisClient, redis_url: str
) -> None:
    async with ScriptedWorker(redis_url, never) as worker:
        client = AsyncClient(redis_url)
        owned = asyncio.create_task(client.generate("x"))
        await eventually(lambda: len(worker.taken) == 1)
        handle = await client.submit("y")
        attached = asyncio.create_task(handle.result())
        await asyncio.sleep(0.05)
        await client.close()
        for task in (owned, attached):
            with pytest.raises(ConnectionLost, match="closed"):
                await task
        assert await redis.exists(keys.cancel("default", str(worker.taken[0].id)))
        assert not await redis.exists(keys.cancel("default", handle.id))


async def test_states(redis: RedisClient, redis_url: str) -> None:
    steps: asyncio.Queue[str] = asyncio.Queue()

    async def stepwise(reply: ScriptedReply) -> None:
        while (step := await steps.get()) != "end":
            await (reply.own() if step == "own" else reply.chunk(step))
        await reply.end()

    async with AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        assert await handle.state() == "queued"
        async with ScriptedWorker(redis_url, stepwise) as worker:
            await eventually(lambda: len(worker.taken) == 1)
            assert await handle.state() == "queued"
            for step in ("own", "text"):
                steps.put_nowait(step)
            await anext(handle.stream())
            assert await handle.state() == "running"
            heartbeat = keys.heartbeat("default", "scripted")
            await redis.delete(heartbeat)
            assert await handle.state() == "lost"
            for status in (b"\xff", "queued"):
                await redis.hset(keys.state("default", handle.id), "status", status)
                assert await handle.state() == "queued"
            await redis.hset(keys.state("default", handle.id), "status", "running")
            await redis.set(heartbeat, "1")
            assert await handle.state() == "running"
            steps.put_nowait("end")
            await handle.result()
            await eventually(lambda: redis.hget(keys.state("default", handle.id), "status"))
            assert await handle.state() == "finished"
            await redis.delete(keys.reply("default", handle.id))
            with pytest.raises(ReplyGone):
                await handle.state()


async def test_a_reply_that_ended_and_expired_is_gone(redis: RedisClient, redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        reply = await handle.result()
        await eventually(lambda: redis.hget(keys.state("default", handle.id), "status"))
        await redis.hset(keys.state("default", handle.id), "status", "done")
        await redis.delete(keys.reply("default", handle.id))
        with pytest.raises(ReplyGone, match="ended and expired"):
            await handle.result()
        with pytest.raises(ReplyGone, match="1-1"):
            await anext(handle.stream(after="1-1"))
        assert reply.text == "x"


async def test_a_request_that_is_sent_again_after_its_reply_expired_waits_for_nothing(
    redis: RedisClient, redis_url: str
) -> None:
    async with ScriptedWorker(redis_url) as worker, AsyncClient(redis_url) as client:
        assert (await client.generate("x", id="r")).text == "x"
        assert (await client.generate("x", id="r")).text == "x"
        await eventually(lambda: _is_empty(redis))
        await redis.delete(keys.reply("default", "r"))
        await redis.delete(keys.state("default", "r"))
        with pytest.raises(ReplyGone, match="ended and expired"):
            await client.generate("x", id="r")
        assert len(worker.taken) == 1


async def _is_empty(redis: RedisClient) -> bool:
    return await redis.xlen(keys.requests("default")) == 0


async def test_a_gap_or_a_strange_entry_is_an_error_of_that_reply_alone(redis: RedisClient, redis_url: str) -> None:
    async def behave(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("ok")
        if reply.request.prompt == "gap":
            await reply.chunk("!", offset=5)
        elif reply.request.prompt == "strange":
            await redis.xadd(keys.reply("default", reply.id), {"type": "novel"}, id="1-9")
        elif reply.request.prompt == "binary":
            await redis.xadd(keys.reply("default", reply.id), {"type": "chunk", "text": b"\xff"}, id="1-9")
        else:
            await reply.end()

    async with ScriptedWorker(redis_url, behave), AsyncClient(redis_url) as client:
        outcomes = await asyncio.gather(
            *(client.generate(prompt, timeout=WAIT_S) for prompt in ("gap", "strange", "binary", "fine")),
            return_exceptions=True,
        )
    gap, strange, binary, fine = outcomes
    assert isinstance(gap, ReplyCorrupt)
    assert "token 5, but only 2" in str(gap)
    assert isinstance(strange, ReplyCorrupt)
    assert "'novel'" in str(strange)
    assert isinstance(binary, ReplyCorrupt)
    assert not isinstance(fine, BaseException)


async def test_another_worker_goes_on_and_the_reader_sees_one_reply(redis_url: str) -> None:
    async def interrupted(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("ab")
        reply.epoch = 2
        await reply.write(OwnEntry(worker="second", epoch=2))
        await reply.chunk("cd")
        await reply.end()

    async with ScriptedWorker(redis_url, interrupted), AsyncClient(redis_url) as client:
        chunks = [chunk async for chunk in client.stream("x")]
    assert [(chunk.text, chunk.offset) for chunk in chunks] == [("ab", 0), ("cd", 2)]


async def test_tokens_written_again_after_a_failover_are_dropped(redis_url: str) -> None:
    async def repeated(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("ab")
        await reply.chunk("cd")
        reply.epoch = 2
        await reply.own()
        await reply.chunk("cdef", offset=2)  # the new server had forgotten the last chunk
        await reply.end()

    async with ScriptedWorker(redis_url, repeated), AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        chunks = [chunk async for chunk in handle.stream()]
        assert [(chunk.text, chunk.offset, len(chunk.tokens)) for chunk in chunks] == [
            ("ab", 0, 2),
            ("cd", 2, 2),
            ("ef", 4, 2),
        ]
        assert [chunk.text async for chunk in handle.stream(after=chunks[1].entry_id)] == ["ef"]


async def test_an_unreachable_server_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.producer.connections.COMMAND_RETRIES", 1)
    secret = "s3cr3t"
    client = AsyncClient(f"redis://user:{secret}@127.0.0.1:1/0", reconnect_timeout_s=0.1)
    started = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"redis://127\.0\.0\.1:1/0") as caught:
        await client.submit("x")
    with pytest.raises(ConnectionLost, match=r"redis://127\.0\.0\.1:1/0"):
        await client.generate("x")
    assert time.monotonic() - started < 50  # not the 60 s that are tried by default
    assert secret not in str(caught.value) + repr(client) + repr(client.handle("x"))
    await client.close()


async def test_closing_does_not_wait_for_a_server_that_is_gone(redis_server: EmbeddedServer, redis_url: str) -> None:
    async with LossyProxy(redis_server.port) as proxy, ScriptedWorker(redis_url, never) as worker:
        client = AsyncClient(proxy.url)
        tasks = []
        for count in range(1, 3):  # the second one sends a wake-up
            tasks.append(asyncio.create_task(client.generate("x")))
            await eventually(lambda count=count: len(worker.taken) == count)
        await proxy.refuse()
        started = time.monotonic()
        await client.close()
        assert time.monotonic() - started < 50  # not the 60 s for which a connection is tried
        for task in tasks:
            with pytest.raises(ConnectionLost, match="closed"):
                await task


async def test_what_redis_refuses_is_told(redis: RedisClient, redis_url: str) -> None:
    await redis.set(keys.requests("default"), "not a stream")
    async with AsyncClient(redis_url) as client:
        with pytest.raises(ServerRefused, match="WRONGTYPE"):
            await client.submit("x")


@pytest.mark.parametrize("variable", ["PENSTOCK_REDIS_URL", "REDIS_URL"])
async def test_the_url_comes_from_the_environment(
    redis_url: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://other:1")
    monkeypatch.setenv(variable, redis_url)
    async with AsyncClient(queue="of-the-environment") as client:
        handle = await client.submit("x")
        assert await handle.state() == "queued"
        assert redis_url in repr(client)
    for name in ("PENSTOCK_REDIS_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    assert "redis://localhost:6379" in repr(AsyncClient())


@pytest.mark.parametrize("request_id", ["", "with space", "a{b}", "x" * 129, "ü"])
async def test_a_handle_needs_a_possible_id(redis_url: str, request_id: str) -> None:
    async with AsyncClient(redis_url) as client:
        with pytest.raises(ValueError, match="request_id"):
            client.handle(request_id)


async def test_the_same_id_in_two_queues_is_two_requests(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, name_queue_until_cancelled, queue="a"),
        ScriptedWorker(redis_url, queue="b"),
        AsyncClient(redis_url, queue="a") as client,
        AsyncClient(redis_url, queue="b") as other,
    ):
        handle = await client.submit("x", id="same")
        assert (await other.generate("y", id="same")).text == "y"
        theirs = client.handle("same", queue="b")
        assert (await handle.state(), await theirs.state()) == ("running", "finished")
        assert (await theirs.result()).text == "y"
        await theirs.cancel()
        stream = handle.stream()
        assert (await anext(stream)).text == "a"
        await handle.cancel()
        assert (await stream.read_to_end()).finish_reason == "cancelled"
        with pytest.raises(ValueError, match="queue 'no such name'"):
            client.handle("same", queue="no such name")


@pytest.mark.parametrize("request_id", ["never-sent", "1700000000000-0", f"{2**64 - 1}-{2**64 - 1}", f"{10**19 * 9}-1"])
async def test_what_nobody_sent_is_unknown_and_not_waited_for(redis_url: str, request_id: str) -> None:
    async with AsyncClient(redis_url) as client:
        handle = client.handle(request_id)
        assert await handle.state() == "unknown"
        with pytest.raises(UnknownRequest, match=f"queue 'default' knows no request '{request_id}'"):
            await handle.result()
        await client.submit("x", id="sent")
        assert await client.handle("sent").state() == "queued"
        assert await client.handle("sent", queue="other").state() == "unknown"


async def test_an_entry_made_by_hand_is_known_by_its_own_id(redis: RedisClient, redis_url: str) -> None:
    entry_id = str(await redis.xadd(keys.requests("default"), {"prompt": "by hand"}))
    async with AsyncClient(redis_url) as client:
        handle = client.handle(entry_id)
        assert await handle.state() == "queued"
        result = asyncio.create_task(handle.result())
        async with ScriptedWorker(redis_url):
            assert (await result).text == "by hand"
