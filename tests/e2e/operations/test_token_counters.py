"""Token counters of several workers add up to the usage of the replies."""

from __future__ import annotations

from penstock.protocol.redis.connection import RedisClient
from penstock.serving.exposition import render
from penstock.tools.chaos.fake_engine import FakeEngine
from penstock.worker.metrics import WorkerMetrics
from tests.support.patience import eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.scrapes import scraped

COUNTERS = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "published_tokens")


def totals(*workers: WorkerMetrics) -> list[float]:
    pages = [scraped(render(metrics.registry, "")[0].decode()) for metrics in workers]
    return [sum(page[f"penstock_{name}_total"] for page in pages) for name in COUNTERS]


async def test_tokens_add_up_over_workers_that_hand_replies_on(redis_url: str, redis: RedisClient) -> None:
    """There are four replies, one refused and one with two choices; what the first worker began is handed to the
    second.
    """
    engine = FakeEngine(step_s=0.002)
    async with running_worker(redis_url, engine, drain_timeout_s=0.05, health_port=0) as first:
        await send(redis, prompt="abc", id="short", max_tokens=3)
        await send(redis, prompt="", id="refused")
        await read_reply(redis, "short")
        await send(redis, prompt="abcdefgh", id="long", max_tokens=400)
        await send(redis, prompt="abcdefgh", id="two", max_tokens=300, n=2)
        for name in ("long", "two"):
            await read_until(redis, name, lambda entry: entry.type == "chunk")
        await first.drain()
    assert first.service.metrics.handed_back._value.get() == 2
    async with running_worker(redis_url, health_port=0) as second:
        ends = [(await read_reply(redis, name)).end for name in ("short", "refused", "long", "two")]
        await eventually(lambda: is_queue_empty(redis))
    usage = [
        sum(getattr(end, name) for end in ends) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    ]
    assert usage == [3 + 8 + 8, 3 + 4 + 4, 3 + 400 + 600]
    found = totals(first.service.metrics, second.service.metrics)
    assert found == [*usage, usage[2]]
    of_first = scraped(render(first.service.metrics.registry, "")[0].decode())
    assert 3 < of_first["penstock_published_tokens_total"] < usage[2]
    lengths = [worker.service.metrics for worker in (first, second)]
    assert sum(metrics.prompt_lengths._sum.get() for metrics in lengths) == usage[0]
    assert sum(metrics.reply_lengths._sum.get() for metrics in lengths) == usage[2]
    assert sum(metrics.errors.labels(code="invalid_request")._value.get() for metrics in lengths) == 1
