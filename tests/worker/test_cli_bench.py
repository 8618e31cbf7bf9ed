"""`penstock bench`, run as people do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from cli_process import finish, penstock, start
from patience import WAIT_S
from worker_harness import running_worker

from penstock.worker.cli import run

SMALL = ("--max-num-seqs", "4", "--max-batch-tokens", "16", "--max-model-len", "64", "--num-pages", "40")


LOAD = ("--requests", "3", "--prompt-length", "uniform:3:9", "--output-length", "4")


async def test_bench_engine_writes_figures_and_a_picture(tmp_path: Path, compile_cache: Path) -> None:
    outcome = await penstock(
        "bench", "engine", "--model", "random:nano", *SMALL, *LOAD, "--json", str(tmp_path / "e.json"),
        "--plot", str(tmp_path / "e.png"), "--slo-ttft-ms", "60000", "--compile-cache-dir", str(compile_cache),
        XDG_CACHE_HOME=str(tmp_path), COLUMNS="150",
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    assert "random:nano float32" in outcome.out
    found = json.loads((tmp_path / "e.json").read_text())
    assert (found["runs"][0]["output_tokens"], found["runs"][0]["good_share"]) == (12, 1.0)
    assert found["options"]["max_num_seqs"] == 4
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


async def test_bench_serve_on_a_running_worker(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url):
        outcome = await penstock(
            "bench", "serve", "--redis-url", redis_url, "--queue", "q", *LOAD, "--json", str(tmp_path / "s.json")
        )
    assert outcome.status == 0, outcome.err
    assert json.loads((tmp_path / "s.json").read_text())["runs"][0]["output_tokens"] == 12


async def test_bench_serve_says_that_nobody_serves_the_queue_and_waits(redis_url: str, tmp_path: Path) -> None:
    report = tmp_path / "s.json"
    process = await start("bench", "serve", "--redis-url", redis_url, "--queue", "q", *LOAD, "--json", str(report))
    assert process.stderr is not None
    line = await asyncio.wait_for(process.stderr.readline(), WAIT_S)
    assert json.loads(line)["event"] == "no worker serves queue 'q'; waiting for one"
    async with running_worker(redis_url):
        outcome = await finish(process)
    assert outcome.status == 0, outcome.err
    assert json.loads(report.read_text())["runs"][0]["num_failed"] == 0


async def test_bench_serve_embedded(tmp_path: Path, compile_cache: Path) -> None:
    outcome = await penstock(
        "bench", "serve", "--embedded", "--model", "random:nano", *SMALL, *LOAD, "--json", str(tmp_path / "s.json"),
        "--compile-cache-dir", str(compile_cache), XDG_CACHE_HOME=str(tmp_path),
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    assert json.loads((tmp_path / "s.json").read_text())["runs"][0]["num_failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--rate", "3", "--model", "demo"], "--rate 3 means nothing to --arrivals burst"),
        (["engine"], "no model is given"),
        (["engine", "--model", "random:huge"], "random:huge is none of"),
        (["engine", "--model", "demo", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["serve", "--max-num-seqs", "3"], "--max-num-seqs means nothing without --embedded"),
        (["serve", "--embedded", "--redis-url", "redis://h"], "--redis-url means nothing with --embedded"),
        (["serve", "--clients", "0"], "--clients must be 1 or more, not 0"),
        (["serve", "--timeout", "0"], "--timeout must be above 0, not 0"),
    ],
)
@pytest.mark.usefixtures("own_logs")
def test_impossible_commands_are_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_MODEL", raising=False)
    assert run(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


WITHOUT_MATPLOTLIB = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "matplotlib" else find(name, *more)
from penstock.worker.cli import main
main()
"""


async def test_a_plot_without_matplotlib_says_what_to_install() -> None:
    outcome = await penstock("bench", "serve", "--plot", "x.png", code=WITHOUT_MATPLOTLIB)
    assert outcome.status == 1
    assert outcome.err == ("penstock: --plot needs matplotlib, which is not installed: pip install 'penstock[bench]'\n")


async def test_bench_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom penstock.worker.cli import main\ntry:\n    main()\nfinally:\n"
        "    print('loaded:', *sys.modules.keys() & {'jax', 'numpy', 'penstock.engine.engine', 'matplotlib'})"
    )
    for command in ("engine", "serve"):
        outcome = await penstock("bench", command, "--help", code=code)
        assert outcome.out.splitlines()[-1].strip() == "loaded:"
