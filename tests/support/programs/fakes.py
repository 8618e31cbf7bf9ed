"""Fakes that stand in for the parts a test is not about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.protocol import keys
from penstock.protocol.redis.connection import connect, connect_blocking, ensure_group
from penstock.protocol.redis.streams import stream_entries
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import (
    ChunkEntry,
    EndEntry,
    GenerateRequest,
    OwnEntry,
    ReplyEntry,
    WireError,
    encode_reply,
    parse_request,
)
from tests.support.patience import eventually

Behaviour = Callable[["ScriptedReply"], Awaitable[None]]


@dataclass
class ScriptedReply:
    """One claimed request, for a test's script to answer entry by entry."""

    request: GenerateRequest
    worker: ScriptedWorker
    epoch: int = 1
    number: int = 0
    tokens: dict[int, int] = field(default_factory=dict)  # choice to number of tokens written
    queue_entry: str = ""
    arithmetic: str | None = None  # of the worker
    exact: int | None = None  # 0: another arithmetic wrote what came before

    @property
    def id(self) -> str:
        assert self.request.id is not None
        return self.request.id

    async def own(self) -> None:
        """Takes the request under the present epoch."""
        self.number = 0
        owner: dict[Any, Any] = {"status": "running", "worker": self.worker.name, "epoch": self.epoch}
        async with self.worker.gate:
            await self.worker.redis.hset(keys.state(self.worker.queue, self.id), mapping=owner)
        await self.write(
            OwnEntry(worker=self.worker.name, epoch=self.epoch, arithmetic=self.arithmetic, exact=self.exact)
        )

    async def chunk(
        self, text: str, *, index: int = 0, tokens: Sequence[int] | None = None, offset: int | None = None
    ) -> str:
        """Writes a chunk of one token per character, unless told otherwise; returns its entry id."""
        ids = tuple(map(ord, text)) if tokens is None else tuple(tokens)
        start = self.tokens.get(index, 0) if offset is None else offset
        self.tokens[index] = start + len(ids)
        return await self.write(ChunkEntry(index=index, offset=start, text=text, tokens=ids))

    async def end(
        self,
        reason: str = "stop",
        *,
        reasoning_tokens: int | None = None,
        code: str | None = None,
        message: str | None = None,
    ) -> None:
        """Writes the end with the counts that the chunks add up to, and takes the request out of the queue."""
        num_tokens = sum(self.tokens.values())
        await self.write(
            EndEntry.model_validate(
                {
                    "finish_reason": reason,
                    "finish_reasons": (reason,) * self.request.n if self.request.n > 1 else None,
                    "prompt_tokens": len(self.request.prompt or ""),
                    "completion_tokens": num_tokens,
                    "reasoning_tokens": reasoning_tokens,
                    "queued_ms": 1,
                    "ttft_ms": 2 if num_tokens else None,
                    "total_ms": 3,
                    "arithmetic": self.arithmetic,
                    "exact": self.exact,
                    "code": code,
                    "message": message,
                }
            )
        )
        async with self.worker.gate:
            if self.request.keep_s is not None:
                for key in (keys.state(self.worker.queue, self.id), keys.reply(self.worker.queue, self.id)):
                    await self.worker.redis.pexpire(key, round(self.request.keep_s * 1000))
            await self.worker.redis.hset(keys.state(self.worker.queue, self.id), "status", "done")
            await self.worker.release(self.queue_entry)

    async def write(self, entry: ReplyEntry) -> str:
        entry_id = f"{self.epoch}-{self.number}"
        async with self.worker.gate:
            await self.worker.redis.xadd(keys.reply(self.worker.queue, self.id), encode_reply(entry), id=entry_id)  # type: ignore[arg-type]
        self.number += 1
        return entry_id

    async def cancelled(self) -> None:
        """Waits until somebody cancels the request."""
        await eventually(lambda: self.worker.redis.exists(keys.cancel(self.worker.queue, self.id)))


async def echo(reply: ScriptedReply) -> None:
    """Repeats the prompt for each choice, one chunk per word."""
    await reply.own()
    words = (reply.request.prompt or "").split(" ")
    for position, word in enumerate(words):
        for index in range(reply.request.n):
            await reply.chunk(word if position == 0 else " " + word, index=index)
    await reply.end()


async def one_word(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.chunk("word")
    await reply.end("stop")


async def until_cancelled(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.chunk("begun")
    await reply.cancelled()
    await reply.end("cancelled")


async def name_queue_until_cancelled(reply: ScriptedReply) -> None:
    """Answers with the queue's name, and ends when told to."""
    await reply.own()
    await reply.chunk(reply.worker.queue)
    await reply.cancelled()
    await reply.end("cancelled")


class Held:
    """Begins an answer and ends it when it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("sparrows ")
        await self.may_end.wait()
        await reply.chunk("sleep")
        await reply.end("stop")


class ScriptedWorker:
    """Takes requests from a real queue and answers each as `behave` says; speaks the wire, knows no model.

    It reads like a real worker (its group, one blocking connection) but keeps no guarantees.
    """

    def __init__(self, url: str, behave: Behaviour = echo, *, queue: str = "default", name: str = "scripted") -> None:
        self.queue = queue
        self.name = name
        self.taken: list[GenerateRequest] = []
        self.behave = behave
        self.redis = connect(url, decode=True)
        self.gate = asyncio.Semaphore(32)  # the library opens no more than 100 connections
        self._blocking = connect_blocking(url, decode=False, block_s=1.0)
        self._replies: set[asyncio.Task[None]] = set()

    async def release(self, queue_entry: str) -> None:
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.xack(keys.requests(self.queue), keys.GROUP, queue_entry)
            pipe.xdel(keys.requests(self.queue), queue_entry)
            await pipe.execute()

    async def __aenter__(self) -> Self:
        await ensure_group(self.redis, self.queue)
        await self.redis.set(keys.heartbeat(self.queue, self.name), "1", ex=60)
        await self.redis.zadd(keys.serving(self.queue), {self.name: 10**15})
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stops reading and fails the test if a script failed."""
        await end_tasks([self._task, *self._replies])
        await self.redis.zrem(keys.serving(self.queue), self.name)
        await self.redis.aclose()
        await self._blocking.aclose()
        for task in (self._task, *self._replies):
            if not task.cancelled():
                task.result()

    async def _run(self) -> None:
        stream = keys.requests(self.queue)
        while True:
            answer = await self._blocking.xreadgroup(keys.GROUP, self.name, {stream: ">"}, count=64, block=1000)
            for _, entries in stream_entries(answer):
                for entry_id, fields in entries:
                    await self._take(entry_id.decode(), fields)

    async def _take(self, entry_id: str, fields: dict[bytes, bytes]) -> None:
        try:
            request = parse_request(entry_id, fields, max_body_bytes=1 << 20)
        except WireError as error:
            refused = EndEntry(finish_reason="error", code=error.code, message=error.message)
            await self.redis.xadd(keys.reply(self.queue, error.request_id), encode_reply(refused), id="1-0")  # type: ignore[arg-type]
            await self.release(entry_id)
            return
        self.taken.append(request)
        self._replies.add(asyncio.create_task(self.behave(ScriptedReply(request, self, queue_entry=entry_id))))  # type: ignore[arg-type]


def ranked(entry_ids: Iterable[str | bytes]) -> list[str]:
    """Ids of reply entries with the first epoch called 1, the next one 2 and so on."""
    ids = [entry_id.decode() if isinstance(entry_id, bytes) else entry_id for entry_id in entry_ids]
    epochs = sorted({int(entry_id.split("-")[0]) for entry_id in ids})
    return [f"{epochs.index(int(epoch)) + 1}-{number}" for epoch, number in (id_.split("-") for id_ in ids)]


class LossyProxy:
    """A TCP proxy in front of a server that fails at the worst moments."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._lose_answer_to: bytes | None = None
        self.num_lost = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def lose_next_answer_to(self, command: bytes) -> None:
        """Has the next command that contains this executed, while its sender sees the connection break."""
        self._lose_answer_to = command

    def cut(self) -> None:
        """Breaks all connections."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.refuse()

    async def listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", getattr(self, "_port", 0))
        self._port = self._listener.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Breaks all connections and accepts no new ones until `listen`."""
        self._listener.close()
        await eventually(self._has_cut)  # some may just be connecting

    def _has_cut(self) -> bool:
        self.cut()
        return not self._writers

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers.add(server_writer)
        is_losing = asyncio.Event()
        try:
            await asyncio.gather(
                self._pass_commands(reader, server_writer, is_losing),
                self._pass_answers(server_reader, writer, is_losing),
            )
        except OSError:
            pass
        finally:
            for end in (writer, server_writer):
                self._writers.discard(end)
                end.transport.abort()

    async def _pass_commands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_losing: asyncio.Event
    ) -> None:
        while data := await reader.read(65536):
            if self._lose_answer_to is not None and self._lose_answer_to in data:
                self._lose_answer_to = None
                is_losing.set()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _pass_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_losing: asyncio.Event
    ) -> None:
        while data := await reader.read(65536):
            if is_losing.is_set():
                self.num_lost += 1
                break
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
