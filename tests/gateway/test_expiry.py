"""Expired requests whose worker is gone and can't say so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.gateway.generation import jobs
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_client import CHAT, bare_client, chat, events_of
from tests.support.programs.gateway_harness import announce, running_gateway

KEY = {"Idempotency-Key": "k"}


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "EXPIRY_GRACE_S", 0.2)


async def test_who_waits_for_a_worker_that_died_waits_no_longer_than_the_request_may(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_over = asyncio.Event()

    async def die(reply: ScriptedReply) -> None:
        await reply.own()
        if reply.request.seed is not None:
            await reply.chunk("half an ")
        await taken_over.wait()
        await reply.end("expired")

    await announce(redis)
    async with (
        ScriptedWorker(redis_url, die) as worker,
        running_gateway(redis_url) as gateway,
        bare_client(gateway) as client,
    ):
        forms: list[dict[str, Any]] = [{}, {"stream": True}]
        for fields in forms:
            late = await client.post(CHAT, json=chat(timeout_s=0.1, **fields))
            error = late.json()["error"]
            assert (late.status_code, error["type"], error["code"]) == (408, "timeout_error", "expired")
            assert "timeout_s of 0.1 s is over" in error["message"]
            assert late.headers["x-should-retry"] == "false"
        monkeypatch.setattr(jobs, "EXPIRY_GRACE_S", 3.0)  # for the first chunk to come
        begun = await client.post(CHAT, json=chat(timeout_s=0.1, seed=1, stream=True))
        assert begun.status_code == 200
        assert events_of(begun.text)[-1].document["error"]["code"] == "expired"
        assert "[DONE]" not in begun.text
        cancels = {keys.cancel("default", request.id or "") for request in worker.taken}
        assert len(cancels) == 3
        await eventually(lambda: _are_there(redis, cancels))
        taken_over.set()


async def test_who_joins_gets_what_the_request_came_to(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    come_back = asyncio.Event()

    async def finish_late(reply: ScriptedReply) -> None:
        await reply.own()
        await come_back.wait()
        await reply.chunk("in time after all")
        await reply.end()

    await announce(redis)
    async with (
        ScriptedWorker(redis_url, finish_late) as worker,
        running_gateway(redis_url) as gateway,
        bare_client(gateway) as client,
    ):
        assert (await client.post(CHAT, json=chat(timeout_s=0.1), headers=KEY)).status_code == 408
        monkeypatch.setattr(jobs, "EXPIRY_GRACE_S", WAIT_S)
        come_back.set()
        joined = await client.post(CHAT, json=chat(timeout_s=0.1), headers=KEY)
        assert joined.json()["choices"][0]["message"]["content"] == "in time after all"
        assert len(worker.taken) == 1


async def _are_there(redis: RedisClient, names: set[str]) -> bool:
    return await redis.exists(*names) == len(names)
