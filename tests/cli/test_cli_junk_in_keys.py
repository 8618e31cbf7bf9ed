"""Whatever our keys hold, `penstock top` and its like, and scrapes, give an answer or one line, never a traceback."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from penstock.protocol import keys
from penstock.protocol.key_kinds import KeyKind
from penstock.protocol.redis.connection import RedisClient
from tests.cli.cli_process import command
from tests.support.patience import WAIT_S, mostly_slow
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import running_worker, send
from tests.support.redis_servers.junk import GATEWAY_KINDS, QUEUE_KINDS, WRONG_TYPES, WRONG_VALUES, Write, harm

COMMANDS = (
    ("top", "--once", "--queue", "q"),
    ("top", "--once", "--json", "--queue", "q"),
    ("workers", "--queue", "q"),
    ("workers", "--queue", "q", "--json"),
    ("requests", "list", "--queue", "q"),
    ("requests", "show", "x", "--queue", "q"),
    ("dead", "list", "--queue", "q"),
    ("dead", "list", "--malformed", "--queue", "q"),
    ("tenants", "list", "--queue", "q"),
    ("card", "--queue", "q"),
    ("keys", "list"),
)
KINDS = (*QUEUE_KINDS, *GATEWAY_KINDS)
JUNK: dict[str, dict[str, Write]] = {
    **{
        f"a {type_}": {kind.name: write for kind in KINDS if kind.type != type_} for type_, write in WRONG_TYPES.items()
    },
    **{
        value: {kind.name: WRONG_VALUES[kind.type][value] for kind in KINDS if value in WRONG_VALUES[kind.type]}
        for values in WRONG_VALUES.values()
        for value in values
    },
}
QUICK = ("a string", "a stream", "words", "no text", "inf")
OF: dict[str, Any] = {
    "queue": "q", "tenant": "t", "priority": 0, "worker": "w", "request_id": "x", "mailbox": "m", "client_id": "c",
    "kind": "d", "letters": keys.malformed("q"),
}  # fmt: skip


def key_of(kind: KeyKind) -> str:
    return kind.key(**{name: OF.get(name, "a") for name in kind.parameters})


@pytest.mark.parametrize("writes", mostly_slow(JUNK, *QUICK))
async def test_commands_answer_or_say_why_not(
    redis_url: str, redis: RedisClient, raw: RedisClient, writes: dict[str, Write]
) -> None:
    async with running_worker(redis_url, name="w"):
        await send(redis, prompt="x", id="x", max_tokens=3)
    for kind in KINDS:
        if kind.name in writes:
            await harm(raw, key_of(kind), writes[kind.name])
    for arguments in COMMANDS:
        done = await asyncio.to_thread(command, *arguments, "--redis-url", redis_url)
        assert done.status in (0, 1), (arguments, done)
        assert "Traceback" not in done.err, (arguments, done)
        assert done.status == 0 or len(done.err.splitlines()) == 1, (arguments, done)


@pytest.mark.parametrize("writes", mostly_slow(JUNK, "words", "a number past all"))
async def test_they_quote_no_script_where_no_worker_sets_junk_aside(
    redis_url: str, raw: RedisClient, writes: dict[str, Write]
) -> None:
    for kind in KINDS:
        if kind.name in writes:
            await harm(raw, key_of(kind), writes[kind.name])
    for arguments in COMMANDS:
        done = await asyncio.to_thread(command, *arguments, "--redis-url", redis_url)
        assert (done.status == 0) is not bool(done.err), (arguments, done)
        assert len(done.err.splitlines()) <= 1, (arguments, done)
        assert not any(words in done.err for words in ("user_script", "stream command", "Traceback")), (arguments, done)


@pytest.mark.parametrize("writes", mostly_slow(JUNK, *QUICK))
async def test_metrics_are_scraped(redis_url: str, raw: RedisClient, writes: dict[str, Write]) -> None:
    async with (
        running_worker(redis_url, name="w", health_port=0) as worker,
        running_gateway(redis_url) as gateway,
        httpx2.AsyncClient(timeout=WAIT_S) as http,
    ):
        for kind in KINDS:
            if kind.name in writes:
                await harm(raw, key_of(kind), writes[kind.name])
        url = f"http://127.0.0.1:{worker.service.health_port}"
        for accept in ("", "application/openmetrics-text"):
            page = await http.get(f"{url}/metrics", headers={"accept": accept})
            assert (page.status_code, "penstock_build_info" in page.text) == (200, True)
            assert b"penstock_build_info" in (await gateway.server.scrape(accept))[0]
        assert (await http.get(f"{url}/readyz")).status_code in (200, 503)
        assert (await http.get(f"{gateway.url}/readiness")).status_code in (200, 503)
        assert not worker.task.done()
