"""A model behind an address, whose workers and gateways are killed in the middle of replies that programs wait for.

A gateway runs in this process. To its clients and to Redis a killed one is one whose connections have all ended, and
that never comes back.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.engine.demo import MODEL_DIR
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.process import ModelWorker
from tests.support.patience import WAIT_S, eventually
from tests.support.programs import held_worker
from tests.support.programs.charges import all_charged, published, replies
from tests.support.programs.fakes import LossyProxy
from tests.support.programs.gateway_harness import Running, new_key, running_gateway
from tests.support.programs.gateway_model import QUEUE, TEMPLATE, WORKER
from tests.support.programs.worker_harness import QUICK
from tests.support.redis_servers.forwarding import Forwarding
from tests.support.redis_servers.streams import read_scores, read_stream

NUM_WORKERS = 2
ONE_BY_ONE: Mapping[str, Any] = {"decode_steps": 1, "speculation": "off"}  # no step gives the rest of a reply
MAX_MODEL_LEN = 2560  # some programs write prompts of two thousand tokens


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that can be killed."""

    running: Running
    proxy: LossyProxy
    stack: AsyncExitStack

    @classmethod
    async def started(cls, redis_port: int, **settings: Any) -> Gateway:
        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(LossyProxy(redis_port))
            given = {"redis_timeout_s": 1.0, "abandon_after_s": WAIT_S, **settings}
            running = await stack.enter_async_context(running_gateway(proxy.url, **given))
            return cls(running, proxy, stack.pop_all())


class Address(Forwarding):
    """Where clients find a gateway, whichever it is."""

    def __init__(self, redis_port: int, **settings: Any) -> None:
        super().__init__("127.0.0.1", 0)
        self._start = partial(Gateway.started, redis_port, **settings)
        self._gateway: Gateway | None = None
        self._closing: list[asyncio.Task[None]] = []  # those that were killed

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        await self._open()
        await super().listen()

    async def _open(self) -> None:
        """Starts a gateway, which gets the connections from now on."""
        self._gateway = await self._start()
        self.lead_to(self._gateway.running.port)

    async def kill(self) -> None:
        """Kills the gateway. Another one is there already."""
        killed = self._gateway
        assert killed is not None
        await self._open()
        await killed.proxy.refuse()  # first: a client that leaves is another thing
        self.reset()
        self._closing.append(asyncio.create_task(killed.stack.aclose()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        assert self._gateway is not None
        await asyncio.gather(self._gateway.stack.aclose(), *self._closing)


class Workers:
    """Two workers with a model. Another one comes for one that was killed."""

    def __init__(self, redis_url: str, model: Path, folder: Path, compile_cache: Path) -> None:
        self.hold = folder / "hold"
        self._url, self._folder = redis_url, folder
        self._settings: Mapping[str, Any] = {
            **QUICK, **WORKER, **ONE_BY_ONE, "max_model_len": MAX_MODEL_LEN, "heartbeat_ttl_s": 2.0, "model": model,
            "compile_cache_dir": compile_cache, "health_port": None,
        }  # fmt: skip
        self._names = (f"worker-{number}" for number in count())
        self._running: dict[str, ModelWorker] = {}

    def start(self) -> None:
        name = next(self._names)
        program = (held_worker.__file__, str(self.hold))
        settings = {**self._settings, "name": name}
        self._running[name] = ModelWorker(self._url, self._folder / f"{name}.log", settings, program)

    async def kill(self, name: str) -> None:
        killed = self._running.pop(name)
        killed.send(signal.SIGKILL)
        await asyncio.to_thread(killed.wait, WAIT_S)

    async def have_joined(self, redis: RedisClient) -> bool:
        """Whether both serve. Fails where one has ended."""
        for name, worker in self._running.items():
            assert worker.poll() is None, (self._folder / f"{name}.log").read_text()[-3000:]
        serving = await read_scores(redis, keys.serving(QUEUE))
        return serving.keys() >= self._running.keys()

    async def stop(self) -> None:
        for name in [*self._running]:
            await self.kill(name)


class Stage:
    """What one program after the other is run against.

    Attributes:
        address: of the gateway.
    """

    def __init__(self, redis: RedisClient, redis_url: str, address: Address, workers: Workers) -> None:
        self._redis, self._redis_url = redis, redis_url
        self.address = address
        self._workers = workers
        self._key_id = ""
        self._others: frozenset[str] = frozenset()  # replies to programs before this one
        self._disturbing: asyncio.Task[None] | None = None

    async def next_key(self) -> str:
        """Returns an API key for the next program, its alone."""
        secret = await new_key(self._redis_url, limits={"tokens_per_minute": 10**9, "max_concurrent": 10**6})
        self._key_id = secret.key_id
        self._others = await replies(self._redis, QUEUE)
        return secret.text

    async def have(self, what: str) -> None:
        """Does what a program asks for: kills something in the middle of its next reply, or looks what came of it."""
        if what == "looked":
            assert self._disturbing is not None
            await self._disturbing
            return
        kill = {"worker killed": self._kill_worker, "gateway killed": self._kill_gateway}[what]
        await eventually(lambda: self._workers.have_joined(self._redis))
        self._workers.hold.touch()
        self._disturbing = asyncio.create_task(kill(await replies(self._redis, QUEUE)))

    async def _kill_worker(self, known: frozenset[str]) -> None:
        async with self._held(known) as reply:
            (owner,) = await self._owners(reply)
            await self._workers.kill(owner)
        self._workers.start()
        await eventually(lambda: self._has_ended(reply))
        assert len(await self._owners(reply)) > 1

    async def _kill_gateway(self, known: frozenset[str]) -> None:
        """The program asks again, and its key is charged for what was published of both replies."""
        async with self._held(known):
            await self.address.kill()

        async def is_asked_again() -> bool:
            return len(await replies(self._redis, QUEUE) - known) > 1

        async def is_charged() -> bool:
            expected = await published(self._redis, QUEUE, self._others)
            return await all_charged(self._redis, self._key_id) == expected

        await eventually(is_asked_again)
        await eventually(is_charged)

    @asynccontextmanager
    async def _held(self, known: frozenset[str]) -> AsyncIterator[str]:
        """Waits for text of a reply that is not known; workers hold it until the block ends."""
        kinds: dict[str, list[str]] = {}  # of entries, by their replies

        async def has_begun() -> bool:
            for name in await replies(self._redis, QUEUE) - known:
                kinds[name] = [fields["type"] for _, fields in await read_stream(self._redis, name)]
            return any("chunk" in each for each in kinds.values())

        try:
            with suppress(AssertionError):
                await eventually(has_begun)
            begun = [name for name, each in kinds.items() if "chunk" in each]
            assert begun, f"nothing to disturb: {kinds}"
            yield begun[0]
        finally:
            self._workers.hold.unlink()

    async def _owners(self, reply: str) -> set[str]:
        return {fields["worker"] for _, fields in await read_stream(self._redis, reply) if fields["type"] == "own"}

    async def _has_ended(self, reply: str) -> bool:
        return (await read_stream(self._redis, reply))[-1][1]["type"] == "end"


@asynccontextmanager
async def staged(folder: Path, compile_cache: Path) -> AsyncIterator[Stage]:
    """Serves the queue `chats` until the end of the block.

    Args:
        folder: empty directory.
        compile_cache: directory of compiled programs.
    """
    model = folder / "model"
    await asyncio.to_thread(shutil.copytree, MODEL_DIR, model)
    await asyncio.to_thread(shutil.copy, TEMPLATE, model / "chat_template.jinja")
    with EmbeddedServer() as server:
        redis = connect(server.url, decode=True)
        workers = Workers(server.url, model, folder, compile_cache)
        address = Address(server.port)
        try:
            for _ in range(NUM_WORKERS):
                workers.start()
            async with address:
                await eventually(lambda: workers.have_joined(redis))
                yield Stage(redis, server.url, address, workers)
        finally:
            await workers.stop()
            await redis.aclose()
