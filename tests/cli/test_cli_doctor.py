from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.checks import Finding
from penstock.cli.checks.arithmetic import _compared, check_arithmetic
from penstock.cli.checks.host import check_compiler
from penstock.cli.checks.model import check_model
from penstock.cli.checks.redis import _version, check_redis
from penstock.engine import EngineConfig
from penstock.engine.demo import MODEL_DIR
from penstock.engine.deployment.deployment import DEFAULT_BUILD_DIR
from penstock.engine.kernels.cpu import kind_here, load_library
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.cli.cli_process import Outcome, command, finish, penstock, start
from tests.support.patience import WAIT_S
from tests.support.programs.fakes import ScriptedWorker

ALL_CHECKS = [
    *("packages", "redis", "maxmemory-policy", "appendonly", "disk", "memory", "writes"),
    *("permissions", "queue", "dead letters"),
    *("compiler", "devices", "arithmetic", "model", "weights", "tokenizer", "template", "generation"),
]


@pytest.fixture
async def durable(redis: RedisClient) -> AsyncIterator[RedisClient]:
    """Sets the server up as it should be, and afterwards as it was."""
    before = {**await redis.config_get("appendonly"), **await redis.config_get("maxmemory-policy")}
    await redis.config_set("appendonly", "yes")
    yield redis
    for name, value in before.items():
        await redis.config_set(str(name), str(value))


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def checks_of(outcome: Outcome) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(outcome.out)["checks"]}


async def test_a_good_set_up_is_all_ok(redis_url: str, durable: RedisClient) -> None:
    outcome = await penstock("doctor", "--json", "--model", "demo", REDIS_URL=redis_url)
    checks = checks_of(outcome)
    expected = dict.fromkeys(ALL_CHECKS, "ok") | {"redis": _version(await durable.info(), "").status}
    assert {name: check["status"] for name, check in checks.items()} == expected
    assert (outcome.status, json.loads(outcome.out)["ok"]) == (0, True)
    assert "cpu" in checks["devices"]["detail"]
    assert "chat template" in checks["tokenizer"]["detail"]


@pytest.mark.every_server
async def test_a_wrong_eviction_policy_fails_and_says_how_to_fix_it(redis_url: str, durable: RedisClient) -> None:
    await durable.config_set("maxmemory-policy", "allkeys-lru")
    outcome = await asyncio.to_thread(command, "doctor", REDIS_URL=redis_url)
    assert outcome.status == 1
    failed = next(line for line in outcome.out.splitlines() if line.startswith("fail"))
    assert "maxmemory-policy" in failed
    assert "allkeys-lru" in failed
    assert "CONFIG SET maxmemory-policy noeviction" in outcome.out


async def test_warnings_do_not_fail(redis_url: str) -> None:
    outcome = await asyncio.to_thread(command, "doctor", REDIS_URL=redis_url)
    assert outcome.status == 0
    assert "warn appendonly" in outcome.out
    assert "warn model" in outcome.out


@pytest.mark.parametrize(
    ("info", "status"),
    [
        ({"redis_version": "6.2.24"}, "fail"),
        ({"redis_version": "7.0.15"}, "warn"),  # upstream ended; a distribution may have the fixes
        ({"redis_version": "7.2.15"}, "warn"),
        ({"redis_version": "7.2.16"}, "ok"),
        ({"redis_version": "8.10.0"}, "warn"),
        ({"redis_version": "8.12.0"}, "ok"),  # later than what is known
        ({"redis_version": "7.2.4", "valkey_version": "9.0.4"}, "warn"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, "ok"),
    ],
)
def test_a_server_without_known_fixes_is_a_warning(info: dict[str, str], status: str) -> None:
    assert _version(info, "here").status == status


async def test_no_redis_fails_with_the_address_but_no_password() -> None:
    outcome = await asyncio.to_thread(command, "doctor", "--json", REDIS_URL="redis://user:hunter2@127.0.0.1:1")
    assert outcome.status == 1
    assert "redis://127.0.0.1:1/0" in checks_of(outcome)["redis"]["detail"]
    assert "hunter2" not in outcome.out + outcome.err


async def test_a_light_install_is_told_what_it_can_do(redis_url: str) -> None:
    code = "import sys; sys.modules['jax'] = None\nfrom penstock.cli import main\nmain()"
    outcome = await penstock("doctor", "--json", "--model", "demo", code=code, REDIS_URL=redis_url)
    checks = checks_of(outcome)
    assert (outcome.status, checks["worker extra"]["status"]) == (0, "warn")
    assert "model" not in checks


@pytest.mark.every_server
async def test_a_user_without_permission_fails_with_the_reason(redis_url: str, redis: RedisClient) -> None:
    await redis.execute_command("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "+ping")
    try:
        found = by_name(await check_redis(redis_url.replace("://", "://narrow:secret@"), "default"))
    finally:
        await redis.execute_command("ACL", "DELUSER", "narrow")
    assert {finding.status for finding in found.values()} == {"warn"}
    assert found["redis"].detail.startswith("this user may not look: ")
    assert "users.acl" in found["permissions"].fix


@pytest.mark.every_server
async def test_a_user_with_some_of_a_worker_s_permissions_is_told_which_are_missing(
    redis_url: str, redis: RedisClient
) -> None:
    await redis.execute_command("ACL", "SETUSER", "some", "on", ">secret", "~*", "+@all", "-xack", "-xgroup|create")
    try:
        found = by_name(await check_redis(redis_url.replace("://", "://some:secret@"), "default"))["permissions"]
    finally:
        await redis.execute_command("ACL", "DELUSER", "some")
    expected = "XGROUP CREATE on penstock:{default}:requests, XACK on penstock:{default}:requests"
    assert (found.status, expected in found.detail) == ("warn", True)


@pytest.mark.every_server
@pytest.mark.parametrize(
    ("user", "words"),
    [
        ("nobody:wrong@", ("refused", "check user and password in --redis-url")),
        (":needless@", ("refused", "the server wants no password")),
    ],
)
async def test_a_wrong_password_fails_with_what_to_do(redis_url: str, user: str, words: tuple[str, str]) -> None:
    (found,) = await check_redis(redis_url.replace("://", f"://{user}"), "default")
    assert (found.name, found.status) == ("redis", "fail")
    assert words[0] in found.detail
    assert words[1] in found.fix
    assert "wrong" not in found.detail + found.fix


async def test_a_cluster_s_wrong_password_is_no_server_out_of_reach(redis_cluster_url: str) -> None:
    (found,) = await check_redis(redis_cluster_url.replace("://", "://nobody:wrong@"), "default")
    assert "refused" in found.detail
    assert found.fix.startswith("check user and password")


def test_no_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = check_compiler()
    assert (found.status, kind_here() in found.detail) == ("ok", True)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_compiler()
    assert found.status == "warn"
    assert "apt install g++" in found.fix


def test_the_price_of_the_arithmetic_is_measured_or_said_to_be_unknown(tmp_path: Path) -> None:
    unbuilt = check_arithmetic(EngineConfig(compile_cache_dir=tmp_path))
    assert (unbuilt.status, "unknown until the kernels are built" in unbuilt.detail) == ("ok", True)
    load_library(DEFAULT_BUILD_DIR / "native")
    built = check_arithmetic(EngineConfig(dtype="float32", compile_cache_dir=DEFAULT_BUILD_DIR))
    assert built.status == "ok"
    assert re.search(
        r"float32 takes this share of XLA's time, by rows: \d+\.\d\d for 1 and \d+\.\d\d for 64", built.detail
    )


def test_a_quicker_arithmetic_is_named() -> None:
    quicker, slower = {1: (1.0, 2.0), 64: (1.1, 1.0)}, {1: (1.0, 0.6), 64: (1.3, 1.0)}
    assert not _compared(quicker, "bfloat16", "BFMMLA", is_timed=False).fix
    assert "--matmul xla" in _compared(slower, "bfloat16", "BFMMLA", is_timed=False).fix
    for times_s, name in ((quicker, "C++'s"), (slower, "XLA's")):
        found = _compared(times_s, "bfloat16", "BFMMLA", is_timed=True)
        assert found.detail.endswith(f"which here is {name}")


def test_an_unsupported_model_is_not_called_damaged(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIR, copy)
    (copy / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    found = by_name(check_model(str(copy), "auto"))["model"]
    assert (found.status, "'mamba'" in found.detail) == ("fail", True)
    assert "give --model a checkpoint of a supported family: llama" in found.fix


async def test_what_was_found_is_printed_before_what_takes_longer(redis_url: str) -> None:
    process = await start("doctor", "--model", "demo", REDIS_URL=redis_url)
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        line = await process.stdout.readline()
    is_done = process.stdout.at_eof()
    outcome = await finish(process)
    assert (b"packages" in line, is_done) == (True, False)
    assert "tokenizer" in outcome.out


async def test_requests_that_nobody_takes_are_a_warning(redis_url: str, redis: RedisClient) -> None:
    await redis.xadd(keys.requests("q"), {"prompt": "hi"})
    assert by_name(await check_redis(redis_url, "q"))["queue"].detail == "q: 1 waiting, no worker has joined yet"
    await redis.xgroup_create(keys.requests("q"), keys.GROUP, id="0")
    found = by_name(await check_redis(redis_url, "q"))["queue"]
    assert (found.status, found.detail) == ("warn", "q: 1 waiting, 0 taken, 0 live workers")


async def test_a_live_worker_is_counted(redis_url: str) -> None:
    async def hold(_: object) -> None:
        """Never answers."""

    async with ScriptedWorker(redis_url, hold, queue="q") as worker:
        await worker.redis.xgroup_createconsumer(keys.requests("q"), keys.GROUP, worker.name)
        found = by_name(await check_redis(redis_url, "q"))["queue"]
    assert (found.status, found.detail) == ("ok", "q: 0 waiting, 0 taken, 1 live workers")


async def test_dead_letters_are_a_warning(redis_url: str, redis: RedisClient) -> None:
    await redis.xadd(keys.dead("default"), {"id": "poison"})
    found = by_name(await check_redis(redis_url, "default"))["dead letters"]
    assert (found.status, found.detail) == ("warn", "1 requests were given up")
    await redis.xadd(keys.malformed("default"), {"id": "junk"})
    found = by_name(await check_redis(redis_url, "default"))["dead letters"]
    assert found.detail == "1 requests were given up, 1 entries were not requests"
    await redis.delete(keys.dead("default"))
    found = by_name(await check_redis(redis_url, "default"))["dead letters"]
    assert (found.status, found.detail) == ("warn", "1 entries were not requests")


@pytest.mark.parametrize(
    ("broken", "name"), [("config.json", "model"), ("model.safetensors", "weights"), ("tokenizer.json", "tokenizer")]
)
def test_a_damaged_checkpoint_names_the_file(tmp_path: Path, broken: str, name: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIR, copy)
    (copy / broken).unlink()
    found = by_name(check_model(str(copy), "auto"))[name]
    assert found.status == "fail"
    assert broken.split(".")[0] in found.detail
    assert ("copy tokenizer.json" in found.fix) == (name == "tokenizer")


@pytest.mark.parametrize(
    ("hostile", "name"), [("config.json", "model"), ("model.safetensors", "weights"), ("tokenizer.json", "tokenizer")]
)
def test_a_pipe_in_a_checkpoint_blocks_nobody(tmp_path: Path, hostile: str, name: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIR, copy)
    (copy / hostile).unlink()
    os.mkfifo(copy / hostile)
    found = by_name(check_model(str(copy), "auto"))[name]
    assert found.status == "fail"
    assert f"{hostile} is a FIFO" in found.detail


def test_a_chat_template_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIR, copy)
    (copy / "chat_template.jinja").write_text("{{ 1 // 0 }}")
    found = by_name(check_model(str(copy), "auto"))["tokenizer"]
    assert found.status == "ok"
    assert "only plain prompts can be sent: the model's chat template failed: ZeroDivisionError" in found.detail


@pytest.mark.parametrize(
    ("template", "status", "told"),
    [
        ("{% if %}", "fail", "the chat template 'default' cannot be used: .* TemplateSyntaxError"),
        ("{{ messages[0].content | no_filter }}", "fail", "TemplateAssertionError: No filter named 'no_filter'"),
        ("{{ 1 // 0 }}", "ok", "the chat template fails for a single question"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ok", "shows no tools: answers say that"),
    ],
)
def test_limits_of_a_chat_template_are_told(tmp_path: Path, template: str, status: str, told: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIR, copy)
    (copy / "chat_template.jinja").write_text(template)
    found = by_name(check_model(str(copy), "auto"))["template"]
    assert found.status == status
    assert re.search(told, found.detail)


def test_generation_settings_that_are_not_honoured_are_a_warning(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIR, copy)
    (copy / "generation_config.json").write_text('{"num_beams": 4, "stop_strings": ["zz"], "do_sample": true}')
    found = by_name(check_model(str(copy), "auto"))["generation"]
    assert (found.status, "num_beams=4, stop_strings=['zz']" in found.detail) == ("warn", True)
    (copy / "generation_config.json").write_text('{"temperature": "hot", "do_sample": true}')
    found = by_name(check_model(str(copy), "auto"))["generation"]
    assert (found.status, "temperature must be of type float, not 'hot'" in found.detail) == ("fail", True)


def test_which_generation_defaults_hold_is_told_with_where_they_come_from(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIR, copy)
    asked = {"top_p": 0.9, "eos_token_id": [1, 2]}
    for ignored, status in (({}, "ok"), ({"num_beams": 4}, "warn")):
        (copy / "generation_config.json").write_text(json.dumps({**asked, **ignored}))
        found = by_name(check_model(str(copy), "auto"))["generation"]
        assert found.status == status
        assert "temperature 1, top_p 0.9, top_k 0," in found.detail
        assert found.detail.endswith("(from generation_config.json: top_p); ends at [1, 2]")
    (copy / "generation_config.json").unlink()
    assert "(there is no generation_config.json)" in by_name(check_model(str(copy), "auto"))["generation"].detail


@pytest.mark.parametrize(("model", "status"), [("/no/such/folder", "fail"), ("owner/name", "warn")])
def test_a_model_that_is_not_here(model: str, status: str) -> None:
    assert [finding.status for finding in check_model(model, "auto")] == [status]
