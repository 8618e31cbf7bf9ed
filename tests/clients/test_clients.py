"""Clients too heavy for the project's own environment, each in an environment of its own: `make test-clients`."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.clients.environments import TIMEOUT_S, in_browser, in_node, python_of, run
from tests.clients.programs import COMMANDS, HERE, PAGE, PROGRAMS, WHAT_COMMANDS_DO, Passed, Program, page, versions_of
from tests.clients.stage import ONE_BY_ONE, Stage, staged
from tests.support.long_minute import lengthen_minute
from tests.support.patience import TEST_S
from tests.support.processes import ended
from tests.support.programs.gateway_harness import new_key, running_gateway
from tests.support.programs.gateway_model import serving_model
from tests.support.programs.worker_harness import read_reply, running_worker, send

HAVE = "have: "


@pytest.fixture
def long_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    lengthen_minute(monkeypatch)


@pytest.mark.clients
@pytest.mark.timeout(3 * TEST_S)
@pytest.mark.usefixtures("long_minute")
async def test_clients_get_what_they_ask_for_unmodified(tmp_path: Path, compile_cache: Path) -> None:
    commands = {program: command_of(program) for program in PROGRAMS}
    passed: dict[Program, Passed] = {}
    failed: list[AssertionError] = []
    async with staged(tmp_path, compile_cache) as stage:
        for program, command in commands.items():
            try:
                passed[program] = Passed.said_in(await played(stage, *command))
            except AssertionError as error:
                failed.append(error)
    assert not failed, "\n".join(map(str, failed))
    assert all("worker_killed" in each.checks for each in passed.values())
    PAGE.write_text(page(passed))


async def played(stage: Stage, *command: str | Path) -> str:
    """Runs a program, which may have things killed; returns its output. Fails with its last lines."""
    lines: list[str] = []
    theirs = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which hides torch
    process = await asyncio.create_subprocess_exec(
        *command,
        stage.address.url,
        await stage.next_key(),
        stdin=PIPE,
        stdout=PIPE,
        stderr=STDOUT,
        env=theirs,
        limit=1 << 20,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async for line in process.stdout:
                lines.append(line.decode(errors="replace"))
                if lines[-1].startswith(HAVE):
                    await stage.have(lines[-1].removeprefix(HAVE).strip())
                    process.stdin.write(b"done\n")
            status = await process.wait()
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{command}: {error!r}\n{''.join(lines[-60:])}") from error
    finally:
        await ended(process)
    assert status == 0, f"{command}: {''.join(lines[-60:])}"
    return "".join(lines)


@pytest.mark.clients
@pytest.mark.timeout(TEST_S)
async def test_the_page_chats_in_a_browser(tmp_path: Path, compile_cache: Path) -> None:
    async with serving_model(tmp_path, compile_cache, **ONE_BY_ONE) as gateway:
        status, output = await run(*in_browser("try_page.mjs"), gateway.url)
        assert status == 0, output
        assert output.count("passed:") >= 5


def test_the_page_has_each_program_in_the_version_that_is_tested() -> None:
    text = PAGE.read_text()
    assert [versions_of(program) in text for program in PROGRAMS] == [True] * len(PROGRAMS)
    assert [f"| `{name}` {version} | {WHAT_COMMANDS_DO} |" in text for name, version in COMMANDS.items()] == [
        True
    ] * len(COMMANDS)
    assert text.count("\n| ") == 2 + len(PROGRAMS) + len(COMMANDS)


@pytest.mark.clients
async def test_an_operator_looks_after_a_queue_in_a_browser(redis: RedisClient, redis_url: str) -> None:
    await redis.xadd(keys.dead("q"), {"id": "gone", "code": "c", "field:prompt": "a secret prompt"}, id="1-0")
    secret = await new_key(redis_url, admin=True)
    async with (
        running_gateway(redis_url) as gateway,
        running_worker(redis_url, FakeEngine(step_s=0.01), name="one") as drained,
        running_worker(redis_url, FakeEngine(step_s=0.01), name="two"),
    ):
        await send(redis, prompt="a secret prompt", id="endless", tenant="acme", max_tokens=10**6)
        status, output = await run(*in_browser("try_operations.mjs"), gateway.url, secret.text)
        assert status == 0, output
        assert output.count("passed:") == 6
        assert (await read_reply(redis, "endless")).end.finish_reason == "cancelled"
        await drained.task


def command_of(program: Program) -> tuple[Path, Path]:
    """Returns what runs the program's script, and the script where it finds the program."""
    if not program.is_javascript:
        return python_of(program.environment), HERE / program.script
    return in_node(program.environment, Path(program.script).name)
