"""The health application without a server; tests/e2e/test_worker_health.py has the whole."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from penstock.serving.readiness import Readiness
from penstock.worker.health.server import HealthApp


async def ask(
    app: HealthApp, path: str, method: str = "GET", *headers: tuple[bytes, bytes]
) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("a body is not looked at")

    await app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    start, body = sent
    return start["status"], dict(start["headers"]), body["body"]


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


def app_of(readiness: Readiness, *, is_alive: bool = True) -> HealthApp:
    async def scrape(accept: str) -> tuple[bytes, str]:
        return b"penstock_ready 1\n", accept or "text/plain"

    return HealthApp(readiness, lambda: is_alive, scrape)


async def test_readiness_has_its_reasons(readiness: Readiness) -> None:
    app = app_of(readiness)
    assert (await ask(app, "/readyz"))[::2] == (200, b'{"ready": true, "reasons": {}}')
    readiness.not_ready("service", "warming up: 12/40 shapes")
    status, headers, body = await ask(app, "/readyz")
    assert (status, json.loads(body)) == (503, {"ready": False, "reasons": {"service": "warming up: 12/40 shapes"}})
    assert headers == {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}


@pytest.mark.parametrize(("is_alive", "status"), [(True, 200), (False, 503)])
async def test_liveness_is_the_engine_s(readiness: Readiness, is_alive: bool, status: int) -> None:
    readiness.not_ready("service", "loading the model")  # no reason to restart it
    assert (await ask(app_of(readiness, is_alive=is_alive), "/healthz"))[0] == status


async def test_a_head_has_no_body_and_nothing_else_is_done(readiness: Readiness) -> None:
    app = app_of(readiness)
    assert (await ask(app, "/metrics"))[::2] == (200, b"penstock_ready 1\n")
    status, headers, body = await ask(app, "/metrics", "HEAD")
    assert (status, headers[b"content-length"], body) == (200, b"17", b"")
    assert (await ask(app, "/readyz", "DELETE"))[0] == 405
    status, _, body = await ask(app, "/secret")
    assert (status, b"/healthz, /readyz, /metrics" in body) == (404, True)


async def test_metrics_come_in_the_form_that_is_asked_for(readiness: Readiness) -> None:
    accepts = [(b"accept", b"a/b"), (b"x", b"y"), (b"accept", b"c/d")]
    for headers, content_type in (((), b"text/plain"), (accepts, b"a/b,c/d")):
        _, answered, _ = await ask(app_of(readiness), "/metrics", "GET", *headers)
        assert answered[b"content-type"] == content_type
