"""A gateway process knows which queue serves which model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.gateway.directory import Directory
from penstock.producer import ConnectionLost


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
