"""Examples for pandas, Ray Data and Airflow, in environments that have them: `make test-clients`."""

from __future__ import annotations

import asyncio
import json
import shutil
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


@pytest.mark.clients
@pytest.mark.timeout(900)
async def test_a_task_of_airflow_does_too(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW__CORE__DAGS_FOLDER", str(tmp_path / "dags"))
    monkeypatch.setenv("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
    airflow = python_of("airflow").with_name("airflow")
    (tmp_path / "dags").mkdir()
    shutil.copy(ROOT / "examples" / "airflow_rows.py", tmp_path / "dags")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(JSON_LINES)
    files = json.dumps({"source": str(source), "target": str(target)})
    status, output = await run(airflow, "db", "migrate")
    assert status == 0, output
    async with ScriptedWorker(redis_url) as worker:
        for _ in range(2):
            status, output = await run(airflow, "dags", "test", "replies", "--conf", files)
            assert status == 0, output
        assert sorted(request.prompt or "" for request in worker.taken) == ["one", "two"]
    assert [json.loads(line)["reply_text"] for line in target.read_text().splitlines()] == ["one", "two"]
