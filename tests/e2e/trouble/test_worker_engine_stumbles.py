"""When the engine raises over one request, that request ends; its neighbours and the worker do not notice."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.engine.request import Request
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, running_worker, send

BAD = b"bad"


class StumblingEngine(FakeEngine):
    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def check(self, request: Request) -> None:
        self._stumble("check", request)
        super().check(request)

    def enqueue(self, request: Request) -> None:
        self._stumble("enqueue", request)
        super().enqueue(request)

    def _stumble(self, at: str, request: Request) -> None:
        if at == self._at and bytes(request.prompt_token_ids) == BAD:
            raise KeyError("nobody expects this")


@pytest.mark.parametrize(
    ("at", "code", "event"),
    [("check", "internal_error", "admission_failed"), ("enqueue", "engine_error", "engine_error")],
)
async def test_a_request_that_the_engine_stumbles_over(
    redis_url: str, redis: RedisClient, at: str, code: str, event: str
) -> None:
    engine = StumblingEngine(at)
    engine.hold()
    with capture_logs() as lines:
        async with running_worker(redis_url, engine) as worker:
            beside = await send(redis, prompt="beside", max_tokens=5)
            await send(redis, prompt=BAD.decode(), id="bad", n=2)
            end = (await read_reply(redis, "bad")).end
            engine.allow()
            assert (await read_reply(redis, beside)).text() == expected_text("beside", beside, 5)
            after = await send(redis, prompt="after", max_tokens=5)
            assert (await read_reply(redis, after)).text() == expected_text("after", after, 5)
            await eventually(lambda: is_queue_empty(redis))
            assert not worker.task.done()
    assert (end.finish_reason, end.code, end.completion_tokens) == ("error", code, 0)
    assert end.finish_reasons == ("error", "error")
    assert [line["request_id"] for line in lines if line["event"] == event] == ["bad"] * (2 if at == "enqueue" else 1)
    assert not await redis.exists(keys.dead("q"))
