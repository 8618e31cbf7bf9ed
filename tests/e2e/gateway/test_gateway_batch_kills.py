"""A batch survives gateways and workers that are killed in the middle of it."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import expected_text
from penstock.worker.startup_report import STARTED
from tests.support.patience import TEST_S, eventually
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_process import GatewayProcess
from tests.support.programs.worker_process import WorkerProcess

QUEUE = "q"
NUM_TOKENS = 20
CHAT: Any = "/v1/chat/completions"
LEASE_S = 1.5


def line(number: int) -> dict[str, Any]:
    said = [{"role": "user", "content": str(number)}]
    body = {"model": QUEUE, "messages": said, "seed": number, "max_tokens": NUM_TOKENS}
    return {"custom_id": f"line {number}", "method": "POST", "url": CHAT, "body": body}


class Fleet:
    """Two gateways, one of which runs the batch, and two workers."""

    def __init__(self, url: str, folder: Path) -> None:
        self._logs = [folder / f"gateway-{place}.log" for place in range(2)]
        self.gateways = [GatewayProcess(url, log, batch_lease_s=LEASE_S, max_batch_lines=16) for log in self._logs]
        engine = {"max_num_seqs": 16, "step_s": 0.005}
        self._workers = [WorkerProcess(url, folder / f"worker-{place}.log", engine=engine) for place in range(2)]
        self.clients: list[openai.AsyncOpenAI] = []

    async def start(self, stack: AsyncExitStack) -> None:
        for worker in self._workers:
            stack.enter_context(worker)
            await eventually(lambda worker=worker: any(event["event"] == STARTED for event in worker.events()))
        for gateway in self.gateways:
            await stack.enter_async_context(gateway)
            self.clients.append(await stack.enter_async_context(openai_client(gateway.url)))

    def holder(self) -> int:
        """Returns the place of the gateway that holds the batch."""
        return next(place for place, log in enumerate(self._logs) if '"status": "in_progress"' in log.read_text())

    def kill_worker(self) -> None:
        self._workers[0].kill()
        self._workers[0].__enter__()


async def _has(client: openai.AsyncOpenAI, batch_id: str, num_completed: int) -> bool:
    counts = (await client.batches.retrieve(batch_id)).request_counts
    return counts is not None and counts.completed >= num_completed


async def _has_ended(client: openai.AsyncOpenAI, batch_id: str) -> bool:
    return (await client.batches.retrieve(batch_id)).status not in ("in_progress", "finalizing")


@pytest.mark.timeout(2 * TEST_S)
@pytest.mark.parametrize(("num_lines", "num_workers_killed"), [(60, 0), pytest.param(1000, 2, marks=pytest.mark.slow)])
async def test_each_line_of_a_batch_is_answered_once(
    redis: RedisClient, redis_url: str, tmp_path: Path, num_lines: int, num_workers_killed: int
) -> None:
    fleet = Fleet(redis_url, tmp_path)
    async with AsyncExitStack() as stack:
        await fleet.start(stack)
        content = b"".join(json.dumps(line(number)).encode() + b"\n" for number in range(num_lines))
        file = await fleet.clients[0].files.create(file=("in.jsonl", content), purpose="batch")
        batch = await fleet.clients[0].batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        for number in range(num_workers_killed):
            due = num_lines * (number + 1) // 8
            await eventually(lambda due=due: _has(fleet.clients[1], batch.id, due))
            fleet.kill_worker()
        await eventually(lambda: _has(fleet.clients[1], batch.id, num_lines // 3))
        holder = fleet.holder()
        await fleet.gateways[holder].kill()
        client = fleet.clients[1 - holder]
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        await eventually(lambda: _has_ended(client, batch.id), timeout_s=TEST_S)
        found = await client.batches.retrieve(batch.id)
        counts = found.request_counts
        assert counts is not None
        assert found.status == "completed"
        assert (counts.total, counts.completed, counts.failed, found.error_file_id) == (num_lines, num_lines, 0, None)
        assert found.output_file_id is not None
        lines = [json.loads(each) for each in (await client.files.content(found.output_file_id)).text.splitlines()]
        assert [each["custom_id"] for each in lines] == [f"line {number}" for number in range(num_lines)]
        for number, each in enumerate(lines):
            said = each["response"]["body"]["choices"][0]["message"]["content"]
            assert said == expected_text(f"user:{number}", number, NUM_TOKENS)
        info: Any = await redis.xinfo_stream(keys.requests(QUEUE))
        assert info["entries-added"] == num_lines
