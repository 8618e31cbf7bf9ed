"""Measures what Redis holds for a waiting request and for an ended one: `python -m benchmarks.redis_sizing`.

Requests come from the client library, replies from a worker whose engine makes a token every 20 ms for each of its
sequences. It prints bytes of memory (MEMORY USAGE of all keys), of memory as the table of keys declares it, and of a
rewritten append-only file for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import string
import sys
import tempfile
from pathlib import Path

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient
from penstock.protocol.key_kinds import total_size
from penstock.protocol.key_table import TABLE
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.logs import configure_logs
from penstock.worker.service import WorkerService

PROMPTS = (100, 1_000, 10_000)  # characters
REPLIES = (0, 64, 256, 1_024)  # tokens; 0: the request still waits
STEP_S = 0.02


async def used(redis: RedisClient) -> tuple[int, int]:
    """Returns bytes of memory, and of the rewritten append-only file."""
    await redis.bgrewriteaof()
    while True:
        info = await redis.info()
        if not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]:
            break
        await asyncio.sleep(0.05)
    sizes = [await redis.memory_usage(key, samples=0) or 0 async for key in redis.scan_iter(count=1000)]
    return sum(sizes), int(info["aof_current_size"])


async def measure(url: str, prompt_chars: int, reply_tokens: int, count: int) -> dict[str, int]:
    redis = connect(url, decode=True)
    await redis.flushall()
    before = await used(redis)
    async with AsyncClient(url, max_queue_length=None) as client:
        letters = random.Random(0)  # letters that do not compress
        prompts = ["".join(letters.choices(string.ascii_letters, k=prompt_chars)) for _ in range(count)]
        handles = [await client.submit(prompt, max_tokens=max(1, reply_tokens)) for prompt in prompts]
        if reply_tokens:
            config = WorkerConfig(queue="default", health_port=None)
            service = WorkerService(
                config, url, lambda _: fake_model(FakeEngine(max_num_seqs=count, step_s=STEP_S, max_model_len=16_384))
            )
            task = asyncio.create_task(service.run())
            await asyncio.gather(*(handle.result(timeout=600) for handle in handles))
            service.request_drain()
            await task
    after = await used(redis)
    entries = [
        await redis.xlen(key) async for key in redis.scan_iter("penstock:default:*:reply", count=1000)
    ]  # fmt: skip
    await redis.aclose()
    memory, file = ((now - then) // count for now, then in zip(after, before, strict=True))
    shared = {"prompt_chars": prompt_chars, "reply_tokens": reply_tokens}
    bytes_of = {"memory_bytes": memory, "declared_bytes": declared(prompt_chars, reply_tokens), "file_bytes": file}
    return {**shared, "reply_entries": sum(entries) // count, **bytes_of}


def declared(prompt_chars: int, reply_tokens: int) -> int:
    size = total_size(TABLE)
    if reply_tokens:
        return size.times(remembered=1, reply=1, token=reply_tokens)
    return prompt_chars + size.times(remembered=1, request=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="requests of each kind")
    count = parser.parse_args().count
    configure_logs("error", "json", sys.stderr)
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(data_dir=Path(folder)) as server:
        for prompt_chars in PROMPTS:
            for reply_tokens in REPLIES:
                print(json.dumps(asyncio.run(measure(server.url, prompt_chars, reply_tokens, count))), flush=True)


if __name__ == "__main__":
    main()
