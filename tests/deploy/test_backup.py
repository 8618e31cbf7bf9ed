"""A busy queue is copied and goes on from the copy; while a server cannot write, everybody waits."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.packages import ROOT
from tests.support.patience import eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.redis_servers.servers import SERVERS

SCRIPTS = ROOT / "deploy/redis"
CLI = Path(__file__).parent / "redis_cli.py"
LENGTH = 50

pytestmark = pytest.mark.skipif(not SERVERS, reason="no Redis server")


def programs(folder: Path) -> dict[str, str]:
    """Returns an environment in which scripts find a server and redis-cli."""
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "redis-server").symlink_to(next(iter(SERVERS.values())))
    (bin_ / "redis-cli").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{CLI}" "$@"\n')
    (bin_ / "redis-cli").chmod(0o755)
    return {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}


def back_up(server: EmbeddedServer, folder: Path, environment: dict[str, str]) -> bytes:
    (folder / "passwords").mkdir()
    (folder / "passwords/admin").write_text("secret")
    environment = {**environment, "REDIS_SECRETS": str(folder), "REDIS_PORT": str(server.port)}
    return subprocess.run([SCRIPTS / "backup.sh"], env=environment, check=True, capture_output=True).stdout


def restore(backup: bytes, data: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([SCRIPTS / "restore.sh", data], input=backup, env=environment, capture_output=True)


async def enqueue(redis: RedisClient, names: list[str]) -> None:
    for name in names:
        await send(redis, prompt=name, id=name, max_tokens=LENGTH)


async def test_what_a_backup_has_goes_on_where_it_was(tmp_path: Path) -> None:
    environment = programs(tmp_path)
    lost, found = tmp_path / "lost", tmp_path / "found"
    lost.mkdir()
    found.mkdir()
    waiting = [f"waiting-{number}" for number in range(4)]
    engine = FakeEngine(max_num_seqs=1)
    with EmbeddedServer(data_dir=lost) as server:
        redis = connect(server.url, decode=True)
        await redis.execute_command("ACL", "SETUSER", "admin", "on", ">secret", "~*", "&*", "+@all")
        async with running_worker(server.url, engine):
            await enqueue(redis, ["finished"])
            await read_reply(redis, "finished")
            engine.hold()
            await enqueue(redis, ["begun"])
            await eventually(lambda: engine.prefilled[-1] == "begun")
            engine.allow(5)
            await read_until(redis, "begun", lambda entry: entry.type == "chunk")
            await enqueue(redis, waiting)
            backup = await asyncio.to_thread(back_up, server, tmp_path, environment)
            engine.allow()
            await enqueue(redis, ["late"])
            for name in ("begun", *waiting, "late"):
                await read_reply(redis, name)
        await redis.aclose()
        server.kill()

    told = await asyncio.to_thread(restore, backup, found, environment)
    assert told.returncode == 0, told.stderr
    assert (await asyncio.to_thread(restore, backup, found, environment)).returncode == 1  # not over a server's data
    with EmbeddedServer(data_dir=found) as server:
        redis = connect(server.url, decode=True)
        assert (await read_reply(redis, "finished")).text() == expected_text("finished", "finished", LENGTH)
        async with running_worker(server.url, name="another"):
            for name in ("begun", *waiting):
                reply = await read_reply(redis, name)
                assert reply.text() == expected_text(name, name, LENGTH)
                assert len(reply.tokens()) == LENGTH
            assert (await read_reply(redis, "begun")).owners[-1] == "another"
            await eventually(lambda: is_queue_empty(redis))
            assert not await redis.exists(keys.reply("q", "late"))  # it came after the copy
            assert not await redis.exists(keys.dead("q"))
        await redis.aclose()


@pytest.mark.slow
def test_a_disk_that_is_full_and_then_made_larger(tmp_path: Path) -> None:
    own_mounts = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*own_mounts, "true"], capture_output=True).returncode:
        pytest.skip("NOT CHECKED, no mount namespace may be made here")
    command = [*own_mounts, sys.executable, str(Path(__file__).parent / "full_disk_process.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "refusal": "MISCONF Errors writing to the AOF file: No space left on device",
        "reads": True, "worker lives": True, "running is whole": True, "after is whole": True,
    }  # fmt: skip


async def test_while_the_disk_is_full_everybody_waits(tmp_path: Path) -> None:
    """A snapshot that can't be written makes a server refuse writes too."""
    engine = FakeEngine(step_s=0.002)
    with EmbeddedServer(data_dir=tmp_path) as server:
        redis = connect(server.url, decode=True)
        async with running_worker(server.url, engine):
            await enqueue(redis, ["before"])
            await read_until(redis, "before", lambda entry: entry.type == "chunk")
            (tmp_path / "dump.rdb").mkdir()
            await redis.config_set("save", "3600 1")
            await redis.bgsave()

            async def refuses() -> bool:
                try:
                    await redis.set("probe", 1)
                except ResponseError as error:
                    return str(error).startswith("MISCONF")
                return False

            await eventually(refuses)
            await redis.config_set("save", "")
            for name in ("before", "after"):
                if name == "after":
                    await enqueue(redis, [name])
                assert (await read_reply(redis, name)).text() == expected_text(name, name, LENGTH)
        await redis.aclose()
