"""`penstock chaos` as people run it."""

from __future__ import annotations

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.protocol.redis.connection import RedisClient
from tests.cli.cli_process import command, penstock

FEW = ("--requests", "12", "--kills", "1", "--zombies", "1", "--losses", "2", "--seed", "5")


async def test_against_a_deployment_that_is_left_as_it_was(redis_server: EmbeddedServer, redis: RedisClient) -> None:
    await redis.set("theirs", "1")
    outcome = await penstock("chaos", *FEW, "--redis-url", redis_server.url)
    assert outcome.status == 0, outcome
    rows = dict(line.rsplit(maxsplit=1) for line in outcome.out.splitlines() if line)
    assert (rows["seed"], rows["requests"], rows["kills"], rows["zombies"]) == ("5", "12", "1", "1")
    assert [rows[name] for name in ("lost", "doubled", "out of order", "wrong", "late")] == ["0"] * 5
    assert [name for name in await redis.keys() if ":worker:" not in name] == ["theirs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "3"], "the number of faults"),
        (["--workers", "1"], "workers must be 2 or more"),
        (["--redis-url", "redis://localhost:1/0", "--restarts", "1"], "is not restarted"),
        (["--redis-url", "rediss://localhost:1/0"], "plain TCP"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    outcome = command("chaos", *arguments)
    assert outcome.status == 2
    assert message in " ".join(outcome.err.replace("│", " ").split())
