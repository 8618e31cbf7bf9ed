"""Limits of what a key may ask for, across all gateways."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from penstock.gateway.keys.limits import Limiter, OverLimit
from penstock.gateway.keys.records import KeyLimits
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys, lua
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.fakes import Behaviour, LossyProxy, ScriptedReply, ScriptedWorker, one_word, until_cancelled
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_harness import Running, announce, new_key, running_gateway, standing_with
from tests.support.redis_servers.streams import read_scores

MESSAGES: Any = [{"role": "user", "content": "hello"}]
ONE_AT_ONCE = KeyLimits(max_concurrent=1)


@asynccontextmanager
async def served(
    redis: RedisClient, redis_url: str, behave: Behaviour = one_word, replicas: int = 1
) -> AsyncIterator[list[Running]]:
    await announce(redis)
    async with ScriptedWorker(redis_url, behave), AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running_gateway(redis_url)) for _ in range(replicas)]


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES, **options)


async def stream(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **options)


async def test_requests_per_minute_hold_over_all_gateways(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, limits={"requests_per_minute": 3})
    async with (
        served(redis, redis_url, replicas=2) as (first, second),
        openai_client(first.url, secret.text) as here,
        openai_client(second.url, secret.text) as there,
    ):
        answers = [await ask(client) for client in (here, there, here)]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(there)
    error, headers = refused.value, refused.value.response.headers
    assert (error.code, error.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert f"3 requests in the last minute, API key {secret.key_id} may make 3" in error.message
    assert headers["x-should-retry"] == "true"
    assert 50 < int(headers["retry-after"]) <= 61
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", "0")
    assert re.fullmatch(r"[\d.]+s", headers["x-ratelimit-reset-requests"])


async def test_who_has_used_the_minute_up_may_still_look_and_cancel(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, limits={"requests_per_minute": 1})
    async with served(redis, redis_url) as [gateway], openai_client(gateway.url, secret.text) as client:
        await ask(client)
        async with httpx2.AsyncClient(base_url=gateway.url, headers={"x-api-key": secret.text}) as http:
            assert (await http.post("/v1/chat/completions", json={})).status_code == 429
            assert (await http.get("/v1/models")).status_code != 429
            assert (await http.post("/v1/responses/x/cancel")).status_code != 429


async def test_a_refused_request_does_not_count(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, limits={"requests_per_minute": 1})
    async with served(redis, redis_url) as [gateway], openai_client(gateway.url, secret.text) as client:
        await ask(client)
        for _ in range(3):
            with pytest.raises(openai.RateLimitError):
                await ask(client)
    assert list((await redis.hgetall(names.key_requests(secret.key_id))).values()) == ["1"]


async def test_one_key_s_limits_are_not_another_s(redis: RedisClient, redis_url: str) -> None:
    first, second = [await new_key(redis_url, limits={"requests_per_minute": 1}) for _ in range(2)]
    async with served(redis, redis_url) as [gateway]:
        for secret in (first, second):
            async with openai_client(gateway.url, secret.text) as client:
                await ask(client)


async def test_concurrent_requests_hold_over_all_gateways(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, limits={"max_concurrent": 1})
    async with (
        served(redis, redis_url, until_cancelled, replicas=2) as (first, second),
        openai_client(first.url, secret.text) as here,
        openai_client(second.url, secret.text) as there,
    ):
        running = await stream(here)
        await anext(running)
        with pytest.raises(openai.RateLimitError, match="1 requests are running") as refused:
            await stream(there)
        assert refused.value.response.headers["retry-after"] == "1"
        await running.close()
        await eventually(lambda: gone(redis, names.key_open(secret.key_id)))
        await anext(await stream(there))


async def none_ended(_: str) -> bool:
    return False


async def gone(redis: RedisClient, name: str) -> bool:
    return not await redis.exists(name)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_one_at_once_is_enough_for_one_after_the_other(
    redis: RedisClient, redis_url: str, is_streamed: bool
) -> None:
    """A client that knows its answer has ended may ask again at once."""
    secret = await new_key(redis_url, limits={"max_concurrent": 1})
    async with served(redis, redis_url) as [gateway], openai_client(gateway.url, secret.text) as client:
        for _ in range(20):
            if is_streamed:
                async for _ in await stream(client):
                    pass
            else:
                await ask(client)


async def test_an_answer_that_is_an_error_gives_its_place_back(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, limits={"max_concurrent": 1})
    async with served(redis, redis_url) as [gateway], openai_client(gateway.url, secret.text) as client:
        for _ in range(3):
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="huge", messages=MESSAGES)


async def test_a_request_in_the_background_counts_until_its_end(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, limits={"max_concurrent": 2})
    go_on = asyncio.Event()

    async def when_told(reply: ScriptedReply) -> None:
        await reply.own()
        await go_on.wait()
        await reply.chunk("word")
        await reply.end("stop")

    async with served(redis, redis_url, when_told) as [gateway], openai_client(gateway.url, secret.text) as client:
        _, last = [await client.responses.create(model="tiny", input="x", background=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 requests are running"):
            await client.responses.create(model="tiny", input="x", background=True)
        with pytest.raises(openai.RateLimitError, match="2 requests are running"):
            await ask(client)
        go_on.set()

        async def has_completed() -> bool:
            return (await client.responses.retrieve(last.id)).status == "completed"

        await eventually(has_completed)
        await ask(client)
        await ask(client)
    assert await gone(redis, names.key_open(secret.key_id))


async def test_a_request_in_the_background_whose_reply_has_expired_counts_no_longer(
    redis: RedisClient, redis_url: str
) -> None:
    secret = await new_key(redis_url, limits={"max_concurrent": 1})
    async with served(redis, redis_url) as [gateway], openai_client(gateway.url, secret.text) as client:
        response = await client.responses.create(model="tiny", input="x", background=True)

        async def has_completed() -> bool:
            return (await client.responses.retrieve(response.id)).status == "completed"

        await eventually(has_completed)
        await redis.delete(keys.reply("default", response.id.removeprefix("resp_")))
        await ask(client)


async def has_place(limiter: Limiter) -> bool:
    try:
        await limiter.release(await limiter.admit("k", ONE_AT_ONCE))
    except OverLimit:
        return False
    return True


async def test_the_lease_of_a_killed_gateway_lapses(redis_url: str) -> None:
    async with Store(redis_url) as store:
        killed, alive = (Limiter(store.execute, none_ended, standing_with(store), lease_s=0.2) for _ in range(2))
        await killed.admit("k", ONE_AT_ONCE)
        assert not await has_place(alive)
        await eventually(lambda: has_place(alive))


async def test_the_lease_of_a_gateway_that_lost_redis_comes_back_with_it(
    redis_server: EmbeddedServer, redis_url: str
) -> None:
    async with LossyProxy(redis_server.port) as proxy, Store(proxy.url) as cut_off, Store(redis_url) as store:
        limiter = Limiter(cut_off.execute, none_ended, standing_with(cut_off), lease_s=0.3)
        other = Limiter(store.execute, none_ended, standing_with(store))
        async with limiter.running():
            await limiter.admit("k", ONE_AT_ONCE)
            assert not await has_place(other)
            await proxy.refuse()
            await eventually(lambda: has_place(other))
            await proxy.listen()

            async def is_back() -> bool:
                return not await has_place(other)

            await eventually(is_back)


async def test_the_lease_of_a_living_gateway_is_renewed_until_its_release(redis: RedisClient, redis_url: str) -> None:
    async with Store(redis_url) as store:
        limiter = Limiter(store.execute, none_ended, standing_with(store), lease_s=0.3)
        async with limiter.running():
            lease = await limiter.admit("k", ONE_AT_ONCE)
            [first] = (await read_scores(redis, names.key_running("k"))).values()

            async def is_renewed() -> bool:
                return float(await redis.zscore(names.key_running("k"), lease.id) or 0) > first + 1000

            await eventually(is_renewed)
            with pytest.raises(OverLimit):
                await limiter.admit("k", ONE_AT_ONCE)
            await limiter.release(lease)
            await limiter.release(await limiter.admit("k", ONE_AT_ONCE))
            assert await gone(redis, names.key_running("k"))


@pytest.mark.parametrize("limits", [KeyLimits(max_concurrent=5), KeyLimits(requests_per_minute=5)])
async def test_of_many_that_come_at_once_to_all_gateways_so_many_are_let_in(redis_url: str, limits: KeyLimits) -> None:
    async with Store(redis_url) as one, Store(redis_url) as other:
        limiters = [Limiter(store.execute, none_ended, standing_with(store)) for store in (one, other)]
        found = await asyncio.gather(
            *(limiters[place % 2].admit("k", limits) for place in range(60)), return_exceptions=True
        )
    assert sum(not isinstance(each, OverLimit) for each in found) == 5


async def test_a_minute_is_one_that_moves(redis: RedisClient, redis_url: str) -> None:
    now, _ = await redis.time()
    await redis.hset(names.key_requests("k"), mapping={now - 62: 90, now - 31: 2, now - 11: 1})
    async with Store(redis_url) as store:
        limiter = Limiter(store.execute, none_ended, standing_with(store))
        lease = await limiter.admit("k", KeyLimits(requests_per_minute=4))
        assert lease.requests is not None
        assert lease.requests.remaining == 0  # those of a minute ago no longer count
        with pytest.raises(OverLimit) as refused:
            await limiter.admit("k", KeyLimits(requests_per_minute=4))
        assert refused.value.retry_after_s in (29, 30)  # until the oldest two no longer do
    assert await redis.hexists(names.key_requests("k"), str(now - 62)) is False


async def test_a_minute_of_the_clock_does_not_begin_anew(redis: RedisClient) -> None:
    source = lua.load("penstock.gateway.keys", "window")
    minute = 60 * 10**6
    await redis.hset("window", mapping={minute - 61: 90, minute - 60: 1, minute - 1: 2})
    counted = await redis.eval(f"{source}\nreturn window(KEYS[1], tonumber(ARGV[1]))", 1, "window", 1000 * minute + 1)
    assert counted == 3


async def test_tokens_per_minute(redis: RedisClient, redis_url: str) -> None:
    """The reply has 4 tokens; the scripted worker counts none of its prompt."""
    secret = await new_key(redis_url, limits={"tokens_per_minute": 60})
    async with served(redis, redis_url) as [gateway], openai_client(gateway.url, secret.text) as client:
        remaining = [int((await ask(client, max_tokens=20)).headers["x-ratelimit-remaining-tokens"]) for _ in range(3)]
        prompt_tokens = 60 - 20 - remaining[0]
        assert 0 < prompt_tokens < 20
        assert remaining[1:] == [remaining[0] - 4, remaining[0] - 8]  # what was not generated was given back
        with pytest.raises(openai.RateLimitError, match="12 tokens in the last minute") as refused:
            await ask(client, max_tokens=50)
        headers = refused.value.response.headers
        assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("60", "48")
        assert int(headers["retry-after"]) > 50
        await ask(client, max_tokens=20)  # this one fits


async def test_tokens_of_a_stream_are_settled_at_its_end(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, limits={"tokens_per_minute": 1000})
    async with served(redis, redis_url) as [gateway], openai_client(gateway.url, secret.text) as client:
        async for _ in await stream(client):
            pass
        assert await counted(redis, secret.key_id) == 4


async def test_tokens_of_a_stream_that_was_left_are_those_that_came(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, limits={"tokens_per_minute": 1000})
    async with (
        served(redis, redis_url, until_cancelled) as [gateway],
        openai_client(gateway.url, secret.text) as client,
    ):
        running = await stream(client, max_tokens=500)
        await anext(running)
        reserved = await counted(redis, secret.key_id)
        await running.close()
        await eventually(lambda: gone(redis, names.key_open(secret.key_id)))

        async def is_settled() -> bool:
            return 4 < await counted(redis, secret.key_id) < reserved  # with the prompt, which nobody reported

        await eventually(is_settled)


async def counted(redis: RedisClient, key_id: str) -> int:
    return sum(map(int, (await redis.hgetall(names.key_tokens(key_id))).values()))


async def test_a_retried_request_is_charged_once(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, limits={"tokens_per_minute": 1000})
    async with served(redis, redis_url) as [gateway], openai_client(gateway.url, secret.text) as client:
        for _ in range(3):
            await ask(client, extra_headers={"Idempotency-Key": "one"})
        assert await counted(redis, secret.key_id) == 4


async def test_commands_that_run_twice_count_once(redis: RedisClient, redis_url: str) -> None:
    """A command runs twice when its answer was lost."""
    async with Store(redis_url) as store:

        async def twice(*command: str | bytes | int) -> Any:
            await store.execute(*command)
            return await store.execute(*command)

        limiter = Limiter(twice, none_ended, standing_with(store))
        lease = await limiter.admit("k", KeyLimits(requests_per_minute=9, max_concurrent=1))
        assert (lease.requests and lease.requests.used) == 1


async def test_keys_and_limits_work_on_a_cluster(redis_cluster_url: str) -> None:
    secret = await new_key(redis_cluster_url, limits={"requests_per_minute": 9})
    async with Store(redis_cluster_url) as store:
        limiter = Limiter(store.execute, none_ended, standing_with(store))
        async with limiter.running():
            await limiter.release(await limiter.admit(secret.key_id, KeyLimits(max_concurrent=1)))
    async with running_gateway(redis_cluster_url) as gateway, openai_client(gateway.url, secret.text) as client:
        with pytest.raises(openai.InternalServerError, match="no worker serves"):
            await ask(client)
        with pytest.raises(openai.AuthenticationError):
            await ask(client.with_options(api_key="none"))
