"""Examples for tables of pandas and Ray Data, in an environment that has them: `make test-clients`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.clients.environments import python_of, run
from tests.support.packages import ROOT
from tests.support.programs.fakes import ScriptedWorker

JSON_LINES = '{"prompt": "one"}\n{"prompt": "two"}\n'
CSV = "prompt\none\ntwo\n"


@pytest.mark.clients
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("program", "name", "rows"), [("pandas_rows.py", "in.csv", CSV), ("ray_rows.py", "in.jsonl", JSON_LINES)]
)
async def test_a_table_goes_through_a_queue_and_again_for_nothing(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, name: str, rows: str
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    python = python_of("tables")
    source, target = tmp_path / name, tmp_path / "replies"
    source.write_text(rows)
    async with ScriptedWorker(redis_url) as worker:
        for _ in range(2):
            status, output = await run(python, ROOT / "examples" / program, source, target)
            assert status == 0, output
        assert sorted(request.prompt or "" for request in worker.taken) == ["one", "two"]
    files = [target] if target.is_file() else list(target.iterdir())
    text = "".join([await asyncio.to_thread(file.read_text) for file in files])
    assert "reply_text" in text
    assert text.count("one") >= 2
