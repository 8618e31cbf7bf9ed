"""Keys are charged what workers published, whoever left and whenever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import pytest

from penstock.gateway.admission.admission import OutgoingRequest, order_for
from penstock.gateway.store import names
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import GenerateRequest
from tests.support.long_minute import lengthen_minute
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_client import CHAT, bare_client, chat
from tests.support.programs.gateway_harness import announce, new_key, running_gateway

COMPLETIONS = "/v1/completions"
MAX_CHUNKS = 12


@pytest.fixture(autouse=True)
def long_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    lengthen_minute(monkeypatch)


class Publisher:
    """Writes replies as several workers that die and take over from each other, and adds up their tokens."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.num_published = 0
        self.num_running = 0

    async def behave(self, reply: ScriptedReply) -> None:
        self.num_running += 1
        await reply.own()
        for _ in range(self._random.randrange(MAX_CHUNKS)):
            await asyncio.sleep(self._random.random() / 50)
            if await reply.worker.redis.exists(keys.cancel(reply.worker.queue, reply.id)):
                await self._end(reply, "cancelled")
                return
            if self._random.random() < 0.1:
                reply.epoch += 1
                await reply.own()
            await reply.chunk("x" * self._random.randrange(1, 9), index=self._random.randrange(reply.request.n))
        await self._end(reply, "stop")

    async def _end(self, reply: ScriptedReply, reason: str) -> None:
        await reply.end(reason)
        self.num_published += len(reply.request.prompt or "") + sum(reply.tokens.values())
        self.num_running -= 1


class Clients:
    """Clients that ask both gateways for all kinds of things, and leave when they like."""

    def __init__(self, seed: int, gateways: list[httpx2.AsyncClient], secret: str) -> None:
        self._random = random.Random(seed)
        self._gateways = gateways
        self._authorization = {"authorization": f"Bearer {secret}"}

    async def ask(self, number: int) -> None:
        chance = self._random
        n, num_prompts = chance.choice((1, 1, 2, 3)), chance.choice((1, 1, 3))
        is_streamed, is_chat = num_prompts == 1 and chance.random() < 0.6, chance.random() < 0.5
        body: dict[str, Any] = {"model": "tiny", "n": n, "stream": is_streamed}
        if is_chat:
            body["messages"] = [{"role": "user", "content": "hello"}]
        else:
            body["prompt"] = "hello" if num_prompts == 1 else [f"prompt {place}" for place in range(num_prompts)]
        if chance.random() < 0.5:
            body["max_tokens"] = chance.choice((1, 50, 10**6))
        headers, tries = dict(self._authorization), 1
        if chance.random() < 0.5:
            headers["Idempotency-Key"], tries = f"key-{number}", chance.choice((1, 1, 2, 3))
        await asyncio.gather(*(self._try(CHAT if is_chat else COMPLETIONS, body, headers) for _ in range(tries)))

    async def _try(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        client, patience_s = self._random.choice(self._gateways), self._random.choice((0.02, 0.1, None))
        try:
            async with asyncio.timeout(patience_s):
                answer = await client.post(path, json=body, headers=headers)
        except TimeoutError:
            return
        if answer.status_code == 409:  # nobody had read it for a while when this one came
            assert "Idempotency-Key" in headers
            assert answer.json()["error"]["code"] == "cancelled"
            return
        assert answer.status_code == 200, answer.text


@asynccontextmanager
async def two_gateways(redis_url: str) -> AsyncIterator[list[httpx2.AsyncClient]]:
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(running_gateway(redis_url, abandon_after_s=0.4)) for _ in range(2)]
        yield await stack.enter_async_context(bare_client(*gateways))


async def counted(redis: RedisClient, key_id: str) -> int:
    return sum(map(int, (await redis.hgetall(names.key_tokens(key_id))).values()))


@pytest.mark.parametrize("seed", range(2))
async def test_what_ended_is_charged_as_it_was_published(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("penstock.gateway.keys.settling.ROUND_S", 0.1)
    secret = await new_key(redis_url, limits={"tokens_per_minute": 10**9, "max_concurrent": 10**6})
    publisher = Publisher(seed)
    await announce(redis)

    async def is_settled() -> bool:
        return not (publisher.num_running or await redis.exists(names.key_open(secret.key_id)))

    async with ScriptedWorker(redis_url, publisher.behave) as worker, two_gateways(redis_url) as gateways:
        clients = Clients(seed, gateways, secret.text)
        await asyncio.gather(*(clients.ask(number) for number in range(40)))
        await eventually(is_settled)
        assert worker.taken
        assert await counted(redis, secret.key_id) == publisher.num_published
        assert not await redis.exists(names.key_running(secret.key_id))


@pytest.mark.parametrize(
    ("fields", "max_model_len", "num_least", "num_tokens"),
    [
        ({"max_tokens": 10}, 4096, 100 + 10, 100 + 10),
        ({"max_tokens": 4095, "n": 2}, 4096, 100 + 2 * 3996, 100 + 2 * 3996),
        ({"max_tokens": 4096}, 4096, 101, 4096),
        ({"max_tokens": 10**6}, 4096, 101, 4096),
        ({"max_tokens": 10**6, "n": 3}, 4096, 103, 100 + 3 * 3996),
        ({"max_tokens": 10}, 60, 100, 100),  # the worker refuses it
        ({"max_tokens": 100}, 60, 100, 100),
        ({"max_tokens": 300}, None, 100 + 300, 100 + 300),
    ],
)
def test_what_can_be_computed_is_reserved(
    fields: dict[str, Any], max_model_len: int | None, num_least: int, num_tokens: int
) -> None:
    request = GenerateRequest(prompt_token_ids=tuple(range(100)), **fields)
    order = order_for("k", OutgoingRequest("default", "r", request, is_shared=False), max_model_len)
    assert (order.num_least, order.num_tokens, order.num_at_once) == (num_least, num_tokens, request.n)


@pytest.mark.parametrize("more", [{}, {"max_tokens": 4096}, {"max_tokens": 10**6}])
async def test_answers_of_any_length_run_one_at_a_time_under_a_small_limit(
    redis: RedisClient, redis_url: str, more: dict[str, Any]
) -> None:
    """So no more than one of them exceeds the limit; if they are short, the next one need not wait for a minute."""
    secret = await new_key(redis_url, limits={"tokens_per_minute": 2000})
    go_on = asyncio.Event()
    num_tokens = iter((10, 10, 4000))

    async def when_told(reply: ScriptedReply) -> None:
        await reply.own()
        await go_on.wait()
        await reply.chunk("x" * next(num_tokens))
        await reply.end("length")

    await announce(redis)
    async with ScriptedWorker(redis_url, when_told) as worker, two_gateways(redis_url) as gateways:
        headers, body = {"authorization": f"Bearer {secret.text}"}, {**chat("hello"), "model": "tiny", **more}

        async def ask(number: int) -> httpx2.Response:
            return await gateways[number % 2].post(CHAT, json=body, headers=headers)

        async def is_settled() -> bool:
            return not await redis.exists(names.key_open(secret.key_id))

        first = asyncio.create_task(ask(0))
        await eventually(lambda: worker.taken)
        for refused in await asyncio.gather(*(ask(number) for number in range(9))):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        go_on.set()
        for asked in (first, ask(1), ask(0)):
            answer = await asked
            assert answer.status_code == 200, answer.text
            await eventually(is_settled)
        assert [(await ask(number)).status_code for number in range(9)] == [429] * 9
        assert await counted(redis, secret.key_id) >= 4020


async def test_lists_and_n_are_one_request_in_the_minute_and_as_many_at_once(
    redis: RedisClient, redis_url: str
) -> None:
    secret = await new_key(redis_url, limits={"requests_per_minute": 9, "max_concurrent": 5})
    go_on = asyncio.Event()

    async def when_told(reply: ScriptedReply) -> None:
        await reply.own()
        await go_on.wait()
        await reply.end()

    await announce(redis)
    async with ScriptedWorker(redis_url, when_told) as worker, two_gateways(redis_url) as [here, there]:
        headers, asked = {"authorization": f"Bearer {secret.text}"}, {"model": "tiny", "prompt": "a"}
        four = {**asked, "prompt": ["a", "b"], "n": 2}
        asking = asyncio.create_task(here.post(COMPLETIONS, json=four, headers=headers))
        await eventually(lambda: sum(request.n for request in worker.taken) == 4)
        refused = await there.post(COMPLETIONS, json={**asked, "n": 2}, headers=headers)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "true")
        never = await there.post(COMPLETIONS, json={**asked, "n": 6}, headers=headers)
        assert (never.status_code, never.headers["x-should-retry"]) == (429, "false")
        assert "6 are asked for at once" in never.text
        fits = asyncio.create_task(there.post(COMPLETIONS, json=asked, headers=headers))
        await eventually(lambda: sum(request.n for request in worker.taken) == 5)
        go_on.set()
        assert {answer.status_code for answer in await asyncio.gather(asking, fits)} == {200}
        requests = await redis.hgetall(names.key_requests(secret.key_id))
        assert sum(map(int, requests.values())) == 4


async def test_streams_that_were_left_with_a_key_go_on_counting(redis: RedisClient, redis_url: str) -> None:
    """Counting goes on until nobody has read them for a while; a client that comes back is let in meanwhile."""
    secret = await new_key(redis_url, limits={"max_concurrent": 1, "tokens_per_minute": 10**6})
    go_on = asyncio.Event()
    taken: list[GenerateRequest] = []

    async def when_told(reply: ScriptedReply) -> None:
        taken.append(reply.request)
        await reply.own()
        await reply.chunk("begun")
        await go_on.wait()
        await reply.end()

    await announce(redis)
    async with ScriptedWorker(redis_url, when_told), two_gateways(redis_url) as [here, there]:
        body = {"model": "tiny", "prompt": "a", "stream": True}
        headers = {"authorization": f"Bearer {secret.text}", "Idempotency-Key": "one"}
        async with here.stream("POST", COMPLETIONS, json=body, headers=headers) as left:
            assert left.status_code == 200
        other = await there.post(COMPLETIONS, json=body, headers={**headers, "Idempotency-Key": "two"})
        assert other.status_code == 429, other.text
        back = asyncio.create_task(there.post(COMPLETIONS, json=body, headers=headers))
        await eventually(lambda: redis.zcard(names.readers()))
        go_on.set()
        assert (await back).status_code == 200
        assert await counted(redis, secret.key_id) == 1 + len("begun")
        assert (await there.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
        assert await counted(redis, secret.key_id) == 1 + len("begun")
        assert len(taken) == 1
