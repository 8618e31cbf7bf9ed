"""The service of one machine: which of its programs are started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.local.programs import ProgramEnded
from penstock.local.service import LocalService
from tests.support.patience import WAIT_S, eventually
from tests.support.processes import ended

STAYS = "exec sleep 1000"
JOINS = """echo '{"event": "joined", "level": "info"}' >&2; """
LISTENS = """echo '{"event": "listening", "level": "info", "url": "http://x"}' >&2; """


@asynccontextmanager
async def shell(command: str, settings: Mapping[str, Any], stderr: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec("sh", "-c", settings["script"], stderr=stderr)
    try:
        yield process
    finally:
        await ended(process)


@pytest.fixture(autouse=True)
def _shell_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.local.programs.running", shell)
    monkeypatch.setattr("penstock.local.programs.RESTART_PAUSE_S", 0.0)


async def test_a_worker_that_is_killed_as_it_starts_is_started_again_while_another_serves(tmp_path: Path) -> None:
    ready, began, again = tmp_path / "ready", tmp_path / "began", tmp_path / "again"
    killed = f"until [ -e {ready} ]; do sleep 0.01; done; [ -e {began} ] || {{ touch {began}; kill -9 $$; }}; "
    workers = [{"script": JOINS + STAYS}, {"script": f"{killed} touch {again}; {STAYS}"}]
    service = LocalService(workers, {"script": LISTENS + STAYS}, lambda url: ready.touch())
    serving = asyncio.create_task(service.run())
    await eventually(lambda: again.exists() or serving.done())
    service.stop()
    await asyncio.wait_for(serving, WAIT_S)
    assert again.exists()


async def test_a_worker_that_ends_before_any_has_served_ends_the_service() -> None:
    service = LocalService([{"script": "exit 4"}, {"script": STAYS}], {"script": LISTENS + STAYS}, print)
    with pytest.raises(ProgramEnded, match="worker-1 ended with status 4 before it served"):
        await asyncio.wait_for(service.run(), WAIT_S)
