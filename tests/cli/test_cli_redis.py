"""Commands that talk to Redis themselves."""

from __future__ import annotations

import pytest

from penstock.cli.shared.redis import connected, visible
from penstock.producer import BadAddress, ConnectionLost, ServerRefused


async def test_connected(redis_url: str) -> None:
    async with connected(redis_url) as redis:
        await redis.set("x", "y")
        assert await redis.get("x") == b"y"


async def test_errors_are_those_of_the_client(redis_url: str) -> None:
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1"):
        async with connected("redis://127.0.0.1:1") as redis:
            await redis.ping()
    with pytest.raises(ServerRefused, match="unknown command"):
        async with connected(redis_url) as redis:
            await redis.execute_command("NONSENSE")
    with pytest.raises(BadAddress):
        async with connected("http://127.0.0.1"):
            raise AssertionError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ntext é", "plain\ntext é"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\rb\tc", r"a\rb\tc"),
        ("\u202e", r"\u202e"),
    ],
)
def test_nothing_that_a_stranger_sent_steers_the_terminal(text: str, shown: str) -> None:
    assert visible(text) == shown
