"""Clients that never stop asking, and an update of the workers and gateways that answer them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import openai

from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import expected_text
from tests.deploy.fleets import Gateway, Gateways, Worker, Workers, gateways_at, workers_of
from tests.support.patience import eventually

CLIENTS, REPLICAS = 4, 2
LENGTHS = (5, 60)  # tokens; the long ones outlast a worker's time to drain


@dataclass
class Service:
    """Sends requests to the gateways that are ready, as a Service of Kubernetes does, and keeps the results.

    Half of the clients open a connection for each request and try once. The others keep theirs, as OpenAI's client
    does, which retries where a connection was closed as it sent.
    """

    gateways: list[Gateway] = field(default_factory=list)
    num_answered: int = 0
    is_over: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _unanswered: Counter[Gateway] = field(default_factory=Counter)
    _clients: dict[tuple[str, bool], openai.AsyncOpenAI] = field(default_factory=dict)

    async def ask_until_over(self, keeps_connections: bool) -> None:
        while not self.is_over:
            number = next(self._numbers)
            gateway = self.gateways[number % len(self.gateways)]
            await self._ask(gateway, keeps_connections, number)
            self.num_answered += 1

    async def remove(self, gateway: Gateway) -> None:
        """Sends `gateway` nothing more, and waits until what was sent is being answered.

        That is what a pod's preStop hook sleeps for. A gateway resets connections that it has not accepted by SIGTERM.
        """
        self.gateways.remove(gateway)
        await eventually(lambda: not self._unanswered[gateway])

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _ask(self, gateway: Gateway, keeps_connections: bool, number: int) -> None:
        length = LENGTHS[number % len(LENGTHS)]
        prompt = f"request {number}"
        self._unanswered[gateway] += 1
        stream = await self._client(gateway, keeps_connections).completions.create(
            model="q", prompt=prompt, max_tokens=length, seed=number, stream=True, temperature=0,
            extra_headers={"Idempotency-Key": f"key-{number}"},
        )  # fmt: skip
        self._unanswered[gateway] -= 1
        chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
        assert "".join(chunk.text for chunk in chunks) == expected_text(prompt, number, length)
        assert chunks[-1].finish_reason == "length"

    def _client(self, gateway: Gateway, keeps_connections: bool) -> openai.AsyncOpenAI:
        place = (gateway.url, keeps_connections)
        if place not in self._clients:
            limits = httpx2.Limits(max_keepalive_connections=None if keeps_connections else 0)
            self._clients[place] = openai.AsyncOpenAI(
                base_url=f"{gateway.url}/v1",
                api_key="none",
                max_retries=2 if keeps_connections else 0,
                http_client=httpx2.AsyncClient(limits=limits, timeout=60),
            )
        return self._clients[place]


@asynccontextmanager
async def under_load(service: Service) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Fails at the first error that a client sees. The function that it gives waits for an answer to each client."""
    async with aclosing(service), asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(service.ask_until_over(keeps_connections=number % 2 == 1))

        async def go_on() -> None:
            goal = service.num_answered + CLIENTS
            await eventually(lambda: service.num_answered >= goal)

        yield go_on
        service.is_over = True


@dataclass
class Fleet:
    """A Deployment of workers and one of gateways: a new pod is ready before an old one is stopped."""

    service: Service
    gateways: Gateways
    workers: list[Worker] = field(default_factory=list)

    async def roll_workers(self, start: Callable[[], Awaitable[Worker]]) -> None:
        for old in list(self.workers):
            self.workers.append(await start())
            self.workers.remove(old)
            await old.stop()

    async def roll_gateways(self, tree: Path) -> None:
        for old in list(self.service.gateways):
            self.service.gateways.append(await self.gateways.start(tree))
            await self.service.remove(old)
            await old.stop()

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.stop()
        for gateway in self.service.gateways:
            await gateway.stop()


@asynccontextmanager
async def two_versions(
    trees: Mapping[str, Path], redis: RedisClient, url: str, folder: Path
) -> AsyncIterator[tuple[Fleet, Workers, Workers]]:
    """Runs replicas of `old`; yields them, and what starts workers of each version. At the end, all must stop well."""
    async with AsyncExitStack() as stack:
        fleet = Fleet(Service(), await stack.enter_async_context(gateways_at(url)))
        old, new = [
            await stack.enter_async_context(workers_of(version, trees[version], redis, url, folder))
            for version in ("old", "new")
        ]
        fleet.workers = [await old.start() for _ in range(REPLICAS)]
        fleet.service.gateways = [await fleet.gateways.start(trees["old"]) for _ in range(REPLICAS)]
        yield fleet, old, new
        await fleet.stop()
