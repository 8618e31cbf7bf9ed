"""A chat whose template misbehaves gets one error end, and everything beside it goes on."""

from __future__ import annotations

import json
import os
import signal

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.engine.text.tokenizer import Tokenizer
from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import OwnEntry
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% set said = messages[-1].content %}{% if said == 'loop' %}" + LOOP + "{% elif said == 'large' %}"
    "{{ 'x' * 10 ** 9 }}{% elif said == 'deep' %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    "{% elif said == 'zero' %}{{ 1 // 0 }}{% elif said == 'overflow' %}{{ 2.0 ** 10000 }}"
    "{% elif said == 'no' %}{{ raise_exception('one more turn, please') }}{% endif %}{{ said }}"
)
REFUSED = {
    "loop": "the model's chat template failed: it takes more than 2 s",
    "large": "the model's chat template failed: it needs more than 256 MiB of memory",
    "deep": "the model's chat template failed: RecursionError",
    "zero": "the model's chat template failed: ZeroDivisionError",
    "overflow": "the model's chat template failed: OverflowError",
    "no": "the model's chat template refuses these messages: one more turn, please",
}


@pytest.fixture
def text() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={piece: id_ for id_, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE))


def chat(content: str) -> str:
    return json.dumps([{"role": "user", "content": content}])


def process_of(text: Tokenizer) -> int:
    """Returns the process that renders, while it is idle."""
    (process,) = text._templates["default"]._template._sandbox._idle
    return process._process.pid


async def test_each_failure_is_a_refusal_and_its_neighbours_are_served(
    redis_url: str, redis: RedisClient, text: Tokenizer
) -> None:
    engine = FakeEngine()
    async with running_worker(redis_url, engine, text) as running:
        beside = [await send(redis, messages=chat("hello"), max_tokens=5)]
        for content in REFUSED:
            await send(redis, id=content, messages=chat(content))
            beside.append(await send(redis, messages=chat(f"after {content}"), max_tokens=5))
        beside.append(await send(redis, prompt="no chat", max_tokens=5))
        ends = {content: (await read_reply(redis, content)).end for content in REFUSED}
        assert [(await read_reply(redis, id_)).end.finish_reason for id_ in beside] == ["length"] * len(beside)
        await eventually(lambda: is_queue_empty(redis))
        assert not running.task.done()
    for content, end in ends.items():
        assert (end.finish_reason, end.code) == ("error", "invalid_request")
        assert end.message is not None
        assert end.message.startswith(REFUSED[content])
    assert sorted(engine.prefilled) == sorted(beside)
    assert not await redis.exists(keys.dead("q"))


async def test_a_reply_says_that_the_template_shows_no_tools(
    redis_url: str, redis: RedisClient, text: Tokenizer
) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "look_up"}}])
    async with running_worker(redis_url, text=text):
        unseen = await send(redis, messages=chat("hello"), tools=tools, max_tokens=5)
        assert (await read_reply(redis, unseen)).end.ignored == ("tools",)
        plain = await send(redis, messages=chat("hello"), max_tokens=5)
        assert (await read_reply(redis, plain)).end.ignored is None
        required = await send(redis, messages=chat("hello"), tools=tools, tool_choice="required", max_tokens=5)
        end = (await read_reply(redis, required)).end
        assert (end.finish_reason, end.code) == ("error", "invalid_request")
        assert "shows no tools" in (end.message or "")
        async with AsyncClient(redis_url, queue="q") as client:
            asked = [{"role": "user", "content": "hello"}]
            reply = await client.generate(asked, tools=json.loads(tools), max_tokens=5)
            assert reply.ignored == ("tools",)


async def test_what_comes_while_a_template_takes_long_is_served(
    redis_url: str, redis: RedisClient, text: Tokenizer
) -> None:
    async with running_worker(redis_url, text=text):
        before = await send(redis, messages=chat("hello"), max_tokens=5)
        await read_reply(redis, before)
        pid = process_of(text)
        os.kill(pid, signal.SIGSTOP)
        try:
            slow = await send(redis, messages=chat("slow"), max_tokens=5)
            await read_until(redis, slow, lambda entry: isinstance(entry, OwnEntry))
            for content in ("first", "second"):
                quick = await send(redis, messages=chat(content), max_tokens=5)
                assert (await read_reply(redis, quick)).end.finish_reason == "length"
            plain = await send(redis, prompt="plain", max_tokens=5)
            assert (await read_reply(redis, plain)).end.finish_reason == "length"
            assert not await is_queue_empty(redis)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await read_reply(redis, slow)).end.finish_reason == "length"


async def test_a_rendering_process_that_was_killed_is_replaced(
    redis_url: str, redis: RedisClient, text: Tokenizer
) -> None:
    async with running_worker(redis_url, text=text):
        for _ in range(2):
            request_id = await send(redis, messages=chat("hello"), max_tokens=5)
            assert (await read_reply(redis, request_id)).end.finish_reason == "length"
            os.kill(process_of(text), signal.SIGKILL)
        request_id = await send(redis, messages=chat("hello"), max_tokens=5)
        assert (await read_reply(redis, request_id)).end.finish_reason == "length"
