"""Requests whose worker died after any chunk of what a real engine generated, and the worker that goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.engine import Engine, EngineConfig, Output, ToolCallDelta
from penstock.engine.text.response.call_ids import call_id
from penstock.producer import GenerateRequest, Reply
from penstock.producer.reading.assembly import Assembler
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ReplyEntry
from penstock.tools.chaos.process import ModelWorker
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.admission import to_engine_request
from penstock.worker.intake.preparation import Preparer
from penstock.worker.publish.chunks import chunk_fields
from penstock.worker.run.choices import ChoiceBuffer
from tests.e2e.real_engines import real_worker
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import QUICK, is_queue_empty, read_reply, read_until, take_and_claim
from tests.support.redis_servers.streams import add_entry

SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_batch_tokens": 64, "num_pages": 520, "decode_steps": 1}


def generate(engine: Engine, asked: GenerateRequest) -> list[Output]:
    """Returns the outputs of all steps of an undisturbed request."""
    preparation = Preparer(engine.tokenizer, WorkerConfig(), engine.grammars).prepare(asked)
    engine.add(to_engine_request(asked, preparation, engine.defaults))
    outputs = []
    while engine.has_work():
        outputs += [output for output in engine.step() if output.prefill is None]
    return outputs


async def leave(redis: RedisClient, asked: GenerateRequest, outputs: list[Output], cut: int) -> None:
    """Leaves a request whose worker died after publishing its first `cut` outputs, each as a chunk of its own."""
    await add_entry(redis, keys.requests("q"), asked.to_entry())
    claim = await take_and_claim(redis, "victim", str(asked.id))
    choices = [ChoiceBuffer(index) for index in range(asked.n)]
    for number, output in enumerate(outputs[:cut], start=1):
        choice = choices[output.index]
        calls = [rename(delta, str(asked.id), output.index) for delta in output.tool_calls]
        choice.add(replace(output, tool_calls=tuple(calls)))
        fields = chunk_fields(choice, choice.take(), num_choices=asked.n)
        choice.num_published += len(output.token_ids)
        await redis.execute_command("XADD", keys.reply("q", str(asked.id)), f"{claim.epoch}-{number}", *fields)


def rename(delta: ToolCallDelta, request_id: str, index: int) -> ToolCallDelta:
    return delta if delta.id is None else replace(delta, id=call_id(request_id, index, delta.index))


async def assembled(redis: RedisClient, request_id: str) -> Reply:
    """Reads a reply as the client library does."""
    assembler = Assembler(request_id)
    reply = await read_reply(redis, request_id)
    for entry_id, entry in zip(reply.ids, reply.entries, strict=True):
        assembler.feed(entry_id, entry)
    assert assembler.reply is not None
    return assembler.reply


def told(reply: Reply) -> list[tuple[Any, ...]]:
    """Returns all that does not depend on the request's id or on rounding."""
    return [
        (
            choice.index,
            choice.text,
            choice.reasoning,
            [(call.name, call.arguments) for call in choice.tool_calls],
            choice.tokens,
            choice.finish_reason,
            choice.stop_reason,
            [(logprob.id, logprob.token, logprob.bytes) for logprob in choice.logprobs or ()],
        )
        for choice in reply.choices
    ]


async def resumed(
    redis: RedisClient,
    url: str,
    model: Path,
    config: EngineConfig,
    request: Callable[[str, int], GenerateRequest],
    outputs: Mapping[str, list[Output]],
    cuts: Sequence[tuple[str, int]],
) -> dict[tuple[str, int], Reply]:
    """Leaves each kind of request behind each of its cuts. Returns what another worker makes of them: whatever the
    cut, the reply must be the undisturbed one.
    """
    for kind, cut in cuts:
        await leave(redis, request(kind, cut), outputs[kind], cut)
    async with real_worker(url, model, config):
        replies = {(kind, cut): await assembled(redis, f"{kind}-{cut}") for kind, cut in cuts}
        await eventually(lambda: is_queue_empty(redis))
    for (kind, cut), reply in replies.items():
        assert told(reply) == told(replies[kind, 0]), (kind, cut)
    return replies


async def leave_killed(
    redis: RedisClient,
    url: str,
    log: Path,
    settings: Mapping[str, Any],
    asked: Mapping[str, GenerateRequest],
    is_under_way: Callable[[ReplyEntry], bool],
) -> None:
    """Leaves requests whose worker `victim` is killed once each of their replies has an entry that is under way."""
    victim = ModelWorker(url, log, {**QUICK, **settings, "name": "victim"})
    try:
        for each in asked.values():
            await add_entry(redis, keys.requests("q"), each.to_entry())
        for name in asked:
            await read_until(redis, name, is_under_way)
    finally:
        victim.send(signal.SIGKILL)
        victim.wait(WAIT_S)
