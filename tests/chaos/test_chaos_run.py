"""A short run of the whole harness; `make chaos` does the long ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.tools.chaos.history import RequestRecord
from penstock.tools.chaos.plan import ChaosOptions, make_plan
from penstock.tools.chaos.report import table
from penstock.tools.chaos.run import run_chaos
from penstock.tools.chaos.site import Site
from tests.chaos.chaos_lab import wrongs
from tests.support.quick_programs import compile_elsewhere_as_shipped
from tests.support.redis_servers.servers import SERVERS


async def test_short_run(lasting_server: EmbeddedServer, tmp_path: Path) -> None:
    options = ChaosOptions(seed=7, requests=150, kills=9, zombies=5, restarts=1, losses=10)
    outcome = await run_chaos(options, Site(lasting_server), model="", logs=tmp_path, progress=lambda *_: None)
    assert wrongs(outcome.verdict) == []
    rows = dict(table(outcome))
    assert int(rows["requests"]) >= options.requests  # and one more for each fault that came too late the first time
    done = sum(int(rows[name]) for name in ("kills", "zombies", "server restarts"))
    assert done + int(rows["missed faults"]) >= options.kills + options.zombies + options.restarts
    assert all(int(rows[name]) > 0 for name in ("resumed", "fenced writes", "absorbed retries", "dropped replies"))
    assert any(map(went_on_inside_a_call, outcome.history.records.values()))


@pytest.mark.skipif(not SERVERS, reason="no Redis server")
async def test_short_run_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model, choices that end apart, stop strings, penalties and seeds pass from worker to worker; the fake
    engine has none of these.
    """
    compile_elsewhere_as_shipped(monkeypatch)
    faults = {"kills": 3, "zombies": 1, "restarts": 0, "losses": 2}
    options = ChaosOptions(seed=395, requests=16, **faults, workers=2, engine="model", has_chats=True)
    plan = make_plan(options, heartbeat_ttl_s=1.0)
    for has in (
        lambda request: request.n == 2 and request.fault is not None and request.fault.stage == "choice",
        lambda request: request.n == 2 and request.stop,
        lambda request: request.n == 1 and request.temperature == 0.0,
        lambda request: request.penalties and request.temperature,
        lambda request: request.min_tokens,
        lambda request: request.is_chat and request.n == 2 and request.fault is not None,
        lambda request: "regex" in request.form,
    ):
        assert any(map(has, plan.requests))
    with EmbeddedServer(next(iter(SERVERS.values())), data_dir=tmp_path) as server:
        outcome = await run_chaos(options, Site(server), model="demo", logs=tmp_path, progress=lambda *_: None)
    assert wrongs(outcome.verdict) == []
    assert any(map(went_on_beside_an_ended_choice, outcome.history.records.values()))


def went_on_inside_a_call(record: RequestRecord) -> bool:
    """Checks whether a worker took the request when its last output was a part of a call, and continued that call."""
    has_parts, was_taken = False, False
    for entry in record.seen:
        if entry.fields["type"] == "own":
            was_taken = has_parts
        deltas = json.loads(entry.fields.get("tool_calls", "[]"))
        if was_taken and deltas and "id" not in deltas[0]:
            return True
        has_parts, was_taken = has_parts or bool(deltas), was_taken and not deltas
    return False


def went_on_beside_an_ended_choice(record: RequestRecord) -> bool:
    """Checks whether a worker took the request when one of its choices had ended and another had not."""
    kinds = [entry.fields["type"] if "finish_reason" not in entry.fields else "ended" for entry in record.seen]
    return "ended" in kinds and "own" in kinds[kinds.index("ended") :]
