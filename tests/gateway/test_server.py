"""A gateway's server: log lines of requests, health, metrics, CORS, and the drain."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest
from structlog.testing import capture_logs

from penstock.gateway.metrics import MOST_CODES, GatewayMetrics
from penstock.producer import ConnectionLost
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import Held, ScriptedWorker
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_harness import Running, announce, running_gateway
from tests.support.scrapes import scraped

pytestmark = pytest.mark.usefixtures("patient_scrapes")

SECRET = "the sparrow sings at midnight"
CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture
async def worker(redis: RedisClient, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    await announce(redis)
    async with ScriptedWorker(redis_url, Held()) as worker:
        yield worker


def let_end(worker: ScriptedWorker) -> None:
    assert isinstance(worker.behave, Held)
    worker.behave.may_end.set()


def http(gateway: Running) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S)


async def test_health_is_asked_without_a_key(redis: RedisClient, redis_url: str) -> None:
    async with running_gateway(redis_url) as gateway, http(gateway) as client:
        answers = [await client.get(path) for path in ("/liveness", "/readiness", "/health")]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert [answer.json() for answer in answers[1:]] == [{"ready": True, "reasons": {}}] * 2


async def test_who_does_not_reach_redis_is_alive_and_not_ready() -> None:
    async with running_gateway("redis://127.0.0.1:1") as gateway, http(gateway) as client:
        assert (await client.get("/liveness")).json() == {"alive": True}
        answer = await client.get("/readiness")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert "127.0.0.1" not in answer.text


async def test_answers_have_an_id_and_how_long_they_took(redis: RedisClient, redis_url: str) -> None:
    async with running_gateway(redis_url) as gateway, http(gateway) as client:
        made = await client.get("/liveness")
        assert re.fullmatch(r"req_[0-9a-f]{32}", made.headers["x-request-id"])
        assert int(made.headers["openai-processing-ms"]) >= 0
        assert "server" not in made.headers
        given = await client.get("/nowhere", headers={"x-request-id": "mine-1"})
        assert (given.status_code, given.headers["x-request-id"]) == (404, "mine-1")
        refused = await client.get("/nowhere", headers={"x-request-id": "no spaces, please"})
        assert refused.headers["x-request-id"].startswith("req_")
        wrong = await client.delete("/liveness")
        assert (wrong.status_code, set(wrong.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})


async def test_the_log_has_a_line_for_each_request_and_no_text(worker: ScriptedWorker, redis_url: str) -> None:
    let_end(worker)
    with capture_logs() as log:
        async with running_gateway(redis_url) as gateway, http(gateway) as client:
            answer = await client.post("/v1/chat/completions?key=hidden", json=CHAT, headers={"x-request-id": "r1"})
            assert answer.status_code == 200
            await client.post(
                "/v1/chat/completions", json={**CHAT, "temperature": SECRET}, headers={"x-forwarded-for": "6.6.6.6"}
            )
    lines = [line for line in log if line["event"] == "request"]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 400),
    ]
    assert {line["client"] for line in lines} == {"127.0.0.1"}
    assert lines[0]["request_id"] == "r1"
    assert lines[0]["num_bytes"] == len(answer.content)
    assert not any(word in json.dumps(log) for word in ("sparrow", "hidden"))


async def test_what_nobody_expected_is_a_500_and_a_place_in_the_log(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr("penstock.gateway.directory.Directory.cards", stumble)
    with capture_logs() as log:
        async with running_gateway(redis_url) as gateway, http(gateway) as client:
            answer = await client.get("/readiness")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert SECRET not in answer.text
    line = next(line for line in log if line["event"] == "request_failed")
    assert (line["error"], line["request_id"]) == ("RuntimeError", answer.headers["x-request-id"])
    assert "test_server.py" in line["places"][-1]
    assert SECRET not in json.dumps(log)


async def test_requests_are_counted_by_route_and_status(redis: RedisClient, redis_url: str) -> None:
    async with running_gateway(redis_url) as gateway, http(gateway) as client:
        for path in ("/liveness", "/a", "/b"):
            await client.get(path)
        await client.request("PURGE", "/liveness")
        count = gateway.server.metrics.registry.get_sample_value
        of = "penstock_gateway_requests_total"
        assert count(of, {"method": "GET", "route": "/liveness", "status": "200"}) == 1
        assert count(of, {"method": "GET", "route": "none", "status": "404"}) == 2
        assert count(of, {"method": "other", "route": "/liveness", "status": "405"}) == 1
        assert count("penstock_gateway_connections") == 1
        assert count("penstock_gateway_open_requests") == 0


async def test_errors_are_counted_by_route_and_code(redis: RedisClient, redis_url: str) -> None:
    async with running_gateway(redis_url) as gateway, http(gateway) as client:
        await client.get("/nowhere")
        for body in ({"model": "none", "messages": []}, {}):
            await client.post("/v1/chat/completions", json=body)
        found = scraped((await gateway.server.scrape(""))[0].decode())
    counts = {name: value for name, value in found.items() if name.startswith("penstock_gateway_errors_total")}
    of = "penstock_gateway_errors_total"
    assert counts[f'{of}{{code="not_found",route="none"}}'] == 1
    assert sum(counts.values()) == 3
    assert sum(value for name, value in counts.items() if 'route="/v1/chat/completions"' in name) == 2


async def test_generations_are_counted_by_queue_and_model(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with ScriptedWorker(redis_url), running_gateway(redis_url) as gateway, http(gateway) as client:
        response = {"input": "x", "store": False}
        for path, body in (("completions", {"prompt": "x"}), ("responses", response), ("completions", {})):
            await client.post(f"/v1/{path}", json={"model": "tiny", **body})
        found = scraped((await gateway.server.scrape(""))[0].decode(), without=())
    counts = {name: value for name, value in found.items() if name.startswith("penstock_gateway_generations_total")}
    assert counts == {'penstock_gateway_generations_total{model="tiny",queue="default",status="200"}': 2}


async def test_metrics_tell_which_queues_nobody_serves_any_more(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with running_gateway(redis_url) as gateway:

        async def served() -> dict[str, float]:
            return scraped((await gateway.server.scrape(""))[0].decode(), without=())

        series = 'penstock_gateway_queue_served{model="tiny",queue="default"}'
        assert (await served())[series] == 1
        await redis.delete(keys.card("default"), keys.queues())

        async def is_missed() -> bool:
            return (await served())[series] == 0

        await eventually(is_missed)
        assert (await served())["penstock_gateway_redis_up"] == 1


async def test_a_queue_that_is_left_alone_is_no_longer_told_of(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await announce(redis)
    async with running_gateway(redis_url) as gateway, http(gateway) as client:

        async def told() -> set[str]:
            found = scraped((await gateway.server.scrape(""))[0].decode(), without=())
            return {name.partition("{")[0] for name in found if 'queue="default"' in name}

        async with ScriptedWorker(redis_url):
            await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        both = {"penstock_gateway_queue_served", "penstock_gateway_generations_total"}
        assert await told() == both
        for module in ("directory", "metrics"):
            monkeypatch.setattr(f"penstock.gateway.{module}.FORGET_AFTER_S", 0.0)
        await redis.xadd(keys.requests("default"), {"a": "waits"})
        await redis.delete(keys.card("default"), keys.queues())
        monkeypatch.setattr("penstock.gateway.directory.MAX_AGE_S", 0.0)
        assert await told() == both  # as it has requests
        await redis.delete(keys.requests("default"))
        assert await told() == set()
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.json()["error"]["code"] == "no_worker"


def test_codes_and_models_that_come_and_go_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = GatewayMetrics()
    for number in range(3 * MOST_CODES):
        metrics.count_error("/", f"code{number}")
    [family] = metrics.errors.collect()
    assert len({sample.labels["code"] for sample in family.samples}) == MOST_CODES + 1
    monkeypatch.setattr("penstock.gateway.metrics.FORGET_AFTER_S", 0.0)
    for number in range(100):
        metrics.count_generation("q", f"model{number}", 200)
        metrics.count_generation("q", f"model{number}", 503)
        metrics.set_served({("q", f"model{number}"): True})
    [family] = metrics.generations.collect()
    assert {sample.labels["model"] for sample in family.samples} == {"model99"}


async def test_metrics_say_when_redis_does_not_answer(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with running_gateway(redis_url, queues=("default", "other")) as gateway:
        await gateway.server.scrape("")

        async def cards() -> None:
            raise ConnectionLost("no connection to Redis")

        gateway.server.app.state.gateway.directory.standing = cards
        found = scraped((await gateway.server.scrape(""))[0].decode(), without=())
    assert found["penstock_gateway_redis_up"] == 0
    served = {name: value for name, value in found.items() if "queue_served" in name}  # as they were
    assert served == {
        'penstock_gateway_queue_served{model="tiny",queue="default"}': 1,
        'penstock_gateway_queue_served{model="",queue="other"}': 0,
    }


async def test_no_other_origin_is_let_in_by_default(redis: RedisClient, redis_url: str) -> None:
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with running_gateway(redis_url) as gateway, http(gateway) as client:
        assert "access-control-allow-origin" not in (await client.options("/liveness", headers=asking)).headers
    async with running_gateway(redis_url, cors_origins=("https://a.example",)) as gateway, http(gateway) as client:
        preflight = await client.options("/v1/chat/completions", headers=asking)
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = await client.get("/liveness", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_a_drain_lets_answers_end(worker: ScriptedWorker, redis_url: str) -> None:
    async with (
        running_gateway(redis_url, drain_timeout_s=WAIT_S) as gateway,
        openai_client(gateway.url) as client,
    ):
        stream = await client.chat.completions.create(**CHAT, stream=True)
        gateway.server.stop()
        await eventually(lambda: not any(server.is_serving() for server in gateway.server.servers))
        let_end(worker)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text == "sparrows sleep"


async def test_the_end_of_a_drain_says_how_to_go_on(worker: ScriptedWorker, redis_url: str) -> None:
    """With the same Idempotency-Key and the last id, another gateway sends what is missing."""
    headers = {"idempotency-key": "k1"}
    body = {**CHAT, "stream": True}
    async with (
        running_gateway(redis_url, drain_timeout_s=0.1) as gateway,
        http(gateway) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream,
    ):
        gateway.server.stop()
        first = await read_events(stream)
    assert first[-1]["error"]["code"] == "gateway_stopping"
    assert "Last-Event-ID" in first[-1]["error"]["message"]
    last_id = [event["event_id"] for event in first if event["event_id"]][-1]
    let_end(worker)
    async with (
        running_gateway(redis_url) as gateway,
        http(gateway) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers={**headers, "last-event-id": last_id}) as rest,
    ):
        second = await read_events(rest)
    assert "".join(map(text_of, first + second)) == "sparrows sleep"
    assert len(worker.taken) == 1


async def test_a_whole_answer_that_is_cut_short_is_to_be_asked_for_again(
    worker: ScriptedWorker, redis_url: str
) -> None:
    async with running_gateway(redis_url, drain_timeout_s=0.1) as gateway, http(gateway) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: worker.taken)
        gateway.server.stop()
        answer = await asking
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "gateway_stopping"


async def test_told_to_stop_twice_it_cuts_what_is_open(worker: ScriptedWorker, redis_url: str) -> None:
    async with (
        running_gateway(redis_url, drain_timeout_s=WAIT_S) as gateway,
        http(gateway) as client,
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream,
    ):
        gateway.server.stop()
        gateway.server.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            await stream.aread()


async def read_events(stream: httpx.Response) -> list[dict[str, Any]]:
    """Returns the data of each event, with its id as `event_id`."""
    events: list[dict[str, Any]] = []
    event_id = None
    async for line in stream.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data" and value != "[DONE]":
            events.append({**json.loads(value), "event_id": event_id})
            event_id = None
    return events


def text_of(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))


async def test_the_last_push_of_metrics_opens_no_connection(redis: RedisClient, redis_url: str) -> None:
    async with running_gateway(redis_url) as gateway:
        pass
    num_connected = (await redis.info("stats"))["total_connections_received"]
    await gateway.server.refresh_metrics()
    assert (await redis.info("stats"))["total_connections_received"] == num_connected
