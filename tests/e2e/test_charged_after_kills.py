"""A gateway and a worker are killed under streams: their key is charged what the workers published, once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes import eventually
from gateway_client import CHAT, chat, read_events
from gateway_harness import new_key, running_gateway
from gateway_process import GatewayProcess
from patience import TEST_S, WAIT_S
from worker_process import WorkerProcess

from penstock.gateway.keys import tabs
from penstock.gateway.store import names
from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient
from penstock.worker.introduction import STARTED

QUEUE = "q"
NUM_STREAMS = 6
NUM_TOKENS = 1500  # of each of two choices: for longer than it takes to kill what reads and what writes them


async def begin(client: httpx2.AsyncClient, number: int, headers: dict[str, str], begun: asyncio.Event) -> None:
    """Reads a stream until its gateway is gone."""
    body = chat(str(number), seed=number, n=2, max_tokens=NUM_TOKENS, stream=True) | {"model": QUEUE}
    if number % 2:
        headers = {**headers, "Idempotency-Key": str(number)}
    try:
        async with client.stream("POST", CHAT, json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for _ in read_events(answer):
                begun.set()
    except httpx2.TransportError:
        pass


async def published(redis: RedisClient) -> int | None:
    """All tokens of all replies, prompts too; None: one has not ended."""
    total, names_of_replies = 0, await redis.keys(keys.reply(QUEUE, "*"))
    for name in names_of_replies:
        [(_, last)] = await redis.xrevrange(name, count=1)
        if last["type"] != "end":
            return None
        total += int(last["prompt_tokens"]) + int(last["completion_tokens"])
    return total if len(names_of_replies) == NUM_STREAMS else None


@pytest.mark.timeout(2 * TEST_S)
async def test_a_killed_gateway_s_requests_are_charged_what_was_published(
    redis: RedisClient, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tabs, "_SETTLE", tabs._SETTLE.replace("'EXPIRE', key, 62", "'EXPIRE', key, 6200"))
    secret = await new_key(redis_url, limits={"tokens_per_minute": 10**9, "max_concurrent": 2 * NUM_STREAMS})
    engine = {"max_num_seqs": 2 * NUM_STREAMS, "step_s": 0.02}
    first, second = [WorkerProcess(redis_url, tmp_path / f"worker-{place}.log", engine=engine) for place in "ab"]
    killed = GatewayProcess(redis_url, tmp_path / "gateway.log", abandon_after_s=2)
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]

    async def is_charged() -> bool:
        if await redis.exists(names.key_open(secret.key_id)):
            return False
        counts: Any = await redis.hgetall(names.key_tokens(secret.key_id))
        assert sum(map(int, counts.values())) == await published(redis)
        return True

    with first:
        await eventually(lambda: any(event["event"] == STARTED for event in first.events()))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(killed)
            client = await stack.enter_async_context(
                httpx2.AsyncClient(base_url=killed.url, timeout=WAIT_S, trust_env=False)
            )
            headers = {"authorization": f"Bearer {secret.text}"}
            asked = [(number, headers, event) for number, event in enumerate(begun)]
            streams = [asyncio.create_task(begin(client, *each)) for each in asked]
            for event in begun:
                await event.wait()
            await redis.persist(names.key_tokens(secret.key_id))
            await asyncio.to_thread(first.kill)
            await killed.kill()
            await asyncio.gather(*streams)
        with second:
            async with running_gateway(redis_url, abandon_after_s=2):
                open_tabs: Any = await redis.hkeys(names.key_open(secret.key_id))
                assert open_tabs
                due = {f"{secret.key_id} {tab}": 0 for tab in open_tabs}
                await redis.zadd(names.unsettled(), due)  # as after 15 s
                await eventually(is_charged)
