"""Tests of `penstock chat`."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from penstock.cli.chatting.answerers import HttpAnswerer
from penstock.cli.chatting.conversation import Conversation, Refused
from penstock.cli.chatting.lines import texts
from penstock.local.data_folder import DataFolder, Owner
from penstock.local.embedded import EmbeddedServer
from penstock.producer import Prefill
from penstock.protocol.redis.connection import connect
from penstock.protocol.wire import ChunkEntry
from tests.cli.cli_process import Outcome, Terminal, command, environment
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import announce, new_key, running_gateway


@pytest.fixture
def redis_url() -> Iterator[str]:
    """URL of one server, which is enough here: what depends on its kind is tested elsewhere."""
    with EmbeddedServer() as server:
        yield server.url


async def recite(reply: ScriptedReply) -> None:
    """Answers with what it was shown."""
    await reply.own()
    if "fail" in str(reply.request.messages):
        await reply.end("error", code="engine_error", message="it broke")
        return
    for message in reply.request.messages or ():
        await reply.chunk(f"{message.role}={message.content};")
    await reply.end("length" if reply.request.max_tokens == 7 else "stop")


async def chat(typed: str, *arguments: str, **variables: str) -> Outcome:
    def run() -> Outcome:
        with mock.patch.object(sys, "stdin", io.StringIO(typed)):
            return command("chat", *arguments, **variables)

    return await asyncio.to_thread(run)


async def test_turns_and_commands_are_what_the_model_is_shown(redis_url: str, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = ["one", "two", "/system Be brief.", "/reset", "/set max_tokens 7", '"""', "a", "b", '"""', f"/save {saved}"]
    async with ScriptedWorker(redis_url, recite) as worker:
        outcome = await chat("\n".join([*lines, "/bye", "never"]), REDIS_URL=redis_url)
    first, second, third = *outcome.out.splitlines()[:2], "\n".join(outcome.out.splitlines()[2:])
    assert (outcome.status, outcome.err) == (0, "")
    assert first == "user=one;"
    assert second == "user=one;assistant=user=one;;user=two;"
    assert third == "system=Be brief.;user=a\nb;"
    assert worker.taken[2].max_tokens == 7
    assert json.loads(saved.read_text()) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": third},
        ],
        "max_tokens": 7,
    }


async def test_what_failed_is_said_and_forgotten(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, recite):
        outcome = await chat("fail\n/sett x 1\ngo on\n", REDIS_URL=redis_url)
    assert (outcome.status, outcome.out.strip()) == (1, "user=go on;")
    failed, refused = outcome.err.splitlines()
    assert "it broke" in failed
    assert refused == "penstock: there is no command /sett; did you mean /set?; /help lists them"


async def test_it_finds_the_service_of_this_machine(redis_url: str, tmp_path: Path) -> None:
    with DataFolder(tmp_path / "penstock" / "serve") as folder:
        folder.note(Owner(1, redis_url))
        async with ScriptedWorker(redis_url, recite):
            outcome = await chat("hi", XDG_DATA_HOME=str(tmp_path))
    assert outcome.out == "user=hi;\n"


async def test_over_http_with_a_key(redis_url: str) -> None:
    redis = connect(redis_url, decode=True)
    await announce(redis)
    await redis.aclose()
    secret = await new_key(redis_url)
    async with running_gateway(redis_url) as gateway, ScriptedWorker(redis_url, recite) as worker:
        answered = await chat("one\n/set seed 3\ntwo", "--url", gateway.url, "--api-key", secret.text)
        refused = await chat("one", "--url", f"{gateway.url}/v1", "tiny")
    assert (answered.status, answered.out) == (0, "user=one;\nuser=one;assistant=user=one;;user=two;\n")
    assert worker.taken[1].seed == 3
    assert refused.status == 1
    assert "penstock: the server answered 401: " in refused.err


async def test_over_http_a_gateway_says_how_far_a_long_prompt_is(redis_url: str) -> None:
    told: list[Prefill] = []

    async def slowly(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.write(ChunkEntry(index=0, offset=0, text="", tokens=(), prefill_done=2048, prefill_total=6800))
        await eventually(lambda: told)
        await reply.chunk("a")
        await reply.end()

    redis = connect(redis_url, decode=True)
    await announce(redis)
    await redis.aclose()
    async with running_gateway(redis_url, commit_after_s=0.01) as gateway, ScriptedWorker(redis_url, slowly):
        asked = [{"role": "user", "content": "one"}]
        pieces = await asyncio.to_thread(
            lambda: [*HttpAnswerer(gateway.url, None, None).answer(asked, {}, told.append)]
        )
    assert {*told} == {Prefill(2048, 6800)}
    assert "".join(piece.text for piece in pieces) == "a"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--url", "localhost"], 2, "--url: must be a URL such as"),
        (["--url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1 can't be reached"),
        (["--api-key", "x"], 2, "--api-key is for --url"),
        (["/nothing/here"], 2, "MODEL /nothing/here: there is no directory /nothing/here"),
    ],
)
async def test_what_cannot_begin_is_one_line(arguments: list[str], status: int, said: str) -> None:
    outcome = await chat("hi", *arguments)
    assert (outcome.status, outcome.out) == (status, "")
    assert outcome.err.startswith(f"penstock: {said}")


async def test_a_model_by_itself(compile_cache: Path) -> None:
    outcome = await chat("/set temperature 0\nWhat is 347 + 85?", "demo", "--compile-cache-dir", str(compile_cache))
    assert (outcome.status, outcome.out) == (0, "347 + 85 = 432\n")


async def test_at_a_terminal_ctrl_c_stops_an_answer_and_the_chat_goes_on(redis_url: str) -> None:
    async def talk(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("never ending")
        if "stop me" in str(reply.request.messages[-1] if reply.request.messages else ""):
            await reply.cancelled()
            await reply.end("cancelled")
        else:
            await reply.end()

    with Terminal(rows=40, columns=100) as terminal:
        async with ScriptedWorker(redis_url, talk) as worker:
            variables = environment(REDIS_URL=redis_url, TERM="xterm")
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "penstock", "chat", env=variables, cwd=ROOT,
                stdin=terminal.device, stdout=terminal.device, stderr=terminal.device,
            )  # fmt: skip
            await eventually(lambda: ">>> " in terminal.text)
            terminal.type("stop me\n")
            await eventually(lambda: "never ending" in terminal.text)
            process.send_signal(signal.SIGINT)
            await eventually(lambda: terminal.text.count(">>> ") == 2)
            terminal.type("again\n")
            await eventually(lambda: terminal.text.count(">>> ") == 3)
            terminal.type("\x04")
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
        assert "stopped" in terminal.text
        assert re.search(r"12 tokens, the first after \d+\.\d\d s, [\d.]+ tokens/s", terminal.text)
    assert [message.content for message in worker.taken[1].messages or ()] == ["stop me", "never ending", "again"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/reset all", "/reset takes nothing, not 'all'"),
        ("/set n 2", "there is no parameter 'n'"),
        ("/set temperature hot", "temperature: "),
        ("/set temperatur 1", "there is no parameter 'temperatur'; did you mean temperature?"),
        ("/save", "/save needs the name of a file"),
        ("/save /", "/ is there already"),
        ("/save /proc/nothing/x", "/proc/nothing/x can't be written"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_why(line: str, said: str) -> None:
    conversation = Conversation()
    with pytest.raises(Refused, match=f"^{re.escape(said)}"):
        conversation.command(line)
    assert conversation == Conversation()


def test_a_parameter_can_be_taken_back() -> None:
    conversation = Conversation()
    assert conversation.command("/set stop a b") == "stop = 'a b'"
    assert conversation.command("/set stop") == "stop is the model's own"
    assert conversation.settings == {}


def test_texts_have_one_line_or_several() -> None:
    lines = iter(["one", "", "two \\", "three", '"""four', "five", 'six"""', '"""seven"""', "eight"])

    def read(_: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    assert list(texts(read)) == ["one", "two \nthree", "four\nfive\nsix", "seven", "eight"]
