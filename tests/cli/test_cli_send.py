from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, ToolCallDelta
from tests.cli.cli_process import Terminal, finish, penstock, start
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker


@pytest.fixture
def redis_url() -> Iterator[str]:
    """URL of one server, which is enough here: what depends on its kind is tested elsewhere."""
    with EmbeddedServer() as server:
        yield server.url


async def test_streams_the_answer_and_ends_the_line(redis_url: str) -> None:
    async with ScriptedWorker(redis_url) as worker:
        outcome = await penstock("send", "--plain", "one", "two", "--max-tokens", "7", REDIS_URL=redis_url)
    assert (outcome.status, outcome.out, outcome.err) == (0, "one two\n", "")
    assert (worker.taken[0].prompt, worker.taken[0].max_tokens) == ("one two", 7)


async def test_the_prompt_is_a_chat_and_comes_from_stdin(redis_url: str) -> None:
    async def answer(reply: ScriptedReply) -> None:
        await reply.own()
        for message in reply.request.messages or ():
            await reply.chunk(f"{message.role}={message.content};")
        await reply.end()

    async with ScriptedWorker(redis_url, answer):
        outcome = await penstock("send", "--system", "Be brief.", stdin="Hello\nthere\n", REDIS_URL=redis_url)
    assert outcome.out == "system=Be brief.;user=Hello\nthere;\n"


async def test_every_option_reaches_the_request(redis_url: str) -> None:
    given = {
        "id": "mine", "n": 2, "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
        "min_p": 0.1, "seed": 4, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "logprobs": 1, "priority": 5, "timeout_s": 60.0,
    }  # fmt: skip
    flags = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), str(value))]
    async with ScriptedWorker(redis_url, queue="q") as worker:
        outcome = await penstock(
            "send", "--queue", "q", "--plain", *flags, "--stop", "a", "--stop", "b", "--ignore-eos", "hi there",
            REDIS_URL=redis_url,
        )  # fmt: skip
    assert outcome.out == "[0] hi there\n[1] hi there\n"
    request = worker.taken[0]
    assert {name: getattr(request, name) for name in given} == given
    assert (request.stop, request.ignore_eos) == (("a", "b"), True)


async def think_and_call(reply: ScriptedReply) -> None:
    """Answers in chunks that split words, reasoning and arguments."""
    deltas = [(0, "call_1", "add", '{"a'), (0, None, None, '": 1}'), (1, "call_2", "now", "{}")]
    parts = [ToolCallDelta(index=index, id=id_, name=name, arguments=text) for index, id_, name, text in deltas]
    await reply.own()
    for index in range(reply.request.n):
        for at, (reasoning, text, calls) in enumerate(
            [("I th", "", ()), ("ink", "", ()), (".", "So", ()), ("", ":", (parts[0],)), ("", "", tuple(parts[1:]))]
        ):
            chunk = ChunkEntry(index=index, offset=at, tokens=(at,), text=text, reasoning=reasoning, tool_calls=calls)
            await reply.write(chunk)
        reply.tokens[index] = 5
    await reply.end("tool_calls")


async def test_reasoning_goes_to_stderr_and_tool_calls_have_lines_of_their_own(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, think_and_call):
        streamed = await penstock("send", "hi", REDIS_URL=redis_url)
        whole = await penstock("send", "hi", "--no-stream", REDIS_URL=redis_url)
        several = await penstock("send", "hi", "--n", "2", REDIS_URL=redis_url)
    for outcome in (streamed, whole):
        assert (outcome.status, outcome.out) == (0, 'So:\nadd({"a": 1})\nnow({})\n')
        assert outcome.err == "I think.\n"
    lines = ["So:", 'add({"a": 1})', "now({})"]
    assert several.out.splitlines() == [f"[{index}] {line}" for index in range(2) for line in lines]
    assert several.err.splitlines() == ["[0] I think.", "[1] I think."]


async def test_an_answer_without_anything_is_an_empty_line(redis_url: str) -> None:
    async def say_nothing(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.end()

    async with ScriptedWorker(redis_url, say_nothing):
        outcome = await penstock("send", "hi", REDIS_URL=redis_url)
    assert (outcome.status, outcome.out, outcome.err) == (0, "\n", "")


async def test_json_lines_have_reasoning_and_calls(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, think_and_call):
        outcome = await penstock("send", "--json", "hi", REDIS_URL=redis_url)
    *chunks, end = map(json.loads, outcome.out.splitlines())
    assert [chunk["reasoning"] for chunk in chunks] == ["I th", "ink", ".", "", ""]
    assert chunks[3]["tool_calls"] == [{"index": 0, "id": "call_1", "name": "add", "arguments": '{"a'}]
    [choice] = end["choices"]
    assert (choice["reasoning"], choice["finish_reason"]) == ("I think.", "tool_calls")
    assert choice["tool_calls"][1] == {"id": "call_2", "name": "now", "arguments": "{}"}


async def test_a_chat_with_tools_comes_from_options_and_files(redis_url: str, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    flags = ["--tools", f"@{tmp_path / 'tools.json'}", "--tool-choice", "required", "--reasoning-effort", "low"]
    async with ScriptedWorker(redis_url) as worker:
        called = await penstock("send", "hi", *flags, REDIS_URL=redis_url)
        matched = await penstock("send", "--plain", "hi", "--regex", "[@a]+", REDIS_URL=redis_url)
        formed = await penstock("send", "hi", "--response-format", '{"type": "json_object"}', REDIS_URL=redis_url)
        missing = await penstock("send", "hi", "--grammar", "@no/such.lark", REDIS_URL=redis_url)
    assert [outcome.status for outcome in (called, matched, formed, missing)] == [0, 0, 0, 2]
    first, second, third = worker.taken
    assert (first.tools, first.tool_choice, first.reasoning_effort) == (tuple(tools), "required", "low")
    assert second.regex == "[@a]+"
    assert third.response_format is not None
    assert third.response_format.type == "json_object"
    assert "--grammar: no/such.lark cannot be read" in missing.err


async def test_json_lines(redis_url: str) -> None:
    async with ScriptedWorker(redis_url):
        outcome = await penstock("send", "--plain", "--json", "one two", REDIS_URL=redis_url)
    *chunks, end = map(json.loads, outcome.out.splitlines())
    assert [(chunk["type"], chunk["text"], chunk["offset"]) for chunk in chunks] == [
        ("chunk", "one", 0),
        ("chunk", " two", 3),
    ]
    assert (end["type"], end["finish_reason"], end["choices"][0]["text"]) == ("end", "stop", "one two")
    assert end["timings"]["total_ms"] == 3


async def test_json_without_stream_is_one_object(redis_url: str) -> None:
    async with ScriptedWorker(redis_url):
        outcome = await penstock("send", "--plain", "--json", "--no-stream", "one two", REDIS_URL=redis_url)
    assert json.loads(outcome.out)["choices"][0]["text"] == "one two"


async def test_a_failed_request_exits_1_with_the_reason(redis_url: str) -> None:
    async def fail(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.end("error", code="too_long", message="the prompt has 9 tokens, the limit is 8")

    async with ScriptedWorker(redis_url, fail):
        outcome = await penstock("send", "hi", REDIS_URL=redis_url)
    assert outcome.status == 1
    assert "too_long: the prompt has 9 tokens" in outcome.err
    assert len(outcome.err.splitlines()) == 1


async def test_a_cancelled_request_exits_1_after_its_text(redis_url: str) -> None:
    async def part(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("so far")
        await reply.end("cancelled")

    async with ScriptedWorker(redis_url, part):
        outcome = await penstock("send", "hi", REDIS_URL=redis_url)
    assert (outcome.status, outcome.out) == (1, "so far\n")
    assert outcome.err == "penstock: the request was not finished: cancelled\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--temperature", "-1"], 1, "temperature: Input should be greater than or equal to 0"),
        (["--n", "many"], 1, "n: Input should be a valid integer"),
        (["--plain", "--system", "x"], 2, "leave out --plain"),
        (["--wait", "0.2"], 1, "within 0.2 s"),
        (["--queue", "no spaces"], 2, "--queue: a queue's name has 1 to 128"),
    ],
)
async def test_what_cannot_be_done_is_said(redis_url: str, arguments: list[str], status: int, message: str) -> None:
    outcome = await penstock("send", "hi", *arguments, REDIS_URL=redis_url)
    assert outcome.status == status
    assert message in outcome.err
    assert "Traceback" not in outcome.err


async def test_no_redis_is_said_in_one_line() -> None:
    outcome = await penstock("send", "hi", "--redis-url", "redis://127.0.0.1:1", "--wait", "5")
    assert outcome.status == 1
    assert outcome.err.splitlines()[-1].startswith("penstock: no connection to Redis at redis://127.0.0.1:1/0")
    assert "Traceback" not in outcome.err


async def test_nobody_who_serves_the_queue_is_said_at_once_and_the_request_waits(redis_url: str) -> None:
    process = await start("send", "--plain", "one", REDIS_URL=redis_url)
    assert process.stderr is not None
    line = await asyncio.wait_for(process.stderr.readline(), WAIT_S)
    assert line == b"no worker serves queue 'default'; its requests wait for one\n"
    async with ScriptedWorker(redis_url):
        outcome = await finish(process)
    assert (outcome.status, outcome.out, outcome.err) == (0, "one\n", "")


async def test_a_terminal_shows_the_backlog_until_the_answer_begins(redis_url: str, redis: RedisClient) -> None:
    async def hold(reply: ScriptedReply) -> None:
        await reply.own()
        await eventually(lambda: "requests in queue 'default': 3" in terminal.text)
        await reply.chunk("one")
        await reply.end()

    for i in range(2):
        await redis.xadd(keys.requests("default"), {"prompt": str(i), "id": str(i)})
    with Terminal() as terminal:
        process = await start("send", "--plain", "one", stderr=terminal.device, TERM="xterm", REDIS_URL=redis_url)
        await eventually(lambda: "no worker serves queue 'default'; backlog: 3" in terminal.text)
        async with ScriptedWorker(redis_url, hold):
            outcome = await finish(process)
        _, _, after = terminal.text.rpartition("default")
    assert (outcome.status, outcome.out) == (0, "one\n")
    assert "\x1b[2K" in after  # erased
    assert "\x1b[?25h" in after  # the cursor is there again


async def test_ctrl_c_cancels_the_request(redis_url: str, redis: RedisClient) -> None:
    async def wait(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("begun")
        await reply.cancelled()
        await reply.end("cancelled")

    async with ScriptedWorker(redis_url, wait) as worker:
        process = await start("send", "hi", REDIS_URL=redis_url)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readexactly(5), WAIT_S) == b"begun"
        process.send_signal(signal.SIGINT)
        outcome = await finish(process)
        request_id = worker.taken[0].id
        assert request_id is not None
        await eventually(lambda: redis.exists(keys.cancel("default", request_id)))
    assert outcome.status == 130
