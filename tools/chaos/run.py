"""Runs chaos from beginning to end: server, workers, clients and faults, then the verdict."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engine.progress import ReportProgress
from penstock.engine.text.response.call_ids import call_id
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect, connect_blocking
from penstock.tools.chaos.checker import Verdict, check
from penstock.tools.chaos.client import BLOCK_S, Clients
from penstock.tools.chaos.fake_engine import expected_speech, expected_tokens
from penstock.tools.chaos.fleet import Fleet, WorkerSetup
from penstock.tools.chaos.history import History, RequestRecord
from penstock.tools.chaos.plan import ChaosOptions, FaultPlan, RequestPlan, calm_id, make_plan
from penstock.tools.chaos.proxy import Proxy
from penstock.tools.chaos.reading import ChoiceRead, Truth, stop_of
from penstock.tools.chaos.saboteur import ClientWatcher, Saboteur
from penstock.tools.chaos.site import Site

PATIENCE_S = 300.0  # workers that load on a busy machine take a minute before their first token
FAKE_TTL_S = 1.0
MODEL_TTL_S = 4.0
EMPTY_TIMEOUT_S = 120.0
RECOVERY_SLACK_S = 5.0  # for a machine that is busy with the rest of the run
IN_FLIGHT: Mapping[str, int] = {"fake": 40, "model": 12}
FAKE_ENGINE: Mapping[str, Any] = {"max_num_seqs": 32, "step_s": 0.003, "prefill_steps": 1, "holds_back": True}
# Small, so that there is little to compile and a killed worker is soon replaced.
MODEL_SETTINGS: Mapping[str, Any] = {
    "max_num_seqs": 8,
    "max_batch_tokens": 64,
    "num_pages": 520,
    "max_flush_interval_ms": 10,  # many chunks, so that there are many moments for faults
}
CHAT_FORMAT = "hermes"  # the demo model has none; a grammar makes it follow any


@dataclass(frozen=True, slots=True)
class Tempo:
    """Intervals at which workers notice things: shorter than in production, as a run should not last for hours."""

    heartbeat_ttl_s: float
    reclaim_interval_s: float
    block_ms: int = 200

    @classmethod
    def of(cls, engine: str) -> Tempo:
        return cls(FAKE_TTL_S, 0.25) if engine == "fake" else cls(MODEL_TTL_S, 0.5)

    @property
    def recovery_limit_s(self) -> float:
        """Sum of the time to live, one scan, one blocking read, and slack."""
        return self.heartbeat_ttl_s + 1.25 * self.reclaim_interval_s + self.block_ms / 1000 + RECOVERY_SLACK_S


@dataclass(frozen=True, slots=True)
class ChaosOutcome:
    plan: FaultPlan
    history: History
    verdict: Verdict
    logs: Path


async def run_chaos(
    options: ChaosOptions, site: Site, *, model: str, logs: Path, progress: ReportProgress
) -> ChaosOutcome:
    """Makes the plan of the seed, runs it, and checks the outcome.

    Args:
        options: numbers of requests, workers and faults.
        site: the server.
        model: a folder with a checkpoint, or `demo`; ignored with the fake engine.
        logs: folder for the workers' logs.
        progress: called as the run advances.

    Raises:
        RedisError: the server does not come back.
    """
    tempo = Tempo.of(options.engine)
    plan = make_plan(options, heartbeat_ttl_s=tempo.heartbeat_ttl_s)
    setup = worker_setup(options, tempo, model=model, logs=logs)
    history = await run_plan(plan, site, setup, progress=progress)
    truths = fake_truths(history) if options.engine == "fake" else model_truths(history)
    return ChaosOutcome(plan, history, check(history, truths, recovery_limit_s=tempo.recovery_limit_s), logs)


async def run_plan(plan: FaultPlan, site: Site, setup: WorkerSetup, *, progress: ReportProgress) -> History:
    """Runs a plan and returns what was seen. Everything that it started has ended when it returns or raises.

    With the model, the same workers first run each request undisturbed, to learn what its reply must be.
    """
    history = History()
    saboteur = Saboteur(plan, history, site)
    started_s = time.monotonic()
    async with AsyncExitStack() as stack:
        direct = connect(site.url, decode=True, retries=0)
        stack.push_async_callback(direct.aclose)
        if not site.is_own:
            stack.push_async_callback(_forget, direct, history, setup.queue)
        clients = await _connect_clients(stack, plan, site, setup, history, direct, progress)
        fleet = Fleet(site, setup, plan.options.workers, saboteur.watch, history)
        saboteur.fleet = await stack.enter_async_context(fleet)
        in_flight = IN_FLIGHT[plan.options.engine]
        if plan.options.engine == "model":
            await clients.run(plan.undisturbed, in_flight=in_flight)
        await clients.run(plan.requests, in_flight=in_flight)
        for suffix in (".again", ".twice"):
            await clients.run(saboteur.rearm(suffix), in_flight=in_flight)
        await saboteur.wait_restarted()
        await fleet.wait_awake()
        await clients.wait_until_empty(EMPTY_TIMEOUT_S)
        await fleet.drain()
        await clients.audit()
    history.missed = len(saboteur.rearm(".never"))
    history.seconds = time.monotonic() - started_s
    return history


def worker_setup(options: ChaosOptions, tempo: Tempo, *, model: str, logs: Path) -> WorkerSetup:
    """Returns the setup of workers for a queue of their own."""
    settings: dict[str, Any] = {
        "heartbeat_ttl_s": tempo.heartbeat_ttl_s,
        "reclaim_interval_s": tempo.reclaim_interval_s,
        "block_ms": tempo.block_ms,
        "cancel_poll_ms": 50,
        "flush_interval_ms": 10,
        "max_attempts": 1000,  # requests are not to blame for the faults
    }
    queue = f"chaos-{secrets.token_hex(4)}"
    if options.engine == "fake":
        return WorkerSetup(queue, logs, None, settings, FAKE_ENGINE)
    if options.has_chats:
        settings["chat_format"] = CHAT_FORMAT
    return WorkerSetup(queue, logs, model, {**settings, **MODEL_SETTINGS})


def fake_truths(history: History) -> dict[str, tuple[Truth, ...]]:
    """Returns the fake engine's reply to each request."""
    requests = (record.request for record in history.records.values())
    return {request.id: tuple(_fake_truth(request, index) for index in range(request.n)) for request in requests}


def _fake_truth(request: RequestPlan, index: int) -> Truth:
    source = request.id if request.seed is None else request.seed
    tokens = expected_tokens(request.prompt.encode(), source, index, request.max_tokens)
    said = expected_speech(request.prompt, request.id, tokens, index)
    read = ChoiceRead(tokens, [said.text], [said.reasoning])
    for delta in said.tool_calls:
        read.add_call(delta.id, delta.name, delta.arguments)
    return read.truth("length")


def model_truths(history: History) -> dict[str, tuple[Truth, ...]]:
    """Returns the model's reply to each request in its undisturbed run."""
    return {id_: _said(history.records[calm_id(id_)], id_) for id_ in history.records}


def _said(record: RequestRecord, request_id: str) -> tuple[Truth, ...]:
    """Returns what `record` said, with the tool call ids of a request with this id."""
    choices = [ChoiceRead() for _ in range(record.request.n)]
    for entry in record.seen:
        if entry.fields.get("type") == "chunk":
            list(choices[int(entry.fields["index"])].add(entry.fields))
    for index, choice in enumerate(choices):
        for place, call in enumerate(choice.calls):
            call.id = call_id(request_id, index, place)
    end = record.seen[-1].fields if record.has_ended else {}
    reasons = end.get("finish_reasons", end.get("finish_reason", "")).split(",")
    # The request got no end, or was refused: the checker reports that from its own record.
    reasons += [""] * (len(choices) - len(reasons))
    return tuple(choice.truth(reason, stop_of(end)) for choice, reason in zip(choices, reasons, strict=True))


async def _connect_clients(
    stack: AsyncExitStack,
    plan: FaultPlan,
    site: Site,
    setup: WorkerSetup,
    history: History,
    direct: RedisClient,
    progress: ReportProgress,
) -> Clients:
    proxy = Proxy(*site.host_and_port)
    await proxy.start(ClientWatcher(plan, history.wire))
    stack.push_async_callback(proxy.stop)
    redis = connect(site.url_through(proxy.port), decode=True, retries=3)
    blocking = connect_blocking(site.url_through(proxy.port), decode=True, block_s=BLOCK_S)
    stack.push_async_callback(redis.aclose)
    stack.push_async_callback(blocking.aclose)
    return Clients(
        redis, blocking, direct, setup.queue, history, patience_s=PATIENCE_S, progress=partial(_tell, progress, plan)
    )


def _tell(progress: ReportProgress, plan: FaultPlan, num_ended: int) -> None:
    num_calm = len(plan.undisturbed) if plan.options.engine == "model" else 0
    progress(num_ended, num_calm + len(plan.requests), "no chaos" if num_ended < num_calm else "chaos")


async def _forget(redis: RedisClient, history: History, queue: str) -> None:
    """Deletes what the run wrote on a server that is not its own."""
    pipeline = redis.pipeline(transaction=False)
    for request_id in history.records:
        for key in (keys.reply, keys.state, keys.cancel):
            pipeline.delete(key(queue, request_id))
        pipeline.delete(keys.seen(queue, request_id))
    for letters in (keys.dead(queue), keys.malformed(queue)):
        pipeline.delete(letters, keys.letter_sizes(letters), keys.letter_bytes(letters))
    of_tenants = (keys.bands, keys.service, keys.weights, keys.charged, keys.due)  # no tenant waits, so none has a lane
    of_lanes = (
        *of_tenants, keys.backlog, keys.load, keys.workers, keys.homes, keys.room, keys.passed, keys.orphaned,
    )  # fmt: skip
    of_workers = (keys.looked, keys.reports)
    pipeline.delete(keys.requests(queue), keys.calls(queue), *(key(queue) for key in (*of_lanes, *of_workers)))
    await pipeline.execute()
