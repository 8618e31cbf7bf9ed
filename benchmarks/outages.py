"""Measures how soon work goes on after Redis refused, or did not answer: seconds from the end of each outage.

    python -m benchmarks.outages

The setup is a server, a proxy that answers in its place, and behind the proxy a worker whose engine is a timer, a
gateway and a client. While the outage lasts, a request waits in the queue for the worker and a stream is open; a
library call, an upload to the gateway and a look of `penstock top` are retried continually (`top` itself looks once a
second). With a moved name, the outage ends when new connections reach a server that takes writes; old ones stay with
the demoted one. With a silent death, existing connections go nowhere from then on, and new ones work. The seconds are
counted from that moment, for a stream and for each idle client, each as if in a process of its own. Medians over
rounds. Appends to `benchmarks/results/outages.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from rich.console import Console

from benchmarks.parts.tables import RESULTS, table_of
from penstock.cli.top import ANSWER_S
from penstock.gateway.server import GatewayServer
from penstock.gateway.settings import GatewaySettings
from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, Handle, PenstockError
from penstock.protocol.operations.collector import look
from penstock.protocol.redis.address import parse_url
from penstock.protocol.redis.connection import answered, connect
from penstock.tools.bench.report import append_result
from penstock.tools.chaos.process import FakeWorker
from penstock.worker.logs import configure_logs
from tests.support.redis_servers.moved_name import MovingName
from tests.support.redis_servers.refusing_proxy import FULL, PASSING, REFUSED

QUEUE = "outages"
SILENCE, CLIENTS, MOVED, DEATH = "silence", "max number of clients", "moved name", "silent death"
OUTAGES = (*PASSING, CLIENTS, *REFUSED, MOVED, SILENCE, DEATH)
FORGIVEN_S = 16.0  # after a death, until the next one counts as the first again
READ_AHEAD_S = 0.5  # chunks that come this soon after a death were sent before it
TRY_EVERY_S = 0.05
GIVE_UP_S = 60.0

Try = Callable[[], Awaitable[object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a refusal")
    parser.add_argument("--silence", type=float, default=20.0, help="seconds without an answer")
    parser.add_argument("--outages", nargs="*", choices=OUTAGES, default=OUTAGES, metavar="CODE")
    arguments = parser.parse_args()
    configure_logs("error")
    rows = asyncio.run(measure(arguments))
    append_result(RESULTS / "outages.jsonl", {**vars(arguments), "after_s": rows})
    Console().print(table_of("seconds until work goes on", rows))


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    async with AsyncExitStack() as stack:
        lab = await Lab.opened(stack)
        for outage in arguments.outages:
            lasts_s = arguments.silence if outage == SILENCE else arguments.seconds
            num_rounds = 1 if outage == SILENCE else arguments.rounds
            rounds = [await (lab.die() if outage == DEATH else lab.suffer(outage, lasts_s)) for _ in range(num_rounds)]
            medians = {name: median(each[name] for each in rounds) for name in rounds[0]}
            rows.append({"outage": outage, **medians})
            Console(stderr=True).print(rows[-1])
    return rows


class Lab:
    """Everything that the outages hit.

    Args:
        proxy: answers in the server's place.
        direct: a client of the server itself.
        client: behind the proxy, for calls.
        reader: also behind the proxy, reads the stream and sends nothing.
        http: a client of a gateway behind the proxy.
        top: the connection of a screen.
    """

    def __init__(
        self,
        proxy: MovingName,
        direct: AsyncClient,
        client: AsyncClient,
        reader: AsyncClient,
        http: httpx2.AsyncClient,
        top: Any,
    ) -> None:
        self._proxy = proxy
        self._direct = direct
        self._client = client
        self._reader = reader
        self._http = http
        self._top = top
        self._ended_s = 0.0

    @classmethod
    async def opened(cls, stack: AsyncExitStack) -> Lab:
        server = stack.enter_context(EmbeddedServer())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy = await stack.enter_async_context(MovingName(server.url))
        worker = FakeWorker(
            proxy.url,
            folder / "log",
            {"max_num_seqs": 16, "step_s": 0.02},
            {"queue": QUEUE, "health_port": None, "name": "w"},
        )
        stack.callback(worker.send, signal.SIGKILL)
        direct = await stack.enter_async_context(AsyncClient(server.url, queue=QUEUE))
        # Each notices by itself: within one process, all connections to one place are dropped together.
        urls = [proxy.url.replace("127.0.0.1", host) for host in ("127.0.0.1", "localhost", "127.1", "127.0.1")]
        client, reader = [await stack.enter_async_context(AsyncClient(url, queue=QUEUE)) for url in urls[:2]]
        async with asyncio.timeout(GIVE_UP_S):
            await direct.generate("x", max_tokens=1)  # once the worker is there
        http = await stack.enter_async_context(_gateway(stack, urls[2]))
        top = connect(urls[3], decode=False, retries=0)
        stack.push_async_callback(top.aclose)
        lab = cls(proxy, direct, client, reader, http, top)
        await asyncio.gather(lab._call(), lab._ask(), lab._look())
        return lab

    async def suffer(self, outage: str, lasts_s: float) -> dict[str, float]:
        """Returns seconds from the end of one outage, by client."""
        stream = await self._client.submit("x", max_tokens=10**6)
        chunks = self._reader.handle(stream.id).stream()
        await anext(chunks)
        self._ended_s = 0.0
        self._begin(outage)
        begun_s = time.monotonic()
        trying = [asyncio.create_task(self._until(each)) for each in (self._call, self._ask, self._look)]
        reading = asyncio.create_task(self._next_chunk(chunks))
        await asyncio.sleep(lasts_s / 2)
        waiting = await self._direct.submit("y", max_tokens=3)
        await asyncio.sleep(max(0.0, begun_s + lasts_s - time.monotonic()))
        self._end()
        worker_s = await self._begun(waiting)
        call_s, gateway_s, top_s = await asyncio.gather(*trying)
        stream_s = await reading
        await self._direct.handle(stream.id).cancel()
        async with asyncio.timeout(GIVE_UP_S):
            await waiting.result()
        return {"worker": worker_s, "gateway": gateway_s, "library call": call_s, "stream": stream_s, "top": top_s}

    async def die(self) -> dict[str, float]:
        """Returns seconds from a silent death of all connections, for a stream, then for each idle client."""
        stream = await self._client.submit("x", max_tokens=10**6)
        chunks = stream.stream()
        await anext(chunks)
        self._die()
        stream_s = await self._next_chunk(chunks, READ_AHEAD_S)
        await self._direct.handle(stream.id).cancel()
        await asyncio.sleep(FORGIVEN_S)
        await asyncio.gather(*(self._until(each) for each in (self._call, self._ask, self._look)))
        self._die()
        waiting = await self._direct.submit("y", max_tokens=3)
        worker, *tried = (self._begun(waiting), *(self._until(each) for each in (self._call, self._ask, self._look)))
        worker_s, call_s, gateway_s, top_s = await asyncio.gather(worker, *tried)
        await asyncio.sleep(FORGIVEN_S)
        return {"worker": worker_s, "gateway": gateway_s, "library call": call_s, "stream": stream_s, "top": top_s}

    def _die(self) -> None:
        self._ended_s = time.monotonic()
        self._proxy.forget()

    def _begin(self, outage: str) -> None:
        if outage == SILENCE:
            self._proxy.is_answering.clear()
        elif outage == MOVED:
            self._proxy.demote("quiet")
        elif outage == CLIENTS:
            self._proxy.greeting = FULL
            self._proxy.cut()
        else:
            self._proxy.refuse({**PASSING, **REFUSED}[outage])

    def _end(self) -> None:
        self._ended_s = time.monotonic()
        self._proxy.allow()
        self._proxy.move()
        self._proxy.is_answering.set()

    async def _until(self, attempt: Try) -> float:
        """Retries until an attempt works after the end of the outage."""
        while True:
            try:
                await attempt()
            except (PenstockError, Refused):
                pass
            else:
                if self._ended_s:
                    return time.monotonic() - self._ended_s
            await asyncio.sleep(TRY_EVERY_S)

    async def _call(self) -> None:
        handle = await self._client.submit("z", max_tokens=1)
        if self._ended_s:
            await self._direct.handle(handle.id).cancel()

    async def _ask(self) -> None:
        answer = await self._http.post("/v1/files", files={"file": ("f", b"{}")}, data={"purpose": "batch"})
        if answer.status_code != 200:
            raise Refused

    async def _look(self) -> None:
        async with answered(parse_url(self._proxy.url), ANSWER_S):
            await look(self._top, QUEUE)

    async def _next_chunk(self, chunks: Any, read_ahead_s: float = 0.0) -> float:
        """Waits for the first chunk after the outage: earlier ones were read ahead."""
        async for _ in chunks:
            if self._ended_s and (after_s := time.monotonic() - self._ended_s) >= read_ahead_s:
                return after_s
        raise RuntimeError("the stream ended")

    async def _begun(self, handle: Handle) -> float:
        async with asyncio.timeout(GIVE_UP_S):
            await anext(handle.stream())
        return time.monotonic() - self._ended_s


class Refused(Exception):
    """The gateway refused."""


def _gateway(stack: AsyncExitStack, url: str) -> httpx2.AsyncClient:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    server = GatewayServer(GatewaySettings(redis_url=url, drain_timeout_s=0.1), 256)
    serving = asyncio.create_task(server.serve([listener]))

    async def stop() -> None:
        server.stop()
        await serving

    stack.push_async_callback(stop)
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=GIVE_UP_S)


if __name__ == "__main__":
    main()
