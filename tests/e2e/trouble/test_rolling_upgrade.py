"""In a rolling upgrade with real engines, no worker with the new model continues a reply that the old one began."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.local.worker_process import local_worker, wait_joined
from penstock.producer import AsyncClient, Handle
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import OwnEntry
from tests.support.patience import eventually
from tests.support.programs.worker_harness import Reply, read_reply

pytestmark = pytest.mark.slow

PROMPT, NUM_REQUESTS, NUM_TOKENS = "What is 12 + 30?", 4, 900
SETTINGS: dict[str, Any] = {
    "model": "demo", "queue": "q", "health_port": 0, "heartbeat_ttl_s": 3, "max_num_seqs": 4, "num_pages": 500,
    "max_batch_tokens": 64, "decode_steps": 1, "allow_other_fleet": True,
}  # fmt: skip


async def ask(client: AsyncClient, kind: str) -> list[Handle]:
    return [
        await client.submit(
            PROMPT, id=f"{kind}{seed}", seed=seed, n=2, temperature=1.2, max_tokens=NUM_TOKENS, stop=["zzzq"],
            repetition_penalty=1.1, ignore_eos=True,
        )
        for seed in range(NUM_REQUESTS)
    ]  # fmt: skip


async def test_half_written_replies_go_on_with_the_old_model(redis_url: str, redis: RedisClient) -> None:
    old, new = SETTINGS, {**SETTINGS, "weights": "int8", "name": "new"}
    async with AsyncClient(redis_url, queue="q") as client, local_worker(redis_url, {**old, "name": "old"}) as victim:
        await wait_joined(victim, redis_url, "q", "old")
        handles = await ask(client, "disturbed")
        await eventually(lambda: _are_begun(redis, handles))
        victim.kill()
        async with local_worker(redis_url, new) as newcomer:
            await wait_joined(newcomer, redis_url, "q", "new")
            async with local_worker(redis_url, {**old, "name": "heir"}) as heir:
                replies = [await read_reply(redis, handle.id) for handle in handles]
                newcomer.terminate()
                await newcomer.wait()
                expected = [await read_reply(redis, handle.id) for handle in await ask(client, "undisturbed")]
                assert heir.returncode is None
    assert any(reply.owners == ["old", "heir"] for reply in replies)
    for reply, undisturbed in zip(replies, expected, strict=True):
        assert "new" not in reply.owners
        assert (
            len({entry.digest for entry in (*reply.entries, *undisturbed.entries) if isinstance(entry, OwnEntry)}) == 1
        )
        assert [reply.tokens(index) for index in range(2)] == [undisturbed.tokens(index) for index in range(2)]


def _claims(*replies: Reply) -> list[OwnEntry]:
    return [entry for reply in replies for entry in reply.entries if isinstance(entry, OwnEntry)]


async def _are_begun(redis: RedisClient, handles: list[Handle]) -> bool:
    return all([await redis.xlen(keys.reply("q", handle.id)) > 3 for handle in handles])
