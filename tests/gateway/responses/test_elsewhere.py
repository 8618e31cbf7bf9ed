"""Responses whose gateway goes, whose API key is another one, or whose Redis is a cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from tests.gateway.responses.responses_harness import Asked, answer, asking, events_of, strictly
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ScriptedWorker
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_harness import announce, new_key, running_gateway


async def test_a_stored_response_goes_on_where_its_gateway_has_to_leave_it(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with ScriptedWorker(redis_url, answer) as worker, Asked.beside(worker, redis, redis_url) as other:
        async with (
            running_gateway(redis_url) as gateway,
            httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
        ):
            body = {"model": "tiny", "input": "wait here", "stream": True}
            async with http.stream("POST", "/v1/responses", json=body) as stream:
                text = ""
                async for part in stream.aiter_text():
                    text += part
                    if "output_text.delta" in text and not gateway.server.should_exit:
                        gateway.server.stop()
        *events, error = events_of(text)
        assert (error.type, error.sequence_number) == ("error", events[-1].sequence_number)
        response_id = events[0].response.id
        assert f"GET /v1/responses/{response_id}?stream=true&starting_after={error.sequence_number} " in error.message
        assert not await redis.exists(keys.cancel("default", worker.taken[0].id or ""))
        await other.openai.responses.cancel(response_id)
        rest = events_of(await other.stream_of(response_id, starting_after=error.sequence_number))
        assert [event.sequence_number for event in (*events, *rest)] == list(range(len(events) + len(rest)))
        assert rest[-1].response.status == "cancelled"


async def test_what_ends_a_stream_from_outside_raises_in_the_client(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with (
        ScriptedWorker(redis_url, answer),
        running_gateway(redis_url) as gateway,
        openai_client(gateway.url) as client,
    ):
        stream = await client.responses.create(model="tiny", input="wait here", stream=True)
        await anext(stream)
        gateway.server.stop()
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_a_response_in_the_foreground_ends_once_nobody_reads_it(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with (
        ScriptedWorker(redis_url, answer) as worker,
        Asked.beside(worker, redis, redis_url, abandon_after_s=0.2) as other,
    ):
        async with running_gateway(redis_url, abandon_after_s=0.2) as gateway:
            client = openai_client(gateway.url)
            background = await client.responses.create(model="tiny", input="wait for ever", background=True)
            stream = await client.responses.create(model="tiny", input="wait here", stream=True)
            created: Any = await anext(stream)
            gateway.server.stop()
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
            await client.close()

        async def is_cancelled() -> bool:
            return (await other.openai.responses.retrieve(created.response.id)).status == "cancelled"

        await eventually(is_cancelled)
        assert (await other.openai.responses.retrieve(background.id)).status == "in_progress"
        await other.openai.responses.cancel(background.id)


async def test_no_key_finds_the_responses_of_another(redis: RedisClient, redis_url: str) -> None:
    mine, other = await new_key(redis_url, tenant="us"), await new_key(redis_url)
    await announce(redis)
    async with ScriptedWorker(redis_url, answer) as worker, running_gateway(redis_url) as gateway:
        clients = [openai_client(gateway.url, key.text) for key in (mine, other)]
        response = await clients[0].responses.create(model="tiny", input="say it")
        assert worker.taken[0].tenant == "us"
        theirs = clients[1].responses
        for ask in (theirs.retrieve, theirs.cancel, theirs.delete, theirs.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await ask(response.id)
        with pytest.raises(openai.NotFoundError):
            await theirs.retrieve(response.id, stream=True)
        with pytest.raises(openai.NotFoundError):
            await theirs.create(model="tiny", input="say it", previous_response_id=response.id)
        assert (await clients[0].responses.retrieve(response.id)).output_text == "it"
        await asyncio.gather(*(client.close() for client in clients))


async def test_responses_in_a_cluster(redis_cluster_url: str) -> None:
    redis = connect(redis_cluster_url, decode=True)
    try:
        async with asking(redis, redis_cluster_url) as asked:
            first = await asked.create("say it", background=True)

            async def has_ended() -> bool:
                return (await asked.openai.responses.retrieve(first.id)).status == "completed"

            await eventually(has_ended)
            second = await asked.create("say more", previous_response_id=first.id)
            assert strictly(await asked.openai.responses.retrieve(second.id)) == second
            assert events_of(await asked.stream_of(second.id))[-1].response == second
            await asked.openai.responses.delete(second.id)
    finally:
        await redis.aclose()
