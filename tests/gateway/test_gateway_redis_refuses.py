"""Each command of a gateway meets each refusal: clients may ask again, and what runs in the background goes on."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest
from redis.backoff import ExponentialWithJitterBackoff
from structlog.testing import capture_logs

import penstock.gateway
from penstock.gateway.keys.limits import Limiter
from penstock.gateway.serve import REFUSED as REFUSED_STATUS
from penstock.gateway.serve import RefusedAtStart, serve
from penstock.gateway.settings import GatewaySettings
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import new_key, running_gateway
from tests.support.programs.worker_harness import running_worker
from tests.support.redis_servers.refusing_proxy import FULL, PASSING, REFUSED, RefusingProxy

ANSWERS = (*PASSING.values(), FULL, *REFUSED.values())
WORDS = ("redis", "valkey", "script", "noperm", "noauth", "replica", "aof", "clients reached", "traceback", "127.0.0.1")
"""Words that no client should read: they are the server's, the library's, or the operator's."""

ROOT = Path(penstock.gateway.__file__).parent
OF_COMMANDS = {"store.REVOKE", "HSETNX"}  # that `penstock keys` sends, and no gateway
OF_LIBRARIES = {"enqueue.ENQUEUE", "calls.CALL", "collector.LOOK", "dead_letters.REPLAY"}


def all_calls() -> set[str]:
    """Returns the scripts and plain commands in the gateway's code, by the names that the proxy has for them."""
    for module in pkgutil.walk_packages([str(ROOT)], "penstock.gateway."):
        importlib.import_module(module.name)
    scripts = {
        f"{module.__name__.rpartition('.')[2]}.{name.lstrip('_')}"
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("penstock.gateway.")
        for name, value in vars(module).items()
        if isinstance(value, str) and "redis.call" in value and not name.startswith("__")
    }
    sources = "".join(path.read_text() for path in ROOT.rglob("*.py"))
    commands = set(re.findall(r'execute\(\s*"([A-Z]+)"', sources))
    return (scripts | commands | OF_LIBRARIES) - OF_COMMANDS


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets retries and periodic tasks follow each other at once, and caches nothing."""
    monkeypatch.setattr(ExponentialWithJitterBackoff, "compute", lambda *_: 0.001)
    assert Limiter.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Limiter.__init__.__kwdefaults__, "lease_s", 0.3)
    for name in (
        "keys.limits.RETRY_S", "keys.settling.RETRY_S", "abandonment.readers.RETRY_S", "batches.runner.RETRY_S",
        "batches.runner.REDIS_DELAY_S",
        "batches.stopping.REDIS_DELAY_S", "batches.results.FULL_WAIT_S", "keys.cache.MAX_AGE_S", "directory.MAX_AGE_S",
        "operations.queue_admin.MAX_AGE_S", "store.ledger.LIMIT_MAX_AGE_S", "standing.LOOK_EVERY_S",
        "standing.MAX_AGE_S", "standing.HOLD_S",
    ):  # fmt: skip
        monkeypatch.setattr(f"penstock.gateway.{name}", 0.005)
    for name in ("reading.line.MAX_BACKOFF_S", "reading.line.WAKE_RETRY_S", "calls.MAX_BACKOFF_S"):
        monkeypatch.setattr(f"penstock.producer.{name}", 0.005)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    with capture_logs() as captured:
        yield captured


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RefusingProxy]:
    async with RefusingProxy(redis_url) as proxy:
        yield proxy


class Client:
    """Asks again for as long as it is told that this may help."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx2.AsyncClient(
            base_url=url, timeout=WAIT_S, headers={"authorization": f"Bearer {key}"} if key else {}
        )
        self.refused: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def ask(self, method: str, path: str, *also: int, **more: Any) -> httpx2.Response:
        """Returns the first answer that is not a refusal; it is good, or has one of the statuses in `also`."""
        async with asyncio.timeout(WAIT_S):
            while True:
                answer = await self.http.request(method, path, **more)
                if answer.status_code not in (503, 429):
                    break
                self._check(path, answer)
                await asyncio.sleep(0.002)
        assert answer.status_code < 300 or answer.status_code in also, (method, path, answer.status_code, answer.text)
        return answer

    def _check(self, path: str, answer: httpx2.Response) -> None:
        """Checks a refusal. With 429, the key's lease of an earlier try could not be given back, and has still to
        lapse.
        """
        assert int(answer.headers["retry-after"]) >= 1, (path, answer.text)
        assert not any(word in answer.text.lower() for word in WORDS) or "not_an_operator" in answer.text, answer.text
        assert answer.json()["error"], answer.text
        self.refused[path] += 1

    async def post(self, path: str, body: Any, *also: int, **headers: str) -> Any:
        return (await self.ask("POST", path, *also, json=body, headers=headers)).json()

    async def get(self, path: str) -> Any:
        return (await self.ask("GET", path)).json()

    async def batch(self, lines: int = 2, **more: Any) -> Any:
        content = b"".join(
            json.dumps(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"model": "q", "prompt": "x" if number else 7.5, "max_tokens": 3},
                }
            ).encode()
            + b"\n"
            for number in range(lines)
        )
        files = {"file": ("in.jsonl", content)}
        made = (await self.ask("POST", "/v1/files", files=files, data={"purpose": "batch"})).json()
        body = {"input_file_id": made["id"], "endpoint": "/v1/completions", "completion_window": "24h", **more}
        return await self.post("/v1/batches", body)

    async def until(self, path: str, *statuses: str) -> Any:
        async def there() -> bool:
            return (await self.get(path))["status"] in statuses

        await eventually(there)
        return await self.get(path)


CHAT = {"model": "q", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
RESPONSE = {"model": "q", "input": "hi", "max_output_tokens": 4}


async def chats(client: Client, redis: RedisClient) -> None:
    await client.post("/v1/chat/completions", CHAT)
    await client.post("/v1/chat/completions", CHAT, **{"Idempotency-Key": "a"})
    await client.post("/v1/completions", {"model": "q", "prompt": "x", "max_tokens": 4})
    await client.post("/v1/messages", {**CHAT, "max_tokens": 4})
    for key in ({}, {"Idempotency-Key": "b"}):
        answer = await client.ask("POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=key)
        assert answer.text.endswith("data: [DONE]\n\n")
    first = next(line for line in answer.text.splitlines() if line.startswith("id: ")).removeprefix("id: ")
    resumed = {"Idempotency-Key": "b", "Last-Event-ID": first}
    answer = await client.ask("POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=resumed)
    assert answer.text.endswith("data: [DONE]\n\n")


async def questions(client: Client, redis: RedisClient) -> None:
    assert (await client.get("/v1/models"))["data"]
    await client.get("/v1/models/q")
    await client.post("/v1/count_tokens", {"model": "q", "prompt": "hi"})
    await client.post("/tokenize", {"model": "q", "prompt": "hi"})
    await client.post("/detokenize", {"model": "q", "tokens": [104]})
    await client.post("/v1/messages/count_tokens", {"model": "q", "messages": CHAT["messages"]})


async def responses(client: Client, redis: RedisClient) -> None:
    made = await client.post("/v1/responses", RESPONSE)
    path = f"/v1/responses/{made['id']}"
    await client.get(path)
    await client.get(f"{path}/input_items")
    assert (await client.ask("GET", f"{path}?stream=true")).text
    await client.post("/v1/responses", {**RESPONSE, "previous_response_id": made["id"]})
    assert (await client.ask("POST", "/v1/responses", json={**RESPONSE, "stream": True})).text
    await client.ask("DELETE", path)
    made = await client.post("/v1/responses", {**RESPONSE, "background": True})
    path = f"/v1/responses/{made['id']}"
    await client.until(path, "completed", "incomplete")
    made = await client.post("/v1/responses", {**RESPONSE, "background": True, "max_output_tokens": 10**6})
    await client.ask("POST", f"/v1/responses/{made['id']}/cancel")
    await client.until(f"/v1/responses/{made['id']}", "cancelled")


async def files(client: Client, redis: RedisClient) -> None:
    upload = {"files": {"file": ("in.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    made = (await client.ask("POST", "/v1/files", **upload)).json()
    path = f"/v1/files/{made['id']}"
    await client.get("/v1/files")
    await client.get(path)
    assert (await client.ask("GET", f"{path}/content")).content == b"{}\n"
    await client.ask("DELETE", path)


async def batches(client: Client, redis: RedisClient) -> None:
    made = await client.batch()
    await client.get("/v1/batches")
    ended = await client.until(f"/v1/batches/{made['id']}", "completed", "failed")
    assert (ended["status"], ended["request_counts"]) == ("completed", {"total": 2, "completed": 1, "failed": 1}), ended
    for kind in ("output_file_id", "error_file_id"):
        assert (await client.ask("GET", f"/v1/files/{ended[kind]}/content")).text
    made = await client.batch(lines=300)
    await client.ask("POST", f"/v1/batches/{made['id']}/cancel", 409)  # 409: the try before had no answer
    await client.until(f"/v1/batches/{made['id']}", "cancelled")


async def operators(client: Client, redis: RedisClient) -> None:
    await client.get("/operations/queues")
    await client.get("/operations/queues/q")
    await redis.xadd(
        keys.dead("q"), {"id": "gone", "code": "c", "field:prompt": "x", "field:max_tokens": "1"}, id="1-0"
    )
    await client.post("/operations/queues/q/replay", {"letter": "1-0"}, 404)  # 404: as the try before was done
    await client.post("/operations/queues/q/cancel", {"id": "nobody"})
    await client.post("/operations/queues/q/drain", {"worker": "other"})


async def abandoned(client: Client, redis: RedisClient) -> None:
    """Leaves a stream, under a key: it is cancelled once nobody has read it for a while."""
    body, headers = {**CHAT, "max_tokens": 10**6, "stream": True}, {"Idempotency-Key": "left"}
    async with asyncio.timeout(WAIT_S):
        while True:
            async with client.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                if answer.status_code == 200:
                    await anext(answer.aiter_raw())
                    break
    await eventually(lambda: _has(redis, "penstock:q:*:cancel"))


async def held(client: Client, proxy: RefusingProxy) -> None:
    """Keeps a request until its lease was renewed: a key with these limits has no tab."""
    body = {**CHAT, "max_tokens": 10**6, "stream": True}
    async with client.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        await eventually(lambda: proxy.seen["limits.RENEW"] > len(ANSWERS))


async def renewed(client: Client, proxy: RefusingProxy, *engines: FakeEngine) -> None:
    """Keeps a batch until its lease was renewed. A worker that was told to drain may not have heard it yet, so no
    engine makes progress meanwhile.
    """
    for engine in engines:
        engine.hold()
    made = await client.batch()
    try:
        await eventually(lambda: proxy.seen["leases.RENEW"] > len(ANSWERS))
    except AssertionError as error:
        error.add_note(f"{await client.get('/v1/batches/' + made['id'])}, {proxy.seen}, {proxy.refused}")
        raise
    for engine in engines:
        engine.allow()
    await client.until(f"/v1/batches/{made['id']}", "completed")


async def _has(redis: RedisClient, pattern: str) -> bool:
    return bool(await redis.keys(pattern))


async def limits(client: Client, redis: RedisClient) -> None:
    """Answers in the background count until somebody finds that they have ended."""
    made = await client.post("/v1/responses", {**RESPONSE, "background": True})
    await client.until(f"/v1/responses/{made['id']}", "completed", "incomplete")
    await client.post("/v1/chat/completions", CHAT)


PARTS = (chats, questions, responses, files, batches, operators, abandoned)


async def test_each_command_meets_each_refusal(
    redis: RedisClient, redis_url: str, proxy: RefusingProxy, quick: None, lines: list[Any]
) -> None:
    engine = FakeEngine(step_s=0.001, max_num_seqs=16)
    other = FakeEngine(step_s=0.001)
    secret = await new_key(redis_url, admin=True, limits={"requests_per_minute": 10**9, "tokens_per_minute": 10**12})
    counted = await new_key(redis_url, limits={"requests_per_minute": 10**9})
    narrow = await new_key(redis_url, limits={"max_concurrent": 1})
    async with (
        running_worker(redis_url, engine, name="w"),
        running_worker(redis_url, other, name="other"),
        running_gateway(proxy.url, abandon_after_s=0.4, batch_lease_s=0.5) as gateway,
        Client(gateway.url, secret.text) as client,
        Client(gateway.url, counted.text) as counted_client,
        Client(gateway.url, narrow.text) as narrow_client,
    ):
        proxy.refuse_in_turn(ANSWERS)
        for part in PARTS:
            await part(client, redis)
        await held(counted_client, proxy)
        await renewed(client, proxy, engine, other)
        await limits(narrow_client, redis)
        missing = all_calls() - set(proxy.seen)
        assert not missing, f"nothing in this test has a gateway send {missing}"
        await eventually(lambda: _is_ready(client))  # the background may have met its last refusal just now
    left = {name: proxy.refused[name] for name in all_calls() if proxy.refused[name] < len(ANSWERS)}
    assert not left
    assert not [line for line in lines if line["event"] in ("request_failed", "stream_failed", "batch_failed")]


KINDS = {**dict.fromkeys(PASSING, "passing"), **dict.fromkeys(REFUSED, "refused")}


async def test_an_outage_is_one_line_and_shows_in_readiness_and_metrics(
    redis: RedisClient, redis_url: str, proxy: RefusingProxy, quick: None, lines: list[Any]
) -> None:
    engine = FakeEngine(step_s=0.02)  # what a stream has is read as it comes
    secret = await new_key(redis_url, admin=True, limits={"max_concurrent": 10**6})
    async with (
        running_worker(redis_url, engine, name="w"),
        running_gateway(proxy.url, batch_lease_s=0.5) as gateway,
        Client(gateway.url, secret.text) as client,
    ):
        trouble = gateway.server.metrics.registry
        for code, kind in KINDS.items():
            lines.clear()
            body = {**CHAT, "max_tokens": 10**6, "stream": True}
            async with client.http.stream("POST", "/v1/chat/completions", json=body) as stream:
                text = stream.aiter_raw()
                await anext(text)
                proxy.refuse({**PASSING, **REFUSED}[code])
                asked = [client.http.post("/v1/chat/completions", json=CHAT) for _ in range(5)]
                assert {answer.status_code for answer in await asyncio.gather(*asked)} == {503}, code
                ready = await client.http.get("/readiness")
                assert (ready.status_code, list(ready.json()["reasons"])) == (503, ["redis"]), code
                await gateway.server.refresh_metrics()
                assert trouble.get_sample_value("penstock_gateway_redis_trouble", {"kind": kind}) == 1, code
                before = proxy.refused.copy()
                await eventually(lambda: (proxy.refused - before)["HGET"] >= 5)  # noqa: B023  the stream's reader tries
                proxy.allow()
                await anext(text)  # it goes on
            await client.post("/v1/chat/completions", CHAT)
            await eventually(lambda: _is_ready(client))
            said = [line["event"] for line in lines if line["log_level"] in ("warning", "error")]
            assert said == ["redis_unavailable"], (code, lines)
            assert [line["event"] for line in lines].count("redis_back") == 1, code
            await gateway.server.refresh_metrics()
            assert trouble.get_sample_value("penstock_gateway_redis_trouble", {"kind": kind}) == 0, code


async def _is_ready(client: Client) -> bool:
    return (await client.http.get("/readiness")).status_code == 200


@pytest.mark.parametrize("answer", REFUSED.values())
async def test_what_is_refused_for_good_ends_a_start(proxy: RefusingProxy, answer: str) -> None:
    proxy.refuse(answer)
    with pytest.raises(RefusedAtStart) as caught:
        await asyncio.to_thread(serve, GatewaySettings(redis_url=proxy.url, port=0))
    assert caught.value.exit_status == REFUSED_STATUS


async def test_a_running_gateway_drains_only_once_it_was_refused_for_long(
    redis: RedisClient, proxy: RefusingProxy, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.serving.refusals.LOOK_EVERY_S", 0.01)
    async with running_gateway(proxy.url, refused_drain_after_s=WAIT_S) as gateway, Client(gateway.url, "") as client:
        proxy.refuse(REFUSED["NOPERM"])
        assert (await client.http.get("/v1/files")).status_code == 503
        before = proxy.refused.total()
        await eventually(lambda: proxy.refused.total() > before + 20)
        assert not gateway.server.should_exit
        proxy.allow()
        await client.ask("GET", "/v1/files")
    async with running_gateway(proxy.url, refused_drain_after_s=0.05) as gateway, Client(gateway.url, "") as client:
        proxy.refuse(REFUSED["NOPERM"])
        assert (await client.http.get("/v1/files")).status_code == 503
        await eventually(lambda: gateway.server.should_exit)
        assert gateway.server.is_refused
