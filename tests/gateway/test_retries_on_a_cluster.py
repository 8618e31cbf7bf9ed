"""Retries and abandoned requests on a three-node cluster."""

from __future__ import annotations

import asyncio

from penstock.gateway.store import names
from penstock.protocol import keys
from penstock.protocol.ids import slot_of
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_client import CHAT, bare_client, chat, events_of, text_of
from tests.support.programs.gateway_harness import announce, running_gateway

NUM_KEYS = 40


async def answer(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.chunk("two ")
    await reply.chunk("words")
    await reply.end()


async def never_ending(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.cancelled()
    await reply.end("cancelled")


async def test_retries_join_on_a_cluster_over_a_few_connections(redis_cluster_url: str) -> None:
    async with (
        ScriptedWorker(redis_cluster_url, answer) as worker,
        running_gateway(redis_cluster_url) as one,
        running_gateway(redis_cluster_url) as other,
        bare_client(one, other) as clients,
    ):
        await announce(worker.redis)
        asking = [
            client.post(CHAT, json=chat(stream=True), headers={"Idempotency-Key": str(number)})
            for number in range(NUM_KEYS)
            for client in clients
        ]
        answers = await asyncio.gather(*asking)
    streams = [events_of(answer.text) for answer in answers]  # whose chunks may be cut otherwise
    assert {text_of(events) for events in streams} == {"two words"}
    ids = [events[0].document["id"] for events in streams]
    assert ids[::2] == ids[1::2]
    assert len(worker.taken) == NUM_KEYS
    assert len({slot_of(request.id or "") for request in worker.taken}) <= 16


async def test_what_is_abandoned_on_a_cluster_is_cancelled(redis_cluster_url: str) -> None:
    async with (
        ScriptedWorker(redis_cluster_url, never_ending) as worker,
        running_gateway(redis_cluster_url, abandon_after_s=0.3) as gateway,
        bare_client(gateway) as client,
    ):
        await announce(worker.redis)
        asking = asyncio.create_task(client.post(CHAT, json=chat(), headers={"Idempotency-Key": "k"}))
        await eventually(lambda: worker.taken)
        await eventually(lambda: worker.redis.zcard(names.readers()))
        asking.cancel()
        state = keys.state("default", worker.taken[0].id or "")
        await eventually(lambda: _is_done(worker, state))


async def _is_done(worker: ScriptedWorker, state: str) -> bool:
    return await worker.redis.hget(state, "status") == "done"
