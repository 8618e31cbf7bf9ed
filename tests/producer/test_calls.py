"""Calls of the client are answered by a worker, or by an error that says why not; and what runs beside them."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from penstock.producer import (
    AsyncClient,
    CallFailed,
    CallTimedOut,
    Client,
    ConnectionLost,
    QueueFull,
    RequestRefused,
    ServerRefused,
    calls,
)
from penstock.producer.aio import MAX_OTHERS
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.streams import stream_entries
from penstock.protocol.wire import MAX_TIMEOUT_MS
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import running_worker
from tests.support.redis_servers.redis_proxy import RedisProxy
from tests.support.redis_servers.streams import add_entry

pytestmark = pytest.mark.every_server

CALLS = keys.calls("q")
CHAT = [{"role": "user", "content": "hi"}]


async def take_one(redis: RedisClient) -> dict[str, str]:
    """Takes the next call as a worker would, and answers it with what the test says."""
    async with asyncio.timeout(WAIT_S):
        while not (answer := await redis.xreadgroup(keys.GROUP, "w", {CALLS: ">"}, count=1, block=1000)):
            pass
    [(_, [(_, fields)])] = stream_entries(answer)
    return cast("dict[str, str]", fields)


async def group(redis: RedisClient) -> None:
    await redis.xgroup_create(CALLS, keys.GROUP, id="0", mkstream=True)


async def test_what_a_client_without_a_tokenizer_asks(redis_url: str) -> None:
    async with AsyncClient(redis_url, queue="q") as client, running_worker(redis_url):
        assert await client.count_tokens("hello") == 5
        assert await client.count_tokens(CHAT) == 7
        assert await client.tokenize("abc") == (97, 98, 99)
        assert await client.tokenize("") == ()
        assert await client.detokenize([104, 105]) == "hi"
        assert await client.detokenize([104, 105], skip_special_tokens=False) == "hi"
        assert await client.detokenize([]) == ""
        assert await client.validate("hello", temperature=0.5, max_tokens=3) == 5
        with pytest.raises(RequestRefused, match="n is 9, the limit max_n is 8"):
            await client.validate("x", n=9)
        with pytest.raises(RequestRefused, match="the vocabulary ends at 255"):
            await client.detokenize([256])
        counts = await asyncio.gather(*(client.count_tokens("x" * n) for n in range(1, 100)))
        assert counts == list(range(1, 100))


def test_the_same_for_code_that_blocks(redis_url: str) -> None:
    with Client(redis_url, queue="q") as client:
        with pytest.raises(CallTimedOut, match=r"no answer to count_tokens within 0\.05 s; no worker serves queue 'q'"):
            client.count_tokens("x", timeout=0.05)
        for ask in (client.tokenize, client.validate):
            with pytest.raises(CallTimedOut):
                ask("x", timeout=0.05)
        with pytest.raises(CallTimedOut):
            client.detokenize([1], timeout=0.05)
        assert client.model_card() is None
        assert client.queues() == ()


async def test_what_is_wrong_is_not_sent(redis_url: str, redis: RedisClient) -> None:
    async with AsyncClient(redis_url, queue="q") as client:
        with pytest.raises(RequestRefused, match="temperature"):
            await client.validate("x", temperature=-1)
        for timeout_s in (0, -1, MAX_TIMEOUT_MS / 1000 + 1, float("nan")):
            with pytest.raises(ValueError, match="timeout must be above 0 to 60 s, not"):
                await client.count_tokens("x", timeout=timeout_s)
        with pytest.raises(ValueError, match="queue 'no queue' is not"):
            await client.model_card(queue="no queue")
    assert not await redis.exists(CALLS)


async def test_an_answer_finds_the_call_that_it_is_to(redis_url: str, redis: RedisClient) -> None:
    """Other answers may come first, and some that nobody waits for, or that are malformed."""
    await group(redis)
    async with AsyncClient(redis_url, queue="q") as client:
        asked = [asyncio.create_task(client.count_tokens(text)) for text in ("a", "b")]
        first, second = await take_one(redis), await take_one(redis)
        mailbox = keys.answers("q", first["to"])
        assert first["to"] == second["to"]
        for number, fields in enumerate(
            ({"junk": "x"}, {"id": "other", "worker": "w"}, {"id": second["id"], "worker": "w", "prompt_tokens": "x"})
        ):
            await add_entry(redis, mailbox, fields, entry_id=f"1-{number + 1}")
        for fields, count in ((second, 2), (second, 9), (first, 1)):
            await redis.xadd(mailbox, {"id": fields["id"], "worker": "w", "prompt_tokens": count, "news": "x"})
        assert [await task for task in asked] == [1, 2]
        await eventually(lambda: _is_empty(redis, mailbox))


async def test_a_worker_that_breaks_is_told_of(redis_url: str, redis: RedisClient) -> None:
    await group(redis)
    async with AsyncClient(redis_url, queue="q") as client:
        asked = asyncio.create_task(client.tokenize("a"))
        fields = await take_one(redis)
        answer = {"id": fields["id"], "worker": "w", "code": "internal_error", "message": "broken"}
        await add_entry(redis, keys.answers("q", fields["to"]), answer)
        with pytest.raises(CallFailed, match="tokenize failed, internal_error: broken"):
            await asked


async def test_of_a_queue_that_is_served_a_time_out_says_no_more(redis_url: str, redis: RedisClient) -> None:
    await redis.zadd(keys.serving("q"), {"w": 1})
    async with AsyncClient(redis_url, queue="q") as client:
        with pytest.raises(CallTimedOut, match=r"within 0\.05 s$") as caught:
            await client.count_tokens("x", timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert 0 < await redis.pttl(CALLS) <= MAX_TIMEOUT_MS  # whoever serves it keeps it


async def test_calls_that_nobody_takes_expire(redis_url: str, redis: RedisClient) -> None:
    async with AsyncClient(redis_url, queue="q") as client:
        with pytest.raises(CallTimedOut):
            await client.count_tokens("x", timeout=0.05)
        assert 0 < await redis.pttl(CALLS) <= MAX_TIMEOUT_MS
        await redis.xadd(CALLS, {"call": "tokenize"}, id="*")
        await redis.delete(CALLS)
        await redis.xadd(CALLS, {"call": "tokenize"}, id="1700000000000-0")
        with pytest.raises(CallTimedOut):
            await client.count_tokens("x", timeout=0.05)
        assert await redis.xlen(CALLS) == 1  # the old one is trimmed


async def test_too_many_calls_are_refused(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_WAITING", 1)
    async with AsyncClient(redis_url, queue="q") as client:
        with pytest.raises(CallTimedOut):
            await client.count_tokens("x", timeout=0.05)
        with pytest.raises(QueueFull, match="queue 'q' is full: it holds 1 calls, the limit is 1"):
            await client.count_tokens("x")


async def test_queues_that_come_and_go_share_what_waits_for_answers(redis_url: str, redis: RedisClient) -> None:
    async with AsyncClient(redis_url) as client, running_worker(redis_url):
        for number in range(2):
            assert await client.on("q").count_tokens("x")
            await eventually(lambda: client.on("q")._transport.is_idle)
            for other in range(MAX_OTHERS):
                client.on(f"job-{number}-{other}")
        names = [each["name"] for each in await redis.client_list()]
        assert names.count("penstock-calls") == 1


async def test_a_client_that_is_closed_waits_no_longer(redis_url: str, redis: RedisClient) -> None:
    client = AsyncClient(redis_url, queue="q")
    asked = asyncio.create_task(client.count_tokens("x", timeout=60))
    await eventually(lambda: redis.xlen(CALLS))
    await client.close()
    with pytest.raises(ConnectionLost, match="the client was closed"):
        await asked


async def test_a_call_outlives_a_connection_that_breaks(redis_url: str, redis: RedisClient) -> None:
    await group(redis)
    async with RedisProxy(redis_url) as proxy, AsyncClient(proxy.url, queue="q") as client:
        asked = asyncio.create_task(client.count_tokens("x", timeout=60))
        fields = await take_one(redis)
        await proxy.stop()
        await redis.xadd(keys.answers("q", fields["to"]), {"id": fields["id"], "worker": "w", "prompt_tokens": 1})
        await proxy.start()
        assert await asked == 1


async def test_redis_that_is_away_is_said(redis_url: str) -> None:
    async with RedisProxy(redis_url) as proxy, AsyncClient(proxy.url, queue="q") as client:
        await proxy.stop()
        with pytest.raises((ConnectionLost, CallTimedOut)):
            await client.count_tokens("x", timeout=5)


async def test_answers_that_can_t_be_read_are_refused(redis_url: str, redis: RedisClient) -> None:
    async with AsyncClient(redis_url, queue="q") as client:
        await redis.set(keys.answers("q", client._transport.caller._mailbox), "junk")
        with pytest.raises(ServerRefused, match="WRONGTYPE"):
            await client.count_tokens("x")


async def test_the_card_and_the_list_of_queues(redis_url: str, redis: RedisClient) -> None:
    async with AsyncClient(redis_url) as client:
        async with running_worker(redis_url, name="w", max_n=3):
            card = await client.model_card(queue="q")
            assert card is not None
            assert (card.worker, card.max_n, card.vocab_size) == ("w", 3, None)
            await eventually(lambda: _are_queues(client, "q"))
            assert await client.model_card() is None
        assert await client.model_card(queue="q") is None
        assert await client.queues() == ()
        await redis.hset(keys.card("q"), "junk", "x")
        with pytest.raises(ServerRefused, match="queue 'q': the model card's key holds no valid card"):
            await client.model_card(queue="q")


async def _is_empty(redis: RedisClient, mailbox: str) -> bool:
    return not await redis.xlen(mailbox)


async def _are_queues(client: AsyncClient, *names: str) -> bool:
    return await client.queues() == names
