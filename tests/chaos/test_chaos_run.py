"""A short run of the whole harness: `make chaos` has the long ones."""

from __future__ import annotations

from pathlib import Path

from penstock.worker.chaos.plan import ChaosOptions
from penstock.worker.chaos.report import table
from penstock.worker.chaos.run import run_chaos
from penstock.worker.chaos.site import Site
from penstock.worker.embedded import EmbeddedServer


async def test_short_run(lasting_server: EmbeddedServer, tmp_path: Path) -> None:
    options = ChaosOptions(seed=7, requests=150, kills=9, zombies=5, restarts=1, losses=10)
    outcome = await run_chaos(options, Site(lasting_server), model="", logs=tmp_path, progress=lambda *_: None)
    assert outcome.verdict.problems == []
    rows = dict(table(outcome))
    assert int(rows["requests"]) >= options.requests  # and one more for each fault that came too late the first time
    done = sum(int(rows[name]) for name in ("kills", "zombies", "server restarts"))
    assert done + int(rows["missed faults"]) >= options.kills + options.zombies + options.restarts
    assert all(int(rows[name]) > 0 for name in ("resumed", "fenced writes", "absorbed retries", "dropped replies"))
