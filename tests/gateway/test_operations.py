"""The operators' page over HTTP: who is let in, what is shown, what is done."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from penstock.gateway.operations import queue_admin, routes
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.operations.collector import look
from penstock.protocol.redis.connection import RedisClient
from penstock.serving.log_lines import LogLines, Rank
from penstock.tools.chaos.fake_engine import FakeEngine
from penstock.worker.logs import configure_logs
from tests.gateway.test_page import in_node
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import new_key, revoke, running_gateway
from tests.support.programs.worker_harness import read_reply, read_until, running_worker, send

USERS = ROOT / "deploy/redis/users.acl"
SECRET = "a secret prompt"
QUEUE = "/operations/queues/q"
ACTIONS = {"drain": {"worker": "w0"}, "cancel": {"id": "r"}, "replay": {"letter": "1-0"}}
PATHS = [("GET", "/operations/queues"), ("GET", QUEUE), *(("POST", f"{QUEUE}/{deed}") for deed in ACTIONS)]


def bearer(secret: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {secret.text}"}


@asynccontextmanager
async def asking(redis_url: str, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        running_gateway(redis_url, **settings) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        yield http


def body_of(path: str) -> Any:
    return ACTIONS.get(path.rpartition("/")[2])


def is_chunk(entry: object) -> bool:
    return getattr(entry, "type", None) == "chunk"


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_nobody_is_let_in_without_an_admin_key(
    redis: RedisClient, redis_url: str, method: str, path: str
) -> None:
    await redis.xadd(keys.dead("q"), {"id": "r", "code": "c", "field:prompt": "x"}, id="1-0")
    async with asking(redis_url) as http:
        answer = await http.request(method, path, json=body_of(path))
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")  # also without any keys
        admin, usual = await new_key(redis_url, admin=True), await new_key(redis_url)
        answer = await http.request(method, path, json=body_of(path))
        assert answer.status_code == 401
        answer = await http.request(method, path, json=body_of(path), headers=bearer(usual))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_required")
        in_url = {"key": admin.text, "api_key": admin.text, "authorization": f"Bearer {admin.text}"}
        assert (await http.request(method, path, json=body_of(path), params=in_url)).status_code == 401
        cookie = {"cookie": f"authorization=Bearer {admin.text}; x-api-key={admin.text}"}
        assert (await http.request(method, path, json=body_of(path), headers=cookie)).status_code == 401
        for site in ("cross-site", "same-site"):
            answer = await http.request(
                method, path, json=body_of(path), headers={**bearer(admin), "sec-fetch-site": site}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "other_site")
    assert await redis.xlen(keys.dead("q")) == 1
    assert not await redis.exists(keys.cancel("q", "r"))


async def test_what_it_shows_and_does(redis: RedisClient, redis_url: str) -> None:
    await redis.xadd(keys.dead("q"), {"id": "gone", "code": "c", "field:prompt": SECRET}, id="1-0")
    secret = await new_key(redis_url, admin=True)
    async with (
        asking(redis_url) as http,
        running_worker(redis_url, FakeEngine(step_s=0.01), name="w0", drain_timeout_s=0.1) as worker,
    ):
        http.headers.update(bearer(secret))
        await send(redis, prompt=SECRET, id="r", tenant="acme", max_tokens=10**6)
        await read_until(redis, "r", is_chunk)

        async def seen() -> Any:
            answer = await http.get(QUEUE)
            assert answer.status_code == 200
            assert answer.headers["cache-control"] == "no-store"
            assert SECRET not in answer.text
            return answer.json()

        async def runs() -> bool:
            now = await seen()
            states = [(each["name"], each["state"]) for each in now["workers"]]
            return [each["id"] for each in now["running"]] == ["r"] and states == [("w0", "live")]

        await eventually(runs)
        assert "q" in (await http.get("/operations/queues")).json()["queues"]
        shown = await seen()
        assert (shown["num_running"], shown["num_dead"], shown["letters"][0]["request_id"]) == (1, 1, "gone")

        assert (await http.post(f"{QUEUE}/cancel", json={"id": "r"})).json()["target"] == "r"
        assert (await read_reply(redis, "r")).end.finish_reason == "cancelled"
        answer = await http.post(f"{QUEUE}/replay", json={"letter": "1-0"})
        assert answer.json()["new_id"] == "gone.replay-1-0"
        assert (await http.post(f"{QUEUE}/replay", json={"letter": "1-0"})).status_code == 404
        assert (await http.post(f"{QUEUE}/drain", json={"worker": "w0"})).status_code == 200
        await worker.task
        answer = await http.post(f"{QUEUE}/drain", json={"worker": "w0"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "worker")
        assert "q" in (await http.get("/operations/queues")).json()["queues"]  # though nobody serves it any more
        await revoke(redis_url, secret)

        async def is_out() -> bool:
            return (await http.get(QUEUE)).status_code == 401

        await eventually(is_out)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("drain", {}, 400), ("drain", {"worker": "a b"}, 400), ("drain", {"worker": "w", "more": 1}, 400),
        ("cancel", {"id": 1}, 400), ("replay", {"letter": "x"}, 400), ("replay", {"letter": "1-0"}, 404),
        ("other", {}, 404),
    ],
)  # fmt: skip
async def test_what_can_t_be_done_is_refused(redis_url: str, path: str, body: Any, status: int) -> None:
    headers = bearer(await new_key(redis_url, admin=True))
    async with asking(redis_url) as http:
        assert (await http.post(f"{QUEUE}/{path}", json=body, headers=headers)).status_code == status


async def test_a_key_for_some_queues_and_a_gateway_of_some(redis_url: str) -> None:
    headers = bearer(await new_key(redis_url, admin=True, models=["p", "q"]))
    async with asking(redis_url, queues=("q", "r")) as http:
        http.headers.update(headers)
        assert (await http.get("/operations/queues")).json() == {"queues": ["q"]}
        assert (await http.get(QUEUE)).status_code == 200
        assert (await http.get("/operations/queues/p")).status_code == 404  # not served here
        assert (await http.get("/operations/queues/r")).status_code == 404  # not for this key


async def test_limits_are_for_what_makes_work(redis_url: str) -> None:
    headers = bearer(await new_key(redis_url, admin=True, limits={"requests_per_minute": 1}))
    async with asking(redis_url) as http:
        for _ in range(3):
            assert (await http.post(f"{QUEUE}/cancel", json={"id": "r"}, headers=headers)).status_code == 200


async def test_many_pages_are_one_look(redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = bearer(await new_key(redis_url, admin=True))
    monkeypatch.setattr(queue_admin, "MAX_AGE_S", WAIT_S)
    taken = []

    async def counted(*arguments: Any) -> Any:
        taken.append(arguments)
        return await look(*arguments)

    monkeypatch.setattr(queue_admin, "look", counted)
    async with asking(redis_url) as http:
        for _ in range(5):
            assert (await http.get(QUEUE, headers=headers)).status_code == 200
    assert len(taken) == 1


async def test_with_roles_it_needs_one_that_may(tmp_path: Path) -> None:
    """The gateway's own user may not see ids; with a second URL it looks as an operator."""
    rules = [line for line in USERS.read_text().splitlines() if line.startswith(("user gateway ", "user operator "))]
    users = tmp_path / "users.acl"
    users.write_text("\n".join([*(f"{rule} >secret" for rule in rules), "user default on nopass ~* &* +@all"]) + "\n")
    with EmbeddedServer(arguments=("--aclfile", str(users))) as server:
        headers = bearer(await new_key(server.url, admin=True))
        gateway, operator = (server.url.replace("://", f"://{role}:secret@") for role in ("gateway", "operator"))
        async with asking(gateway, queues=("q",)) as http:
            answer = await http.get(QUEUE, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_an_operator")
            answer = await http.post(f"{QUEUE}/drain", json={"worker": "w"}, headers=headers)
            assert answer.json()["error"]["code"] == "not_an_operator"
        async with asking(gateway, operator_redis_url=operator) as http:
            assert (await http.get(QUEUE, headers=headers)).status_code == 200
            assert (await http.get("/operations/queues", headers=headers)).status_code == 200
            assert (await http.post(f"{QUEUE}/cancel", json={"id": "r"}, headers=headers)).status_code == 200


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_what_a_gateway_says_becomes_tables(redis: RedisClient, redis_url: str) -> None:
    await redis.xadd(keys.dead("q"), {"id": "<b>", "code": "c", "crashes": "3", "field:prompt": "x"}, id="1-0")
    headers = bearer(await new_key(redis_url, admin=True))
    async with asking(redis_url) as http, running_worker(redis_url, FakeEngine(step_s=0.01), name="w0"):
        await send(redis, prompt=SECRET, id="r", tenant="acme", max_tokens=10**6)

        documents = []

        async def is_whole() -> bool:
            documents.append((await http.get(QUEUE, headers=headers)).json())
            return bool(documents[-1]["running"]) and documents[-1]["workers"][0]["state"] == "live"

        await eventually(is_whole)
        snapshot = documents[-1]
        await redis.set(keys.cancel("q", "r"), 1)
    tables, line, points = in_node(["tablesOf", snapshot], ["summaryOf", snapshot], ["pointsOf", [0, 1, 2], 240, 40])
    (worker,), (request,), (letter,) = (tables[name]["rows"] for name in ("workers", "requests", "letters"))
    assert (worker["cells"][:2], worker["why"]) == (["w0", "live"], "")
    assert worker["action"]["body"] == {"worker": "w0"}
    assert request["cells"][:4] == ["r", "w0", "acme", "running"]
    assert request["action"]["deed"] == "cancel"
    assert letter["cells"][:3] == ["1-0", "<b>", "c"]
    for row, target in ((worker, "w0"), (request, "r"), (letter, "1-0")):
        assert target in row["action"]["question"]
        assert len(row["cells"]) == len(tables[{"w0": "workers", "r": "requests", "1-0": "letters"}[target]]["titles"])
    assert line.startswith("1 live \u00b7 0 waiting \u00b7 1 running on 8 slots")
    assert points.endswith("240.0,0.0")
    assert json.dumps(tables).count(SECRET) == 0


async def test_what_has_no_line_in_the_log_is_not_done(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the log, and everything that may wait for it does."""
    done: list[str] = []
    monkeypatch.setattr(queue_admin.QueueAdmin, "drain", lambda *_: done.append("drain"))
    monkeypatch.setattr(queue_admin.QueueAdmin, "cancel", lambda *_: done.append("cancel"))
    monkeypatch.setattr(queue_admin.QueueAdmin, "replay", lambda *_: done.append("replay"))
    reading = threading.Event()
    lines = LogLines(lambda data: reading.wait(WAIT_S) and len(data), lambda count: None)
    configure_logs("info", "json", lines=lines)
    monkeypatch.setattr(routes, "_log", structlog.get_logger())
    secret = await new_key(redis_url, admin=True)
    async with asking(redis_url) as http:
        http.headers.update(bearer(secret))
        while lines.put("x" * 2**16, Rank.VITAL):
            pass
        while lines.put("x" * 64, Rank.VITAL):
            pass
        for deed, body in ACTIONS.items():
            answer = await http.post(f"{QUEUE}/{deed}", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "log_unavailable")
            assert answer.headers["retry-after"]
        assert done == []
        assert (await http.get(QUEUE)).status_code == 200  # looking leaves no line
    reading.set()
    lines.close(WAIT_S)
