"""The examples and the documented redis-cli lines run unchanged, against a real server and a scripted worker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from typing import Any

import pytest

from penstock.protocol import keys
from penstock.protocol.wire import ChunkEntry, ToolCallDelta
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.processes import ended
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.redis_servers.streams import read_stream

EXAMPLES = ROOT / "examples"
CLIENT_DOCS = (ROOT / "docs" / "client.md").read_text()
WIRE_DOCS = (ROOT / "docs" / "wire.md").read_text()
CHUNKS = ["one line,\n", "another \u00fc\n\n", "", "\U0001f680 \"quoted\" 'text' \\n $HOME ", "a,b"]

needs_redis_cli = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


async def run(*command: str, redis_url: str = "", **more: str) -> tuple[int, str, str]:
    """Runs a command with the server's URL; returns status, stdout and stderr."""
    environment = {**os.environ, "REDIS_URL": redis_url, "PENSTOCK_QUEUE": "examples", **more}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(WAIT_S):
            out, err = await process.communicate()
    finally:
        await ended(process)
    return process.returncode or 0, out.decode(), err.decode()


async def in_chunks(reply: ScriptedReply) -> None:
    """Answers with texts that are hard on a shell, slowly enough for each to be read by itself."""
    await reply.own()
    for text in CHUNKS:
        await reply.chunk(text)
        await asyncio.sleep(0.02)
    await reply.end("length")


async def refuse(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.end("error", code="too_long", message="the prompt has 9 tokens")


ARGUMENTS = '{"city": "M\u00fcnchen", "days": [1,\n 2]}'


async def think_and_call(reply: ScriptedReply) -> None:
    """Reasons, says something, and calls a tool with arguments that come in parts."""
    await reply.own()
    calls = [ToolCallDelta(index=0, id="call_1", name="weather", arguments=ARGUMENTS[:10])]
    calls += [ToolCallDelta(index=0, arguments=ARGUMENTS[10:])]
    said: list[dict[str, Any]] = [{"reasoning": "Let me"}, {"reasoning": " see."}, {"text": "Well"}]
    for at, parts in enumerate([*said, *({"tool_calls": (call,)} for call in calls)]):
        await reply.write(ChunkEntry.model_validate({"index": 0, "offset": at, "tokens": (at,), "text": "", **parts}))
    reply.tokens[0] = 5
    await reply.end("tool_calls")


async def tell_a_story(reply: ScriptedReply) -> None:
    """Answers each prompt of the examples; the very long story goes on until it is cancelled."""
    request = reply.request
    prompt = str(request.prompt or (request.messages[0].content if request.messages else ""))
    await reply.own()
    if "very long" in prompt:
        await reply.cancelled()
        await reply.end("cancelled")
        return
    for word in f"answer to {prompt}".split(" "):
        await reply.chunk(word + " ")
    await reply.end()


CONSUMERS = [
    pytest.param(["bash", str(EXAMPLES / "consumer.sh")], marks=needs_redis_cli, id="redis-cli"),
    pytest.param(["node", str(EXAMPLES / "consumer.mjs")], marks=needs_node, id="node"),
]


@pytest.mark.parametrize("command", CONSUMERS)
async def test_a_consumer_follows_a_reply_to_its_end(redis_url: str, command: list[str]) -> None:
    async with ScriptedWorker(redis_url, in_chunks, queue="examples") as worker:
        status, out, err = await run(*command, "my prompt", redis_url=redis_url)
    assert status == 0, err
    assert out == "".join(CHUNKS) + "\n"
    assert "length" in err
    assert worker.taken[0].prompt == "my prompt"


@pytest.mark.parametrize("command", CONSUMERS)
async def test_a_consumer_shows_reasoning_and_tool_calls(redis_url: str, command: list[str]) -> None:
    messages = '[{"role": "user", "content": "Hi"}]'
    async with ScriptedWorker(redis_url, think_and_call, queue="examples") as worker:
        status, out, err = await run(
            *command, messages, "max_tokens", "7", redis_url=redis_url, PENSTOCK_FIELD="messages"
        )
    assert status == 0, err
    assert worker.taken[0].messages is not None
    assert (worker.taken[0].messages[0].content, worker.taken[0].max_tokens) == ("Hi", 7)
    assert "Let me see." in err
    assert "tool_calls" in err
    said, *calls = out.splitlines()
    assert said == "Well"
    if command[0] == "node":
        assert "\n".join(calls) == f"weather({ARGUMENTS})"
        return
    parts = [part for line in calls for part in json.loads(line)]
    assert (parts[0]["id"], parts[0]["name"]) == ("call_1", "weather")
    assert "".join(part["arguments"] for part in parts) == ARGUMENTS


@pytest.mark.parametrize("command", CONSUMERS)
async def test_a_consumer_tells_of_a_refusal(redis_url: str, command: list[str]) -> None:
    async with ScriptedWorker(redis_url, refuse, queue="examples"):
        status, out, err = await run(*command, "my prompt", redis_url=redis_url)
    assert (status, out) == (1, "\n")
    assert "error too_long the prompt has 9 tokens" in err


@needs_redis_cli
async def test_the_redis_cli_consumer_takes_further_fields(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, in_chunks, queue="examples") as worker:
        command = ("bash", str(EXAMPLES / "consumer.sh"), "x", "max_tokens", "7", "stop", '["a", "b"]')
        status, _, err = await run(*command, redis_url=redis_url)
    assert status == 0, err
    assert (worker.taken[0].max_tokens, worker.taken[0].stop) == (7, ("a", "b"))


async def test_the_blocking_client_example(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, tell_a_story, queue="examples"):
        status, out, err = await run(sys.executable, str(EXAMPLES / "sync_client.py"), redis_url=redis_url)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("answer to Count from 1 to 5.")
    assert lines[1].startswith("stop, ")
    assert [line.strip() for line in lines[2:]] == [
        f"What is {number} + {number + 1}? -> answer to What is {number} + {number + 1}?" for number in range(1, 9)
    ]
    assert "8/8" in err


async def test_the_asyncio_client_example(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, tell_a_story, queue="examples"):
        status, out, err = await run(sys.executable, str(EXAMPLES / "async_client.py"), redis_url=redis_url)
    assert status == 0, err
    assert [line.strip() for line in out.splitlines()] == [
        "at once: answer to What is 2 + 3?  | answer to What is 20 + 30?",
        "begun: answer",
        "continued: to Tell me a story.",
        "cancelled: cancelled",
    ]


async def test_the_example_without_a_queue() -> None:
    command = (sys.executable, str(EXAMPLES / "without_a_queue.py"))
    status, out, err = await run(*command)
    assert (status, err) == (0, "")
    assert out.splitlines()[:4] == [
        "What is 1 + 85? -> 1 + 85 = 86",
        "What is 20 + 85? -> 20 + 85 = 105",
        "What is 300 + 85? -> 300 + 85 = 385",
        "r-i-v-e-r (stop, 10 tokens)",
    ]
    assert out.splitlines()[4].startswith("Once upon a time")


async def test_the_documented_code_without_a_queue() -> None:
    """The code and its output are as documented."""
    section = CLIENT_DOCS.partition("## Without a queue")[2]
    code, printed = re.findall(r"```python\n((?s:.*?))```\n\n((?:    .*\n)+)", section)[0]
    small = "LLM('demo', max_num_seqs=8, max_batch_tokens=64, num_pages=520)"  # as other tests: compiled already
    command = (sys.executable, "-c", code.replace('LLM("demo")', small))
    status, out, err = await run(*command)
    assert (status, err) == (0, "")
    assert out == re.sub("^    ", "", printed, flags=re.MULTILINE)


async def is_done(worker: ScriptedWorker, request_id: str) -> bool:
    return bool(await worker.redis.hget(keys.state("default", request_id), "status") == "done")


@needs_redis_cli
async def test_the_documented_lines_work(redis_url: str) -> None:
    """Every shell block of docs/wire.md runs, in order."""
    enqueue, read, cancel, document, keep, call = re.findall(r"```sh\n(.*?)```", WIRE_DOCS, re.DOTALL)
    function = f'redis-cli() {{ command redis-cli -u "{redis_url}" "$@"; }}\n'
    async with ScriptedWorker(redis_url, tell_a_story) as worker:
        await run("bash", "-ec", function + enqueue, redis_url=redis_url)
        await eventually(lambda: worker.redis.xlen(keys.reply("default", "hello-1")))
        await eventually(lambda: worker.redis.hget(keys.state("default", "hello-1"), "status"))
        status, out, err = await run("bash", "-ec", function + read, redis_url=redis_url)
        assert status == 0, err
        assert out.startswith("penstock:default:{hello-1}:reply\n1-0\ntype\nown\n")
        await run("bash", "-ec", function + cancel + document, redis_url=redis_url)
        assert await worker.redis.get(keys.cancel("default", "hello-1")) == "1"
        await eventually(lambda: len(worker.taken) == 2)
        keep_it, ask_how_long = keep.splitlines()
        await run("bash", "-ec", function + keep_it, redis_url=redis_url)
        await eventually(lambda: is_done(worker, "hello-3"))
        _, out, _ = await run("bash", "-ec", function + ask_how_long, redis_url=redis_url)
        assert 172_000 < int(out) <= 172_800
        ask, _ = call.strip().splitlines()  # nobody answers here, so the second line would wait
        await run("bash", "-ec", function + ask, redis_url=redis_url)
        [(_, asked)] = await read_stream(worker.redis, keys.calls("default"))
        assert asked == {"call": "count_tokens", "prompt": "What is 12 + 30?", "to": "my-answers"}
    first, second, third = worker.taken
    assert (first.id, first.prompt, first.max_tokens) == ("hello-1", "What is 12 + 30?", 32)
    assert (third.id, third.keep_s) == ("hello-3", 172_800)
    assert (second.id, second.stop) == ("hello-2", ("\n\n", "END"))
