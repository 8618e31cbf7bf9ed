"""Each command that meets a refusal of Redis ends with one line on stderr, and works once that is over."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
import typer.main
from redis.backoff import ExponentialWithJitterBackoff

from penstock.cli import app
from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.cli.cli_process import Outcome, command
from tests.support.patience import WAIT_S
from tests.support.programs.worker_harness import running_worker
from tests.support.redis_servers.refusing_proxy import FULL, PASSING, REFUSED, RefusingProxy

ANSWERS = (*PASSING.values(), FULL, *REFUSED.values())

COMMANDS: dict[str, tuple[str, ...]] = {
    "top": ("top", "--once"),
    "workers": ("workers",),
    "card": ("card",),
    "requests list": ("requests", "list"),
    "requests show": ("requests", "show", "known"),
    "explain": ("explain", "known"),
    "requests cancel": ("requests", "cancel", "known", "--yes"),
    "tenants list": ("tenants", "list"),
    "tenants weight": ("tenants", "weight", "acme", "2"),
    "dead list": ("dead", "list"),
    "dead show": ("dead", "show", "1-0"),
    "dead replay": ("dead", "replay", "1-0"),
    "dead purge": ("dead", "purge", "--all", "--yes"),
    "keys create": ("keys", "create", "--name", "k"),
    "keys list": ("keys", "list"),
    "keys revoke": ("keys", "revoke", "k"),
    "send": ("send", "x", "--max-tokens", "2"),
    "chat": ("chat",),
    "map": ("map", "rows.csv", "replies.jsonl", "--max-tokens", "2"),
    "drain": ("drain", "w", "--no-wait"),
}
"""Commands, in an order in which each finds what it needs."""

DONE_BEFORE = {"requests cancel", "dead show", "dead replay", "dead purge", "keys revoke", "drain"}
"""Commands that may find their work done by the earlier try, which did not learn of it."""

ELSEWHERE = {"worker", "gateway", "doctor"}  # have tests of their own for it
WITHOUT_REDIS = {"bench", "chaos", "demo", "plan", "pull", "serve", "version"}  # or with one that they start


def all_commands() -> set[str]:
    found = set()
    root: Any = typer.main.get_command(app)
    for name, each in root.commands.items():
        below = getattr(each, "commands", None)
        found |= {name} if below is None or name in WITHOUT_REDIS else {f"{name} {more}" for more in below}
    return found


def test_every_command_is_here() -> None:
    assert COMMANDS.keys() == all_commands() - ELSEWHERE - WITHOUT_REDIS


async def test_each_command_meets_each_refusal(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ExponentialWithJitterBackoff, "compute", lambda *_: 0.001)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("prompt\nx\n")
    letter = {"id": "gone", "entry": "1-0", "code": "c", "field:prompt": "x"}
    await redis.xadd(keys.dead("q"), letter, id="1-0")  # type: ignore[arg-type]
    async with running_worker(redis_url, name="w", heartbeat_ttl_s=WAIT_S), RefusingProxy(redis_url) as proxy:
        async with AsyncClient(redis_url, queue="q") as client:
            await client.generate("x", id="known", max_tokens=2)
        proxy.refuse_in_turn(ANSWERS)
        for name, arguments in COMMANDS.items():
            while not _worked(name, await asyncio.to_thread(command, *arguments, *_where(name, proxy.url))):
                pass
        assert proxy.refused.total() > 10 * len(ANSWERS)


def _where(name: str, url: str) -> list[str]:
    return ["--redis-url", url, *([] if name.startswith("keys") else ["--queue", "q"])]


def _worked(name: str, outcome: Outcome) -> bool:
    said = outcome.out + outcome.err
    assert "Traceback" not in said, (name, said)
    if outcome.status == 0:
        return True
    assert outcome.status == 1, (name, said)
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    assert len(lines) == 1, (name, said)
    is_refused = "Redis at redis://127.0.0.1" in lines[0]
    assert is_refused or name in DONE_BEFORE, (name, said)
    return not is_refused
