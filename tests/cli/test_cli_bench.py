"""`penstock bench`, run as people do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock import __version__
from penstock.cli import run
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.bench.bench_timelines import drawn, result
from tests.cli.cli_process import command, finish, penstock, start
from tests.support.patience import WAIT_S
from tests.support.programs.worker_harness import running_worker

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
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["runs"][0]["output_tokens"] == 12
    assert (found["options"]["workers"], found["options"]["version"]) == (1, __version__)


async def test_bench_serve_says_at_once_that_nobody_serves_the_queue(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(redis_url, queue="other"):
        outcome = await penstock("bench", "serve", "--redis-url", redis_url, "--queue", "q", *LOAD)
    assert outcome.status == 1
    assert outcome.err.splitlines()[-1] == (
        "penstock: no worker serves queue 'q'; queues that are served: other; --wait waits for one"
    )
    assert await redis.xlen(keys.requests("q")) == 0


async def test_bench_serve_refuses_workers_with_another_model(redis_url: str) -> None:
    async with running_worker(redis_url, model_name="fake"):
        command = ("bench", "serve", "--redis-url", redis_url, "--queue", "q", *LOAD)
        outcome = await penstock(*command, "--model", "llama")
        assert (await penstock(*command, "--model", "fake")).status == 0
    assert outcome.status == 1
    assert outcome.err.splitlines()[-1] == "penstock: the workers of queue 'q' serve fake, not llama"


async def test_bench_serve_waits_for_a_worker_where_it_is_told_to(redis_url: str, tmp_path: Path) -> None:
    report = tmp_path / "s.json"
    process = await start(
        "bench", "serve", "--wait", "--redis-url", redis_url, "--queue", "q", *LOAD, "--json", str(report)
    )
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


async def test_bench_serve_replays_a_trace(redis_url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 30, "output_length": 4, "hash_ids": [1]}\n'
        '{"timestamp": 900, "input_length": 20, "output_length": 3, "hash_ids": [1], "tenant": "acme"}\n'
    )
    report = tmp_path / "s.json"
    async with running_worker(redis_url):
        outcome = await penstock(
            "bench", "serve", "--redis-url", redis_url, "--queue", "q", "--trace", str(trace), "--trace-speed", "100",
            "--json", str(report),
        )  # fmt: skip
    assert outcome.status == 0, outcome.err
    found = json.loads(report.read_text())
    assert (found["runs"][0]["prompt_tokens"], found["runs"][0]["output_tokens"]) == (50, 7)
    assert "2 requests, as traced over 0.0 s at 100 times the speed" in found["title"]
    assert found["options"].keys() >= {"trace", "trace_speed"}
    assert [line["arrival_ms"] for line in found["timelines"][0]] == [0.0, 9.0]


async def test_two_results_are_compared(redis_url: str, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    async with running_worker(redis_url, model_name="fake"):
        for file in files:
            command = ("bench", "serve", "--redis-url", redis_url, "--queue", "q", "--repeats", "2", *LOAD)
            assert (await penstock(*command, "--json", file)).status == 0
    outcome = await penstock(
        "bench", "compare", *files, "--json", str(tmp_path / "c.json"), "--plot", str(tmp_path / "c.png"),
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    assert "p, Welch's t-test" in outcome.out
    assert "Welch's t-test on 2 and 2 runs" in outcome.out
    assert json.loads((tmp_path / "c.json").read_text())["unit"] == "runs"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_comparison_fails_where_a_figure_is_worse(tmp_path: Path) -> None:
    for name, slower in (("a", 1.0), ("b", 1.3)):
        result(tmp_path / name, *(drawn(seed, slower=slower) for seed in range(4)))
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    assert command("bench", "compare", first, second).status == 0
    assert command("bench", "compare", second, first, "--fail-above", "0").status == 0
    outcome = command("bench", "compare", first, second, "--fail-above", "15")
    assert outcome.status == 1
    assert outcome.err.startswith("penstock: worse by more than 15 %: ")
    assert "ITL mean +" in outcome.err


def test_results_that_cannot_be_compared_are_a_wrong_usage(tmp_path: Path) -> None:
    result(tmp_path / "a", drawn(0))
    result(tmp_path / "b", drawn(1), model="other")
    result(tmp_path / "few", drawn(1, count=3))
    first, second, few = (str(tmp_path / name) for name in ("a", "b", "few"))
    outcome = command("bench", "compare", first, second)
    assert outcome.status == 2
    assert outcome.err == (
        "penstock: the two cannot be compared: options.model is 'tiny' in the first and 'other' in the second; "
        "--anyway compares them\n"
    )
    assert "not the same: options.model: tiny -> other" in command("bench", "compare", first, second, "--anyway").out
    outcome = command("bench", "compare", few, few, "--fail-above", "5")
    assert (outcome.status, "no figure has an interval" in outcome.err) == (2, True)
    (tmp_path / "x").write_text("{}")
    outcome = command("bench", "compare", first, str(tmp_path / "x"))
    assert (outcome.status, "timelines" in outcome.err) == (2, True)
    outcome = command("bench", "compare", first, first, first)
    assert (outcome.status, "3 files do not form pairs" in outcome.err) == (2, True)
    outcome = command("bench", "compare", first, first, "--fail-above", "-1")
    assert (outcome.status, outcome.err) == (2, "penstock: --fail-above must be 0 or more, not -1\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--rate", "3", "--model", "demo"], "--rate 3 has no effect with --arrivals burst"),
        (["engine"], "no model is given"),
        (["engine", "--model", "random:huge"], "random:huge is not one of"),
        (["engine", "--model", "demo", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["serve", "--max-num-seqs", "3"], "--max-num-seqs has no effect without --embedded"),
        (["serve", "--embedded", "--redis-url", "redis://h"], "--redis-url has no effect with --embedded"),
        (["serve", "--embedded", "--wait"], "--wait has no effect with --embedded"),
        (["serve", "--clients", "0"], "--clients must be 1 or more, not 0"),
        (["serve", "--timeout", "0"], "--timeout must be above 0, not 0"),
    ],
)
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
from penstock.cli import main
main()
"""


async def test_a_plot_without_matplotlib_says_what_to_install() -> None:
    outcome = await penstock("bench", "serve", "--plot", "x.png", code=WITHOUT_MATPLOTLIB)
    assert outcome.status == 1
    assert outcome.err == (
        "penstock: --plot needs matplotlib, which is not installed: pip install '.[bench]' in a clone\n"
    )


async def test_bench_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom penstock.cli import main\ntry:\n    main()\nfinally:\n"
        "    print('loaded:', *sys.modules.keys() & {'jax', 'numpy', 'penstock.engine.engine', 'matplotlib'})"
    )
    for name in ("engine", "serve", "compare"):
        outcome = await penstock("bench", name, "--help", code=code)
        assert outcome.out.splitlines()[-1].strip() == "loaded:"
