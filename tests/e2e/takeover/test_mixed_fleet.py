"""Two workers of one model round differently: a reply that one of them began goes on as its request asks."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from penstock.engine import Engine, EngineConfig
from penstock.engine.demo import MODEL_DIR
from penstock.producer import GenerateRequest
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, OwnEntry, ReplyEntry
from tests.e2e.real_engines import late_text, real_worker, undisturbed
from tests.e2e.takeover.left_replies import leave_killed
from tests.support.patience import eventually
from tests.support.programs.worker_harness import QUICK, Reply, is_queue_empty, read_reply

SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_batch_tokens": 16, "num_pages": 400, "max_model_len": 512, "decode_steps": 1,
}  # fmt: skip
NATIVE: dict[str, Any] = {"attention": "native", "matmul": "native"}
XLA: dict[str, Any] = {"attention": "xla", "matmul": "xla"}
ASKED: dict[str, dict[str, Any]] = {"exact": {"seed": 3, "exact": True}, "free": {"seed": 5}}


def request(name: str, **fields: Any) -> GenerateRequest:
    asked = {"prompt": "A river", "n": 2, "max_tokens": 400, "temperature": 1.0, "ignore_eos": True, **ASKED[name]}
    return GenerateRequest.model_validate({**asked, **fields, "id": name})


async def test_one_is_killed_in_the_middle(
    redis_url: str, redis: RedisClient, compile_cache: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SIZES, "compile_cache_dir": compile_cache}
    engine = Engine.from_checkpoint(MODEL_DIR, EngineConfig(**settings, **NATIVE))
    text = undisturbed(engine, {"exact": request("exact")})["exact"][0][0]
    stop = late_text(text, 6)
    asked = {"exact": request("exact", stop=(stop,)), "free": request("free")}
    expected = undisturbed(engine, asked)
    assert expected["exact"][0][0] == text[: text.index(stop)]

    def worker(name: str, kernels: dict[str, Any]) -> AbstractAsyncContextManager[None]:
        return real_worker(redis_url, MODEL_DIR, EngineConfig(**settings, **kernels), **QUICK, name=name)

    of_victim = {**settings, **NATIVE, "model": MODEL_DIR}
    await leave_killed(redis, redis_url, tmp_path / "log", of_victim, asked, is_under_way)
    async with worker("other", XLA):
        free = await read_reply(redis, "free")
        async with worker("same", NATIVE):
            exact = await read_reply(redis, "exact")
        await eventually(lambda: is_queue_empty(redis))
    assert (exact.owners, exacts(exact), exact.end.exact) == (["victim", "same"], [None, None], None)
    assert exact.choices(2) == expected["exact"]
    assert (free.owners, exacts(free), free.end.exact) == (["victim", "other"], [None, 0], 0)
    for index, (_, tokens) in enumerate(expected["free"]):
        published = [token for chunk in first_chunks(free) if chunk.index == index for token in chunk.tokens]
        assert published
        assert free.tokens(index)[: len(published)] == published == tokens[: len(published)]
        assert len(free.tokens(index)) == len(tokens)


def is_under_way(entry: ReplyEntry) -> bool:
    return isinstance(entry, ChunkEntry) and entry.index == 1 and entry.offset > 10


def exacts(reply: Reply) -> list[int | None]:
    return [entry.exact for entry in reply.entries if isinstance(entry, OwnEntry)]


def first_chunks(reply: Reply) -> list[ChunkEntry]:
    """Returns the chunks that the first owner of a reply wrote."""
    owns = [at for at, entry in enumerate(reply.entries) if isinstance(entry, OwnEntry)]
    return [entry for entry in reply.entries[: owns[1]] if isinstance(entry, ChunkEntry)]
