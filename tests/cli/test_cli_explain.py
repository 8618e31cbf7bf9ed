"""Tests of `penstock explain`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient
from tests.cli.cli_process import Outcome, command
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker


@pytest.fixture
def redis_url() -> Iterator[str]:
    """URL of one server, which is enough here: what depends on its kind is tested elsewhere."""
    with EmbeddedServer() as server:
        yield server.url


async def explain(redis_url: str, *arguments: str) -> Outcome:
    return await asyncio.to_thread(command, "explain", *arguments, REDIS_URL=redis_url)


async def test_a_request_that_was_taken_over_is_told_with_its_log(redis_url: str, tmp_path: Path) -> None:
    async def twice(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("a")
        reply.epoch = 4
        await reply.own()
        await reply.end("length")

    lines = [
        {"event": "request_ended", "request_id": "mine", "epoch": 4, "timestamp": "2026-02-01T00:00:02Z"},
        {
            "event": "request_dropped",
            "request_id": "x",
            "others": ["mine"],
            "count": 2,
            "timestamp": "2026-02-01T00:00:01Z",
        },
        {"event": "request_ended", "request_id": "other", "about": "mine"},
    ]
    (tmp_path / "w.log").write_text("no JSON of mine\n" + "\n".join(map(json.dumps, lines)))
    async with ScriptedWorker(redis_url, twice), AsyncClient(redis_url) as client:
        await client.generate("secret", id="mine")
        told = await explain(redis_url, "mine", "--logs", str(tmp_path))
        document = json.loads((await explain(redis_url, "mine", "--json")).out)
    assert told.status == 0, told
    said = told.out.splitlines()
    assert said[0].startswith("It has ended")
    assert said[1:3] == ["Taken by scripted (epoch 1).", "Taken over by scripted (epoch 4)."]
    assert "length: it reached max_tokens, or the model's longest context." in said
    assert said[-2:] == [
        "2026-02-01T00:00:01Z w.log: request_dropped others=['mine'] count=2",
        "2026-02-01T00:00:02Z w.log: request_ended epoch=4",
    ]
    assert "secret" not in told.out
    assert (document["state"], document["log"]) == ("ended", [])


async def test_one_that_waits_and_one_that_nobody_knows(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        await client.submit("x", id="mine")
        waiting = await explain(redis_url, "mine")
        unknown = await explain(redis_url, "other")
        wrong = await explain(redis_url, "a b")
    assert waiting.out.splitlines()[1].startswith("No worker has taken it yet")
    assert (unknown.status, unknown.err) == (1, "penstock: queue 'default' knows of no request 'other'\n")
    assert wrong.status == 2
