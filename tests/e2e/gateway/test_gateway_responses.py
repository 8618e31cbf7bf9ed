"""Responses lose nothing, whatever is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai

from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import expected_text
from penstock.worker.startup_report import STARTED
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_process import GatewayProcess
from tests.support.programs.worker_process import WorkerProcess

NUM_TOKENS = 100
NUM_RESPONSES = 8


class Follower:
    """Reads one response to its end in the background, and only resumes where it was cut off."""

    def __init__(self, number: int, clients: list[openai.AsyncOpenAI]) -> None:
        self.number = number
        self.events: list[Any] = []
        self.num_cuts = 0
        self._clients = clients

    @property
    def text(self) -> str:
        return "".join(event.delta for event in self.events if event.type == "response.output_text.delta")

    async def follow(self) -> None:
        await self._read(
            await self._clients[0].responses.create(
                model="q",
                input=str(self.number),
                max_output_tokens=NUM_TOKENS,
                background=True,
                stream=True,
                extra_body={"seed": self.number},
            )
        )
        response_id, last = self.events[0].response.id, self.events[-1]
        while last.type not in ("response.completed", "response.incomplete"):
            self.num_cuts += 1
            client = self._clients[(self.number + self.num_cuts) % len(self._clients)]
            try:
                stream = await client.responses.retrieve(response_id, stream=True, starting_after=last.sequence_number)
            except openai.APIConnectionError:  # that gateway is away just now
                await asyncio.sleep(0.05)
            else:
                await self._read(stream)
                last = self.events[-1]

    async def _read(self, stream: AsyncIterator[Any]) -> None:
        try:
            async for event in stream:
                self.events.append(event)
        except (openai.APIConnectionError, httpx2.TransportError):
            pass


async def has_started(worker: WorkerProcess) -> None:
    await eventually(lambda: any(event["event"] == STARTED for event in worker.events()))


async def test_responses_outlive_gateways_and_workers(redis: RedisClient, redis_url: str, tmp_path: Path) -> None:
    """The first worker is so slow that no reply can end before it is killed; the second ends them."""
    gateways = [GatewayProcess(redis_url, tmp_path / f"gateway-{place}.log") for place in range(2)]
    slow, quick = (
        WorkerProcess(redis_url, tmp_path / f"{step_s}.log", engine={"max_num_seqs": 16, "step_s": step_s})
        for step_s in (0.3, 0.0)
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(slow)
        await has_started(slow)
        for gateway in gateways:
            await stack.enter_async_context(gateway)
        clients = [await stack.enter_async_context(openai_client(gateway.url, timeout=WAIT_S)) for gateway in gateways]
        followers = [Follower(number, clients) for number in range(NUM_RESPONSES)]
        async with asyncio.TaskGroup() as group:
            for follower in followers:
                group.create_task(follower.follow())
            await eventually(lambda: all(len(follower.text) > 10 for follower in followers))
            await gateways[0].kill()
            await eventually(lambda: all(follower.num_cuts for follower in followers))
            stack.enter_context(quick)
            await has_started(quick)
            await asyncio.to_thread(slow.kill)
            await gateways[0].start()
        for follower in followers:
            assert follower.text == expected_text(f"user:{follower.number}", follower.number, NUM_TOKENS)
            numbers = [event.sequence_number for event in follower.events]
            assert numbers == list(range(len(numbers)))
            response = await clients[1].responses.retrieve(follower.events[0].response.id)
            assert response.output_text == follower.text
            assert response == follower.events[-1].response
    assert await redis.xlen("penstock:{q}:requests") == 0
