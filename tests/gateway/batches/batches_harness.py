"""The official client on a gateway, whose worker does as each line says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from openai.types import Batch, FileObject

from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry
from tests.support.patience import eventually
from tests.support.programs import gateway_client
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import announce

CHAT = "/v1/chat/completions"
ENDED = ("failed", "completed", "expired", "cancelled")


async def answer(reply: ScriptedReply) -> None:
    """Answers `say two words`, `think hello`, `wait here` (until it is cancelled), `break it`; other prompts are
    repeated.
    """
    await reply.own()
    if reply.request.messages is None:
        await reply.chunk(reply.request.prompt or "")
        return await reply.end()
    said = str(reply.request.messages[-1].content)
    what, _, about = said.partition(" ")
    if what == "think":
        reply.tokens[0] = 1
        await reply.write(ChunkEntry(index=0, offset=0, text="", tokens=(1,), reasoning="hm"))
    await reply.chunk(about)
    if what == "wait":
        await reply.cancelled()
        return await reply.end("cancelled")
    if what == "break":
        return await reply.end("error", code="engine_error", message="the engine broke")
    return await reply.end()


def line(custom_id: str, said: str = "say two words", *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """Makes a request line of a batch's input."""
    name = "input" if url == "/v1/responses" else "messages"
    content: Any = said if name == "input" else [{"role": "user", "content": said}]
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", name: content, **body}}


def jsonl(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


class Asked(gateway_client.Asked):
    """Adds calls for batches."""

    async def upload(self, content: bytes, **more: Any) -> FileObject:
        made = await self.openai.files.create(file=("in.jsonl", content), purpose="batch", **more)
        return FileObject.model_validate_json(made.model_dump_json(exclude_unset=True), strict=True)

    async def create(self, content: bytes, *, endpoint: Any = CHAT, window: Any = "24h", **more: Any) -> Batch:
        file = await self.upload(content)
        made = await self.openai.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window=window, **more
        )
        return strictly(made)

    async def batch(self, batch_id: str) -> Batch:
        return strictly(await self.openai.batches.retrieve(batch_id))

    async def ended(self, batch: Batch) -> Batch:
        """Waits until the batch has ended, and returns it."""
        return await self.reached(batch, *ENDED)

    async def reached(self, batch: Batch, *statuses: str) -> Batch:
        async def has_reached() -> bool:
            return (await self.batch(batch.id)).status in statuses

        await eventually(has_reached)
        return await self.batch(batch.id)

    async def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """Returns the lines of a file by custom_id, which must be unique."""
        if file_id is None:
            return {}
        content = await self.openai.files.content(file_id)
        documents = [json.loads(each) for each in content.text.splitlines()]
        found = {document["custom_id"]: document for document in documents}
        assert len(found) == len(documents)
        return found


def strictly(batch: Batch) -> Batch:
    return Batch.model_validate_json(batch.model_dump_json(exclude_unset=True), strict=True)


@asynccontextmanager
async def asking(redis: RedisClient, redis_url: str, behave: Any = answer, **settings: Any) -> AsyncIterator[Asked]:
    await announce(redis)
    async with (
        ScriptedWorker(redis_url, behave) as worker,
        Asked.beside(worker, redis, redis_url, **{"batch_lease_s": 0.6, **settings}) as asked,
    ):
        yield asked
