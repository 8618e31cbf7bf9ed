"""When a gateway and a worker are killed under streams, the key is charged once for what the workers published."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock.engine import Engine, EngineConfig
from penstock.engine.demo import MODEL_DIR
from penstock.gateway.keys.secrets import Secret
from penstock.gateway.store import names
from penstock.local.embedded import EmbeddedServer
from penstock.producer import GenerateRequest
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from penstock.tools.chaos.process import ModelWorker
from penstock.worker.startup_report import STARTED
from tests.e2e.real_engines import late_text, real_worker, undisturbed
from tests.support.long_minute import lengthen_minute
from tests.support.patience import TEST_S, WAIT_S, eventually
from tests.support.programs.charges import all_charged, published
from tests.support.programs.fakes import LossyProxy
from tests.support.programs.gateway_client import bare_client
from tests.support.programs.gateway_harness import new_key, running_gateway
from tests.support.programs.gateway_process import GatewayProcess
from tests.support.programs.worker_harness import QUICK, running_worker
from tests.support.programs.worker_process import WorkerProcess

QUEUE = "q"
COMPLETIONS = "/v1/completions"
NUM_STREAMS = 4
NUM_TOKENS = 40  # for each of two choices
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_batch_tokens": 16, "num_pages": 400, "max_model_len": 1024, "decode_steps": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def long_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    lengthen_minute(monkeypatch)


def body(number: int, **more: Any) -> dict[str, Any]:
    return {"model": QUEUE, "prompt": f"What is {number} + 85?", "seed": number, "n": 2, "stream": True, **more}


@asynccontextmanager
async def begun(url: str, secret: Secret, bodies: Sequence[Mapping[str, Any]]) -> AsyncIterator[None]:
    """Begins streams, half of them with an Idempotency-Key, and reads their first events; at the end they are left."""
    events = [asyncio.Event() for _ in bodies]

    async def read(client: httpx2.AsyncClient, number: int) -> None:
        headers = {"authorization": f"Bearer {secret.text}"}
        if number % 2:
            headers["Idempotency-Key"] = str(number)
        try:
            async with client.stream("POST", COMPLETIONS, json=bodies[number], headers=headers) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for _ in answer.aiter_lines():
                    events[number].set()
        except httpx2.TransportError:
            pass  # its gateway is gone

    async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        reading = [asyncio.create_task(read(client, number)) for number in range(len(bodies))]
        try:
            await eventually(lambda: all(event.is_set() for event in events) or any(task.done() for task in reading))
            yield
        finally:
            for task in reading:
                task.cancel()
            found = await asyncio.gather(*reading, return_exceptions=True)
    assert not [error for error in found if isinstance(error, Exception)], found


async def has_started(worker: WorkerProcess) -> None:
    await eventually(lambda: any(event["event"] == STARTED for event in worker.events()))


async def limited_key(redis_url: str) -> Secret:
    return await new_key(redis_url, limits={"tokens_per_minute": 10**9, "max_concurrent": 10**6})


async def test_what_a_killed_gateway_and_a_killed_worker_leave_is_charged_as_it_is_published(
    redis: RedisClient, redis_url: str, redis_server: EmbeddedServer, tmp_path: Path
) -> None:
    """To Redis, a killed gateway is one whose connections have ended and that never comes back."""
    secret = await limited_key(redis_url)
    bodies = [body(number, max_tokens=NUM_TOKENS, ignore_eos=True) for number in range(NUM_STREAMS)]
    slow = {"max_num_seqs": 2 * NUM_STREAMS, "step_s": 0.5}  # it is killed long before the end
    async with LossyProxy(redis_server.port) as proxy, running_gateway(redis_url, abandon_after_s=WAIT_S):
        with WorkerProcess(redis_url, tmp_path / "worker.log", engine=slow) as worker:
            await has_started(worker)
            async with (
                running_gateway(proxy.url, abandon_after_s=WAIT_S, redis_timeout_s=5.0) as killed,
                begun(killed.url, secret, bodies),
            ):
                await proxy.refuse()
                await asyncio.to_thread(worker.kill)
        assert await redis.hlen(names.key_open(secret.key_id)) == NUM_STREAMS
        async with running_worker(redis_url, FakeEngine(max_num_seqs=2 * NUM_STREAMS)):
            charged = await all_charged(redis, secret.key_id)
    assert charged == await published(redis, QUEUE)
    assert charged > NUM_STREAMS * 2 * NUM_TOKENS


def as_sent(number: int, asked: Mapping[str, Any]) -> GenerateRequest:
    fields = {name: value for name, value in asked.items() if name not in ("model", "stream")}
    return GenerateRequest.model_validate({"id": str(number), **fields})


@pytest.mark.slow
@pytest.mark.timeout(2 * TEST_S)
async def test_with_a_model_that_is_killed_in_the_middle(
    redis: RedisClient, redis_url: str, compile_cache: Path, tmp_path: Path
) -> None:
    """There are two choices with a seed, some of which end at a stop string that comes after the kill."""
    settings = {**SIZES, "compile_cache_dir": compile_cache}
    engine = Engine.from_checkpoint(MODEL_DIR, EngineConfig(**settings))
    bodies = [body(number, max_tokens=500, temperature=1.0, ignore_eos=True) for number in range(NUM_STREAMS)]
    for number, asked in enumerate(bodies[: NUM_STREAMS // 2]):
        name = str(number)
        asked["stop"] = [late_text(undisturbed(engine, {name: as_sent(number, asked)})[name][0][0])]
    expected = undisturbed(engine, {str(number): as_sent(number, asked) for number, asked in enumerate(bodies)})
    num_expected = sum(len(tokens) for choices in expected.values() for _, tokens in choices)
    assert num_expected < NUM_STREAMS * 2 * 500

    secret = await limited_key(redis_url)
    victim = ModelWorker(redis_url, tmp_path / "log", {**QUICK, **settings, "name": "victim", "model": MODEL_DIR})
    killed = GatewayProcess(redis_url, tmp_path / "gateway.log", abandon_after_s=WAIT_S)
    try:
        await eventually(lambda: redis.exists(keys.card(QUEUE)))
        async with killed, begun(killed.url, secret, bodies):
            victim.send(signal.SIGKILL)
            await killed.kill()
    finally:
        victim.send(signal.SIGKILL)
        victim.wait(WAIT_S)
    async with (
        running_gateway(redis_url, abandon_after_s=WAIT_S) as gateway,
        bare_client(gateway) as client,
        real_worker(redis_url, MODEL_DIR, EngineConfig(**settings), **QUICK, name="heir"),
    ):
        charged = await all_charged(redis, secret.key_id)
        assert charged == await published(redis, QUEUE)
        headers = {"authorization": f"Bearer {secret.text}", "Idempotency-Key": "1"}
        again = await client.post(COMPLETIONS, json=bodies[1], headers=headers)
        assert again.status_code == 200, again.text
    assert await all_charged(redis, secret.key_id) == charged  # a client that comes back pays nothing more
    num_prompts = charged - num_expected
    assert 0 < num_prompts < NUM_STREAMS * 30
