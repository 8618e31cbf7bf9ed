"""Runs processes of this version beside earlier ones: `make test-upgrade`, which names the earlier commit.

Each version reads whatever the other one writes: replies, leases, lanes, cards, keys.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, OwnEntry
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens
from penstock.worker.errors import OtherFleet
from penstock.worker.publish import outbox
from tests.deploy.fleets import Worker, environment, python_of, workers_of
from tests.deploy.rolling_load import CLIENTS, two_versions, under_load
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.processes import ended
from tests.support.programs.worker_harness import Reply, is_queue_empty, read_reply, read_until, running_worker
from tests.support.redis_servers.streams import read_stream

pytestmark = pytest.mark.upgrade

NUM_KILLS = 6
NUM_REQUESTS, NUM_TOKENS = 20, 200  # for each kill and version: more than the workers have slots, and 2 s at least
LOADING_S = 120  # a worker with a real model, on a busy machine
CLIENT = Path(__file__).parent / "fleet_client.py"


@pytest.fixture(scope="module")
def trees() -> dict[str, Path]:
    return {"old": ROOT / os.environ["UPGRADE_TREE"], "new": ROOT}


async def test_a_fleet_is_updated_under_load_and_back(
    redis_url: str, redis: RedisClient, tmp_path: Path, trees: dict[str, Path]
) -> None:
    async with two_versions(trees, redis, redis_url, tmp_path) as (fleet, old, new):
        async with under_load(fleet.service) as go_on:
            await go_on()
            await fleet.roll_workers(new.start)
            await go_on()
            await fleet.roll_gateways(trees["new"])
            await go_on()
            await fleet.roll_gateways(trees["old"])
            await go_on()
            await fleet.roll_workers(old.start)
            await go_on()
        await eventually(lambda: is_queue_empty(redis))
        assert not await redis.exists(keys.dead("q"), keys.malformed("q"))
    assert fleet.service.num_answered > 5 * CLIENTS


async def test_a_mixed_fleet_is_killed_in_the_middle(
    redis_url: str, redis: RedisClient, tmp_path: Path, trees: dict[str, Path]
) -> None:
    """Two workers of each version. Each kill takes one that has begun replies, of each version in turn."""
    waves = [{version: requests_of(version, wave) for version in trees} for wave in range(NUM_KILLS)]
    async with AsyncExitStack() as stack:
        fleets = [
            await stack.enter_async_context(workers_of(version, tree, redis, redis_url, tmp_path, heartbeat_ttl_s=2.0))
            for version, tree in trees.items()
        ]
        serving = [[await fleet.start(), await fleet.start()] for fleet in fleets]
        asked: list[Any] = []
        for number, wave in enumerate(waves):
            clients = [asyncio.create_task(replies_to(wave[version], trees[version], redis_url)) for version in trees]
            workers = serving[number % 2]
            await kill(redis, workers.pop(0))
            workers.append(await fleets[number % 2].start())
            for version, replies in zip(trees, await asyncio.wait_for(asyncio.gather(*clients), WAIT_S), strict=True):
                asked += zip(wave[version], replies, strict=True)
    for request, choices in asked:
        assert choices == expected(request), request["id"]
    owners = [(await read_reply(redis, request["id"])).owners for request, _ in asked]
    took_over = {pair for names in owners for pair in itertools.pairwise(name.partition("-")[0] for name in names)}
    assert took_over >= {("old", "new"), ("new", "old")}
    await eventually(lambda: is_queue_empty(redis))
    assert not await redis.exists(keys.dead("q"), keys.malformed("q"))


async def test_the_old_version_passes_over_how_far_a_prompt_is(
    redis_url: str, redis: RedisClient, tmp_path: Path, trees: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old client reads the reply. An old worker goes on with it, within its prompt."""
    monkeypatch.setattr(outbox, "PREFILL_NEWS_S", 0.0)
    request = {**requests_of("new", 0)[1], "prompt": "x" * 20_000}
    endless = FakeEngine(prefill_steps=20_000, step_s=0.05)
    async with workers_of("old", trees["old"], redis, redis_url, tmp_path) as fleet:
        async with running_worker(redis_url, endless, name="new"):
            asked = asyncio.create_task(replies_to([request], trees["old"], redis_url))
            reply = await read_until(
                redis, request["id"], lambda entry: getattr(entry, "prefill_done", None) is not None
            )
            await fleet.start()
        assert await asyncio.wait_for(asked, WAIT_S) == [expected(request)]
    assert reply.owners == ["new"]
    whole = await read_reply(redis, request["id"])
    assert whole.owners == ["new", "old-0"]
    assert whole.prefills


@pytest.mark.parametrize(("of", "by"), [("old", "new"), ("new", "old")])
async def test_no_version_goes_on_with_text_that_other_rules_made(
    redis_url: str, redis: RedisClient, trees: dict[str, Path], of: str, by: str
) -> None:
    """Workers with the demo are killed in mid-reply. One of the other version serves before an heir of theirs does."""
    async with AsyncExitStack() as stack, AsyncClient(redis_url, queue="q") as client:
        victim = await stack.enter_async_context(real_worker(trees[of], "victim", redis, redis_url))
        if by == "new":
            alone = real_worker(trees[by], "kept-out", None, redis_url, allow_other_fleet=False)
            kept_out = await stack.enter_async_context(alone)
            assert await asyncio.wait_for(kept_out.wait(), LOADING_S) == OtherFleet.exit_status
        for seed in range(3):
            await client.submit(
                "A river", id=f"x{seed}", seed=seed, n=2, max_tokens=600, temperature=1.2, ignore_eos=True
            )
        await kill(redis, Worker("victim", victim.pid, Path()))
        await stack.enter_async_context(real_worker(trees[by], "other", redis, redis_url))
        await stack.enter_async_context(real_worker(trees[of], "heir", redis, redis_url))
        replies = [await read_reply(redis, f"x{seed}") for seed in range(3)]
    for reply in replies:
        assert len(writers_of(reply)) == 1
        assert reply.end.finish_reason == "length"
    assert ["victim", "heir"] in [reply.owners for reply in replies]


def writers_of(reply: Reply) -> set[str | None]:
    """Returns the digests of the workers that wrote tokens of a reply."""
    digest, writers = None, set()
    for entry in reply.entries:
        if isinstance(entry, OwnEntry):
            digest = entry.digest
        elif isinstance(entry, ChunkEntry):
            writers.add(digest)
    return writers


@asynccontextmanager
async def real_worker(
    tree: Path, name: str, redis: RedisClient | None, url: str, *, allow_other_fleet: bool = True
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a worker with the demo. With `redis`, waits until it serves."""
    settings = {
        "MODEL": "demo", "QUEUE": "q", "NAME": name, "REDIS_URL": url, "HEALTH_PORT": "0", "HEARTBEAT_TTL_S": "3",
        "MAX_NUM_SEQS": "4", "NUM_PAGES": "500", "MAX_BATCH_TOKENS": "64", "DECODE_STEPS": "1", "LOG_LEVEL": "error",
        "ALLOW_OTHER_FLEET": "on" if allow_other_fleet else "off",
    }  # fmt: skip
    worker = await asyncio.create_subprocess_exec(
        python_of(tree), "-m", "penstock", "worker",
        env={**environment(tree), **{f"PENSTOCK_{name}": value for name, value in settings.items()}},
        cwd=tree,  # it comes before PYTHONPATH
    )  # fmt: skip
    try:
        if redis is not None:
            await eventually(partial(serves, redis, name), timeout_s=LOADING_S)
        yield worker
    finally:
        await ended(worker)


async def serves(redis: RedisClient, name: str) -> bool:
    return await redis.zscore(keys.serving("q"), name) is not None


def requests_of(version: str, wave: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{version}{wave}-{number}", "prompt": f"{version} {number}", "seed": number, "n": 1 + number % 2,
            "max_tokens": NUM_TOKENS, "tenant": f"tenant{number % 3}", "priority": number % 4 - 1, "timeout_s": 600,
        }
        for number in range(NUM_REQUESTS)
    ]  # fmt: skip


def expected(request: dict[str, Any]) -> list[Any]:
    prompt, seed = request["prompt"], request["seed"]
    return [
        [expected_tokens(prompt.encode(), seed, index, NUM_TOKENS), expected_text(prompt, seed, NUM_TOKENS, index)]
        for index in range(request["n"])
    ]


async def replies_to(requests: list[dict[str, Any]], tree: Path, url: str) -> list[Any]:
    """Sends the requests with the client library of `tree`; returns their replies."""
    client = await asyncio.create_subprocess_exec(
        python_of(tree), str(CLIENT), url, env=environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    out, _ = await client.communicate(json.dumps(requests).encode())
    assert client.returncode == 0
    replies: list[Any] = json.loads(out)
    return replies


async def kill(redis: RedisClient, worker: Worker) -> None:
    """Kills a worker that has begun a reply and not ended it."""
    await eventually(partial(has_begun, redis, worker.name))
    worker.kill()


async def has_begun(redis: RedisClient, worker: str) -> bool:
    """Checks whether `worker` writes a reply that has not ended yet."""
    async for key in redis.scan_iter("penstock:q:*:reply"):
        entries = [entry for _, entry in await read_stream(redis, key)]
        owners = [entry["worker"] for entry in entries if entry["type"] == "own"]
        if owners[-1:] == [worker] and entries[-1]["type"] == "chunk":
            return True
    return False


@pytest.mark.parametrize(("of", "by"), [("old", "new"), ("new", "old")])
async def test_operators_of_each_version_see_the_workers_of_the_other(
    redis_url: str, redis: RedisClient, tmp_path: Path, trees: dict[str, Path], of: str, by: str
) -> None:
    async with workers_of(of, trees[of], redis, redis_url, tmp_path) as workers:
        worker = await workers.start()
        for command in (["workers"], ["card"], ["tenants", "list"], ["top", "--json"], ["doctor"]):
            seen = await asyncio.create_subprocess_exec(
                python_of(trees[by]), "-m", "penstock", *command, "--redis-url", redis_url, "--queue", "q",
                env=environment(trees[by]), cwd=trees[by], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            said, _ = await asyncio.wait_for(seen.communicate(), WAIT_S)
            assert seen.returncode == 0, (command, said)
            assert command[0] not in ("workers", "top") or worker.name in said.decode()
        await worker.stop()
