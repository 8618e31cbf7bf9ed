"""Faults at chosen moments, one for each at which a promise could break."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.tools.chaos.plan import FREEZE_MOMENTS, KILL_MOMENTS, LOSSES, Fault, FaultKind, RequestPlan, Side, Stage
from tests.chaos.chaos_lab import run_requests
from tests.support.patience import WAIT_S


def victim(fault: Fault, max_tokens: int = 60, **more: object) -> RequestPlan:
    return RequestPlan("victim", "hello", max_tokens, fault=fault, **more)  # type: ignore[arg-type]


BYSTANDER = RequestPlan("bystander", "good day", 120, n=2)


@pytest.mark.parametrize(("stage", "side"), KILL_MOMENTS)
async def test_kill(lasting_server: EmbeddedServer, tmp_path: Path, stage: Stage, side: Side) -> None:
    fault = Fault("kill", stage, side, at_chunk=2)
    result = await run_requests(lasting_server, tmp_path, victim(fault), BYSTANDER)
    assert result.problems == []
    assert result.count("kill") == 1
    had_claimed = (stage, side) not in (("read", "after"), ("claim", "before"))
    had_ended = stage == "ack" or (stage, side) == ("finish", "after")
    assert bool(result.heirs("kill")) == (had_claimed and not had_ended)


@pytest.mark.parametrize(("stage", "side"), FREEZE_MOMENTS)
async def test_zombie(lasting_server: EmbeddedServer, tmp_path: Path, stage: Stage, side: Side) -> None:
    was_ended = stage == "ack"  # nobody takes it: who is frozen for longer than its heartbeat lasts wakes by itself
    length_s = 1.2 if was_ended else WAIT_S
    fault = Fault("freeze", stage, side, at_chunk=2, length_s=length_s, until_taken=not was_ended)
    result = await run_requests(lasting_server, tmp_path, victim(fault), BYSTANDER)
    assert result.problems == []
    assert result.count("freeze") == result.count("wake") == 1
    assert bool(result.heirs("freeze")) == (not was_ended)
    assert num_fenced(tmp_path) >= (stage in ("chunk", "finish"))


def num_fenced(logs: Path) -> int:
    """Counts how often a worker dropped a request because another one owned it.

    It learned that from a refused write, or from a look at a new connection, which it may have made when it woke up.
    """
    lines = [line for log in logs.glob("*.log") for line in log.read_text().splitlines()]
    return sum('"request_dropped"' in line and '"fenced"' in line for line in lines)


async def test_two_zombies_of_one_request(lasting_server: EmbeddedServer, tmp_path: Path) -> None:
    """Both zombies wake up with a write in hand while a third worker has the request."""
    fault = Fault("freeze", "chunk", "before", at_chunk=2, times=2, length_s=WAIT_S, until_taken=True)
    result = await run_requests(lasting_server, tmp_path, victim(fault, 400), workers=3)
    assert result.problems == []
    assert len(set(result.owners("victim"))) == 3
    assert num_fenced(tmp_path) >= 2


async def test_ten_kills_in_one_long_generation(lasting_server: EmbeddedServer, tmp_path: Path) -> None:
    fault = Fault("kill", "chunk", "after", at_chunk=3, times=10)
    result = await run_requests(lasting_server, tmp_path, victim(fault, 500), workers=3)
    assert result.problems == []
    assert result.count("kill") == 10
    killed = {event.worker for event in result.history.events if event.kind == "kill"}
    assert len(killed & set(result.owners("victim")[:-1])) == 10
    assert result.verdict.resumed >= 10


@pytest.mark.parametrize(("kind", "stage", "side"), LOSSES)
async def test_loss(lasting_server: EmbeddedServer, tmp_path: Path, kind: FaultKind, stage: Stage, side: Side) -> None:
    fault = Fault(kind, stage, side, at_chunk=2, length_s=0.2)
    result = await run_requests(lasting_server, tmp_path, victim(fault), BYSTANDER)
    assert result.problems == []
    if (kind, stage) in (("drop", "chunk"), ("drop", "finish")):
        assert result.history.wire.absorbed >= 1


@pytest.mark.parametrize("side", ["before", "after"])
async def test_server_restart(lasting_server: EmbeddedServer, tmp_path: Path, side: Side) -> None:
    fault = Fault("restart", "chunk", side, at_chunk=3, length_s=0.2)
    result = await run_requests(lasting_server, tmp_path, victim(fault), BYSTANDER)
    assert result.problems == []
    assert result.count("restart") == 1


async def test_lost_answers_to_a_client(lasting_server: EmbeddedServer, tmp_path: Path) -> None:
    requests = [RequestPlan(f"r{i}", "hi", 30, sends=2, loses_enqueue=True, loses_read=True) for i in range(4)]
    result = await run_requests(lasting_server, tmp_path, *requests)
    assert result.problems == []
    assert result.history.wire.dropped == 8
