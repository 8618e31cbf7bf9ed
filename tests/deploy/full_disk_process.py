"""Fills the four-megabyte disk of a queue, then makes it larger; prints what everybody saw.

Run as a program in a mount namespace of its own: `unshare --map-root-user --mount`. The folder is the first argument;
the repository is on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from redis.exceptions import ResponseError

from penstock.local.embedded import EmbeddedServer
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import eventually
from tests.support.programs.worker_harness import read_reply, read_until, running_worker, send

LENGTH = 200


def mount(folder: Path, *options: str) -> None:
    subprocess.run(["mount", *options, "tmpfs", str(folder)], check=True)


async def is_written(redis: RedisClient) -> bool:
    try:
        await redis.set("probe", 1)
    except ResponseError:
        return False
    return True


async def main(folder: Path) -> None:
    mount(folder, "-t", "tmpfs", "-o", "size=4m")
    engine = FakeEngine(step_s=0.005)
    with EmbeddedServer(data_dir=folder, arguments=("--appendfsync", "everysec")) as server:
        redis = connect(server.url, decode=True)
        async with running_worker(server.url, engine) as worker:
            await send(redis, prompt="running", id="running", max_tokens=LENGTH)
            await read_until(redis, "running", lambda entry: entry.type == "chunk")
            refusal = ""
            for number in range(100):
                try:
                    await redis.set(f"ballast-{number}", "x" * (1 << 17))
                except Exception as error:  # whatever it is, it is printed
                    refusal = str(error)
                    break
            reads = await redis.exists("ballast-0")
            await asyncio.sleep(1)
            is_alive = not worker.task.done()
            mount(folder, "-o", "remount,size=64m")
            running = (await read_reply(redis, "running")).text()
            await eventually(lambda: is_written(redis))
            await send(redis, prompt="after", id="after", max_tokens=LENGTH)
            after = (await read_reply(redis, "after")).text()
        await redis.aclose()
    told = {
        "refusal": refusal, "reads": bool(reads), "worker lives": is_alive,
        "running is whole": running == expected_text("running", "running", LENGTH),
        "after is whole": after == expected_text("after", "after", LENGTH),
    }  # fmt: skip
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
