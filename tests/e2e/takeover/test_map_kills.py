"""`penstock map` and its workers are killed: each row is generated once, and ends up in the output once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import expected_text
from tests.cli.cli_process import finish, start
from tests.support.patience import eventually
from tests.support.programs.worker_process import WorkerProcess

MAX_TOKENS = 20


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, RedisClient]]:
    with EmbeddedServer() as server:
        redis = connect(server.url, decode=True)
        yield server.url, redis
        await redis.aclose()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("num_rows", "num_kills", "order"),
    [
        (60, 2, "free"),
        pytest.param(10_000, 10, "kept", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(10_000, 10, "free", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_each_row_is_generated_once_whatever_is_killed(
    server: tuple[str, RedisClient], tmp_path: Path, num_rows: int, num_kills: int, order: str
) -> None:
    url, redis = server
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [f"row {number % (num_rows - 5)}" for number in range(num_rows)]  # the last five are there twice
    source.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    arguments = ("map", str(source), str(output), "--plain", "--queue", "q", "--order", order)
    options = ("--max-tokens", str(MAX_TOKENS), "--n", "2", "--in-flight", "16" if num_rows < 100 else "64")

    with ExitStack() as fleet:

        def begin_worker(number: int) -> WorkerProcess:
            engine, log = {"step_s": 0.005}, tmp_path / f"log-{number}"
            return fleet.enter_context(WorkerProcess(url, log, engine=engine, name=f"w{number}"))

        workers = [begin_worker(number) for number in range(2)]
        for kill in range(num_kills):
            process = await start(*arguments, *options, PENSTOCK_REDIS_URL=url)
            await eventually(has_lines(output, (kill + 1) * num_rows // (num_kills + 1)), timeout_s=600)
            workers[kill % 2].kill()
            process.kill()
            await process.wait()
            workers[kill % 2] = begin_worker(2 + kill)
        outcome = await finish(await start(*arguments, *options, PENSTOCK_REDIS_URL=url))
    assert (outcome.status, outcome.out.count("\n")) == (0, 1)
    rows = [json.loads(line) for line in (await asyncio.to_thread(output.read_text)).splitlines()]
    assert sorted(row["reply_row"] for row in rows) == list(range(1, num_rows + 1))
    if order == "kept":
        assert [row["prompt"] for row in rows] == prompts
    for row in rows:
        assert row["prompt"] == prompts[row["reply_row"] - 1]
        texts = [expected_text(row["prompt"], row["reply_id"], MAX_TOKENS, index) for index in range(2)]
        assert [choice["text"] for choice in row["reply_choices"]] == texts
    generated = [key async for key in redis.scan_iter(match=keys.seen("q", "*").replace("{", "[{]"), count=1000)]
    assert len(generated) == len({row["reply_id"] for row in rows}) == num_rows


def has_lines(path: Path, count: int) -> Callable[[], bool]:
    return lambda: num_lines(path) >= count
