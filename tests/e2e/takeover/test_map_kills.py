"""`penstock map` and its workers are killed: each row is generated once, and ends up in the output once."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


def num_rows_in(output: Path) -> int:
    """Returns how many rows a run has written; a Parquet file is a stream of Arrow until the run ends."""
    is_parquet = output.suffix == ".parquet"
    path = output.with_name(f"{output.name}.rows") if is_parquet else output
    if not path.exists():
        return 0
    return path.read_bytes().count(b"length") // 3 if is_parquet else path.read_bytes().count(b"\n")


def write_prompts(source: Path, prompts: list[str]) -> None:
    if source.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow", reason="NOT CHECKED, the extra `parquet` is not installed")
        importlib.import_module("pyarrow.parquet").write_table(pa.table({"prompt": prompts}), source)
    else:
        source.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))


def rows_in(output: Path) -> list[dict[str, Any]]:
    if output.suffix != ".parquet":
        return [json.loads(line) for line in output.read_text().splitlines()]
    rows = importlib.import_module("pyarrow.parquet").read_table(output).to_pylist()
    return [{**row, "reply_choices": json.loads(row["reply_choices"])} for row in rows]


@pytest.mark.parametrize(
    ("num_rows", "num_kills", "order", "ending"),
    [
        (60, 2, "free", "jsonl"),
        pytest.param(60, 2, "kept", "parquet", marks=pytest.mark.slow),
        pytest.param(10_000, 10, "kept", "jsonl", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(10_000, 10, "free", "jsonl", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_each_row_is_generated_once_whatever_is_killed(
    server: tuple[str, RedisClient], tmp_path: Path, num_rows: int, num_kills: int, order: str, ending: str
) -> None:
    url, redis = server
    source, output = tmp_path / f"in.{ending}", tmp_path / f"out.{ending}"
    prompts = [f"row {number % (num_rows - 5)}" for number in range(num_rows)]  # the last five are there twice
    write_prompts(source, prompts)
    arguments = ("map", str(source), str(output), "--plain", "--queue", "q", "--order", order)
    options = ("--max-tokens", str(MAX_TOKENS), "--n", "2", "--in-flight", "16" if num_rows < 100 else "64")

    with ExitStack() as fleet:

        def begin_worker(number: int) -> WorkerProcess:
            engine, log = {"step_s": 0.005}, tmp_path / f"log-{number}"
            return fleet.enter_context(WorkerProcess(url, log, engine=engine, name=f"w{number}"))

        workers = [begin_worker(number) for number in range(2)]
        for kill in range(num_kills):
            process = await start(*arguments, *options, PENSTOCK_REDIS_URL=url)
            await eventually(has_rows(output, (kill + 1) * num_rows // (num_kills + 1)), timeout_s=600)
            workers[kill % 2].kill()
            process.kill()
            await process.wait()
            workers[kill % 2] = begin_worker(2 + kill)
        outcome = await finish(await start(*arguments, *options, PENSTOCK_REDIS_URL=url))
    assert (outcome.status, outcome.out.count("\n")) == (0, 1)
    rows = await asyncio.to_thread(rows_in, output)
    assert sorted(row["reply_row"] for row in rows) == list(range(1, num_rows + 1))
    if order == "kept":
        assert [row["prompt"] for row in rows] == prompts
    for row in rows:
        assert row["prompt"] == prompts[row["reply_row"] - 1]
        texts = [expected_text(row["prompt"], row["reply_id"], MAX_TOKENS, index) for index in range(2)]
        assert [choice["text"] for choice in row["reply_choices"]] == texts
    generated = [key async for key in redis.scan_iter(match=keys.seen("q", "*").replace("{", "[{]"), count=1000)]
    assert len(generated) == len({row["reply_id"] for row in rows}) == num_rows


def has_rows(path: Path, count: int) -> Callable[[], bool]:
    return lambda: num_rows_in(path) >= count
