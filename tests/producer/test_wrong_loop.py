"""An AsyncClient used in two event loops says so, and never waits in silence."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from penstock import AsyncClient
from tests.support.patience import WAIT_S

# What the first event loop had open went with it.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _gone_with_the_test() -> Iterator[None]:
    yield
    gc.collect()


Use = Callable[[AsyncClient], Awaitable[object]]


async def _iterate(client: AsyncClient) -> None:
    async for _ in client.stream("x"):
        pass


async def _map(client: AsyncClient) -> None:
    async for result in client.map(["x"]):
        if result.error is not None:
            raise result.error


async def _follow(client: AsyncClient) -> None:
    async for _ in client.handle("r").stream():
        pass


USES: dict[str, Use] = {
    "submit": lambda client: client.submit("x"),
    "generate": lambda client: client.generate("x"),
    "stream": _iterate,
    "map": _map,
    "queue_status": lambda client: client.queue_status(),
    "count_tokens": lambda client: client.count_tokens("x"),
    "tokenize": lambda client: client.tokenize("x"),
    "detokenize": lambda client: client.detokenize([1]),
    "validate": lambda client: client.validate("x"),
    "model_card": lambda client: client.model_card(),
    "queues": lambda client: client.queues(),
    "handle.stream": _follow,
    "handle.result": lambda client: client.handle("r").result(),
    "handle.cancel": lambda client: client.handle("r").cancel(),
    "handle.state": lambda client: client.handle("r").state(),
    "on": lambda client: client.on("other").queue_status(),
}


def test_all_that_asks_redis_is_there() -> None:
    calls = {name for name in vars(AsyncClient) if not name.startswith("_")}
    assert calls - {"handle", "close", "redis_clients"} <= USES.keys()


async def within(use: Awaitable[object]) -> object:
    return await asyncio.wait_for(use, WAIT_S)


def test_a_second_asyncio_run_is_refused_by_name(redis_url: str) -> None:
    told = {name: refusal_of(use, redis_url) for name, use in USES.items()}
    assert [name for name, refusal in told.items() if "make one for each asyncio.run" not in refusal] == []


def refusal_of(use: Use, redis_url: str) -> str:
    client = AsyncClient(redis_url)
    asyncio.run(within(client.queue_status()))
    with pytest.raises(RuntimeError) as refused:
        asyncio.run(within(use(client)))
    asyncio.run(within(client.close()))  # there is nothing left to close
    return str(refused.value)


def test_a_second_thread_is_refused_and_the_first_goes_on(redis_url: str) -> None:
    failed: list[str] = []

    def run(client: AsyncClient) -> None:
        for use in (client.queue_status, client.close):
            try:
                asyncio.run(within(use()))
            except RuntimeError as error:
                failed.append(str(error))

    async def first() -> None:
        async with AsyncClient(redis_url) as client:
            await client.queue_status()
            other = threading.Thread(target=run, args=[client])
            other.start()
            await asyncio.to_thread(other.join)
            await client.queue_status()

    asyncio.run(within(first()))
    assert [message.partition(" was ")[0] for message in failed] == ["this AsyncClient"] * 2
