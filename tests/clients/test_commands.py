"""Agents on the command line, as they are published: each runs a program that the model asks for, and tells its answer.

They begin with prompts that are longer than the demo model's context, so a script takes the model's place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.producer import ToolCallDelta
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import GenerateRequest
from tests.clients.environments import ENVIRONMENTS, run
from tests.clients.stage import Address
from tests.gateway.responses.responses_harness import write
from tests.support.patience import TEST_S
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import CARD, announce

PRINTS = "echo penstock-heard"
ANSWER = "penstock-answers"
SHELLS: Mapping[str, object] = {
    "exec_command": {"cmd": PRINTS},
    "shell_command": {"command": PRINTS},
    "shell": {"command": ["bash", "-c", PRINTS]},
    "Bash": {"command": PRINTS, "description": "Prints."},
    "bash": {"command": PRINTS, "description": "Prints."},
}
"""The tools that run programs, by their names, and the arguments of a call."""


class Command(NamedTuple):
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    files: Mapping[str, str]  # in the folder where it runs


def codex(url: str) -> Command:
    provider = f'{{name="Penstock",base_url="{url}/v1",env_key="PENSTOCK_KEY",wire_api="responses"}}'
    settings = ("model_provider=penstock", "model=tiny", f"model_providers.penstock={provider}")
    given = [part for each in settings for part in ("-c", each)]
    allowed = "--dangerously-bypass-approvals-and-sandbox"
    return Command(("codex", "exec", "--skip-git-repo-check", allowed, *given), {"PENSTOCK_KEY": "none"}, {})


def claude(url: str) -> Command:
    variables = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    return Command(("claude", "--allowedTools", "Bash", "-p"), variables, {})


def opencode(url: str) -> Command:
    provider = {
        "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"tiny": {"name": "tiny"}},
    }  # fmt: skip
    settings = {"model": "penstock/tiny", "small_model": "penstock/tiny", "autoupdate": False, "share": "disabled"}
    document = {**settings, "permission": {"bash": "allow"}, "provider": {"penstock": provider}}
    return Command(("opencode", "run"), {}, {"opencode.json": json.dumps(document)})


def heard(request: GenerateRequest) -> bool:
    """Whether the conversation has what the program has printed."""
    return any(
        message.role == "tool" and "penstock-heard" in str(message.content) for message in request.messages or ()
    )


@dataclass
class Calling:
    """A worker's script: a call of a shell, and an answer once its output has come back.

    Another worker goes on in the middle of the call, as after a death; in the middle of the answer the gateway dies.
    """

    address: Address
    num_answers: int = 0

    async def __call__(self, reply: ScriptedReply) -> None:
        await reply.own()
        names = [tool["function"]["name"] for tool in reply.request.tools]
        name = next((name for name in names if name in SHELLS), None)
        if name is not None and not heard(reply.request):
            await self._call(reply, name)
        elif name is None:
            await reply.chunk(ANSWER)
            await reply.end("stop")
        else:
            await self._answer(reply)

    async def _call(self, reply: ScriptedReply, name: str) -> None:
        arguments = json.dumps(SHELLS[name])
        await write(reply, calls=(ToolCallDelta(index=0, id="call_1", name=name, arguments=arguments[:9]),))
        reply.epoch += 1
        await reply.own()
        await write(reply, calls=(ToolCallDelta(index=0, arguments=arguments[9:]),))
        await reply.end("tool_calls")

    async def _answer(self, reply: ScriptedReply) -> None:
        self.num_answers += 1
        await reply.chunk(ANSWER[:5])
        if self.num_answers == 1:
            await self.address.kill()
        await reply.chunk(ANSWER[5:])
        await reply.end("stop")


@pytest.mark.clients
@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize("command", [codex, claude, opencode])
async def test_an_agent_runs_what_the_model_asks_for_while_a_worker_and_a_gateway_die(
    redis: RedisClient,
    redis_url: str,
    redis_server: EmbeddedServer,
    tmp_path: Path,
    command: Callable[[str], Command],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    binaries = ENVIRONMENTS / "commands" / "node_modules" / ".bin"
    assert binaries.exists(), "not installed: commands; `make test-clients` does that"
    await announce(redis, card=CARD.model_copy(update={"max_model_len": 200_000, "max_body_bytes": 8 << 20}))
    address = Address(redis_server.port, max_body_bytes=8 << 20)
    script = Calling(address)
    async with ScriptedWorker(redis_url, script) as worker, address:
        (program, *arguments), variables, files = command(address.url)
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        monkeypatch.chdir(tmp_path)
        for name, value in {**variables, "HOME": str(tmp_path), "PWD": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        status, output = await run(binaries / program, *arguments, "Is it noon?")
        assert (status, ANSWER in output) == (0, True), output[-3000:]
        assert any(map(heard, worker.taken)), output[-3000:]
        assert script.num_answers > 1, "it did not ask again"
