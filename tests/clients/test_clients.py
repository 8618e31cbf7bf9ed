"""Clients too heavy for the project's own environment, each in an environment of its own: `make test-clients`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.clients.environments import in_browser, in_node, python_of, run
from tests.clients.programs import COMMANDS, HERE, PAGE, PROGRAMS, Program, page, versions_of
from tests.support.programs.gateway_harness import new_key, running_gateway
from tests.support.programs.gateway_model import serving_model
from tests.support.programs.worker_harness import read_reply, running_worker, send


@pytest.mark.clients
@pytest.mark.timeout(900)
async def test_clients_get_what_they_ask_for_unmodified(tmp_path: Path, compile_cache: Path) -> None:
    commands = {program: command_of(program) for program in PROGRAMS}
    browser = in_browser("try_page.mjs")
    passed = {}
    async with serving_model(tmp_path, compile_cache) as gateway:
        for program, command in commands.items():
            status, output = await run(*command, gateway.url)
            assert status == 0, f"{program.script}:\n{output}"
            passed[program] = re.findall(r"^passed: (\w+)$", output, re.MULTILINE)
            assert len(passed[program]) >= 3
        status, output = await run(*browser, gateway.url)
        assert status == 0, output
        assert output.count("passed:") >= 5
    PAGE.write_text(page(passed))


def test_the_page_has_each_program_in_the_version_that_is_tested() -> None:
    text = PAGE.read_text()
    assert [versions_of(program) in text for program in PROGRAMS] == [True] * len(PROGRAMS)
    assert [f"| `{name}` {version} |" in text for name, version in COMMANDS.items()] == [True] * len(COMMANDS)
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
