"""A gateway process knows which queue serves which model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.gateway.directory import Directory
from penstock.gateway.errors import ApiError
from penstock.producer import ConnectionLost, ModelCard


class Away:
    """A client whose server never answers."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def queues(self) -> Any:
        self.num_asked += 1
        await asyncio.sleep(0)
        raise ConnectionLost("no connection to Redis")


async def test_who_asks_while_redis_is_away_does_not_wait_for_the_failures_of_others() -> None:
    client: Any = Away()
    directory = Directory(client)
    outcomes = await asyncio.gather(*(directory.cards() for _ in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 5
    assert client.num_asked == 1
    with pytest.raises(ConnectionLost):
        await directory.cards()
    assert client.num_asked == 2


class Served:
    """A client of queues that are served as `cards` says."""

    def __init__(self) -> None:
        self.cards: dict[str, ModelCard] = {}
        self.num_asked = 0

    async def queues(self) -> list[str]:
        self.num_asked += 1
        await asyncio.sleep(0)
        return list(self.cards)

    async def model_card(self, *, queue: str) -> ModelCard | None:
        return self.cards.get(queue)


async def test_a_worker_that_has_just_joined_is_found() -> None:
    client: Any = Served()
    directory = Directory(client)
    assert await directory.cards() == {}
    client.cards["q"] = ModelCard(model="m", worker="w", version="1")
    assert await directory.queue_of("m") == "q"
    client.cards["other"] = ModelCard(model="n", worker="w", version="1")
    assert (await directory.card_of("other")).model == "n"
    assert client.num_asked == 3
    assert await directory.queue_of("n") == "other"
    assert client.num_asked == 3


async def test_requests_for_what_nobody_serves_share_a_read() -> None:
    client: Any = Served()
    directory = Directory(client)
    await directory.cards()
    outcomes = await asyncio.gather(
        *(directory.queue_of(f"m{number}") for number in range(100)), return_exceptions=True
    )
    assert [outcome.code for outcome in outcomes if isinstance(outcome, ApiError)] == ["no_worker"] * 100
    assert client.num_asked == 2
