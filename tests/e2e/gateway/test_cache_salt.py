"""Prefixes in the cache are shared by requests with the same salt alone, also where a client of the wire sets it."""

from __future__ import annotations

from pathlib import Path

from penstock.engine import EngineConfig
from penstock.engine.demo import MODEL_DIR
from penstock.protocol.redis.connection import RedisClient
from tests.e2e.real_engines import real_worker
from tests.support.programs.worker_harness import read_reply, send

PROMPT = "The sun is warm and the sea is cold. " * 4
SALTS = (None, None, "ours", "ours", "theirs", None, "theirs")


async def test_prefixes_are_shared_under_one_salt_alone(
    redis_url: str, redis: RedisClient, compile_cache: Path
) -> None:
    config = EngineConfig(
        max_num_seqs=4,
        max_batch_tokens=64,
        num_pages=100,
        page_size=16,
        decode_steps=1,
        compile_cache_dir=compile_cache,
    )
    found, texts = [], set()
    async with real_worker(redis_url, MODEL_DIR, config):
        for number, salt in enumerate(SALTS):
            fields = {} if salt is None else {"cache_salt": salt}
            await send(redis, id=f"r{number}", prompt=PROMPT, max_tokens=8, temperature=0, n=2, **fields)
            reply = await read_reply(redis, f"r{number}")
            found.append(reply.end.cached_tokens > 0)
            texts.add((reply.text(0), reply.text(1)))
    assert found == [False, True, False, True, False, True, True]
    assert len(texts) == 1
