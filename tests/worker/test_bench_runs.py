"""Loads on a real queue with a fake engine, on the engine by itself, and the command that runs both."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cli_process import penstock
from worker_harness import running_worker

from penstock.engine.loading.checkpoint import check_weights, read_model_config
from penstock.engine.text.tokenizer import Tokenizer
from penstock.worker.bench.arrivals import Arrivals
from penstock.worker.bench.datasets import BenchRequest
from penstock.worker.bench.errors import ImpossibleLoad
from penstock.worker.bench.load import Load
from penstock.worker.bench.on_engine import run_on_engine
from penstock.worker.bench.on_service import run_on_service
from penstock.worker.bench.presets import preset_dir
from penstock.worker.bench.summary import Summary
from penstock.worker.chaos.fake_engine import FakeEngine, FakeText

REQUESTS = tuple(BenchRequest((7,) * length, 5) for length in (3, 4, 5, 6))
NUM_DONE_AT_END = len(REQUESTS)


def test_an_engine_answers_the_whole_load() -> None:
    seen: list[tuple[int, int]] = []
    load = Load(REQUESTS)
    recorder = run_on_engine(FakeEngine(), FakeText(), load, lambda done, total, what: seen.append((done, total)))
    run = Summary.of(recorder)
    assert (run.num_requests, run.num_failed, run.prompt_tokens, run.output_tokens) == (4, 0, 18, 20)
    assert run.tokens_per_delivery == 1.0
    assert seen[-1] == (NUM_DONE_AT_END, 4)


def test_prompts_of_all_kinds_reach_an_engine() -> None:
    chat = BenchRequest(({"role": "user", "content": "hi"},), 2)
    recorder = run_on_engine(FakeEngine(), FakeText(), Load((BenchRequest("hello", 2), chat)))
    assert [line.num_prompt for line in recorder.timelines] == [5, len("user:hi")]


def test_a_closed_load_never_has_more_under_way() -> None:
    engine = FakeEngine()
    load = Load(REQUESTS, Arrivals("closed", concurrency=2))
    assert Summary.of(run_on_engine(engine, FakeText(), load)).num_failed == 0
    assert engine.most_rows == 2


def test_open_arrivals_count_from_when_they_were_due() -> None:
    load = Load(REQUESTS, Arrivals("constant", rate=50.0))
    recorder = run_on_engine(FakeEngine(step_s=0.03), FakeText(), load)
    arrivals = [line.arrival_s - recorder.start_s for line in recorder.timelines]
    assert arrivals == pytest.approx([0.0, 0.02, 0.04, 0.06])


async def test_a_service_answers_the_whole_load(redis_url: str) -> None:
    async with running_worker(redis_url):
        recorder = await run_on_service(redis_url, "q", Load(REQUESTS), num_clients=2)
    run = Summary.of(recorder)
    assert (run.num_requests, run.num_failed, run.prompt_tokens, run.output_tokens) == (4, 0, 18, 20)
    assert run.ttft_ms is not None


async def test_a_closed_load_through_a_service(redis_url: str) -> None:
    async with running_worker(redis_url) as running:
        load = Load(REQUESTS, Arrivals("closed", concurrency=1))
        recorder = await run_on_service(redis_url, "q", load)
        assert running.engine.most_rows == 1
    ends = [line.end_s for line in recorder.timelines]
    assert all(line.arrival_s >= (end or 0.0) for line, end in zip(recorder.timelines[1:], ends, strict=False))


async def test_requests_that_fail_are_counted_and_end_nothing(redis_url: str) -> None:
    load = Load((BenchRequest((7,) * 3, 5), BenchRequest((7,) * 50, 5)))
    async with running_worker(redis_url, FakeEngine(max_model_len=20)):
        recorder = await run_on_service(redis_url, "q", load)
    assert Summary.of(recorder).num_failed == 1
    assert "50 tokens" in (recorder.timelines[1].error or "")


async def test_a_reply_that_takes_too_long_has_failed(redis_url: str) -> None:
    started_s = time.monotonic()
    recorder = await run_on_service(redis_url, "q", Load(REQUESTS[:1]), timeout_s=0.1)  # no worker is there
    assert Summary.of(recorder).num_failed == 1
    assert time.monotonic() - started_s < 10


@pytest.mark.parametrize(("option", "value"), [("num_clients", 0), ("timeout_s", 0.0)])
async def test_impossible_ways_to_send_are_refused(option: str, value: float) -> None:
    with pytest.raises(ImpossibleLoad, match="must be"):
        await run_on_service("redis://localhost:1", "q", Load(REQUESTS), **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_model_is_a_whole_checkpoint(tmp_path: Path, dtype: str) -> None:
    directory = preset_dir("nano", dtype, tmp_path)
    config = read_model_config(directory)
    assert (config.dtype, config.vocab_size) == (dtype, 512)
    check_weights(directory, config)
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.vocab_size == 512
    assert len(tokenizer.encode("tea at ten")) < len("tea at ten")
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    stamp = directory.stat().st_mtime_ns
    assert preset_dir("nano", dtype, tmp_path).stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_random_models_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(ImpossibleLoad, match="random:huge is none of random:nano"):
        preset_dir("huge", "float32", tmp_path)
    with pytest.raises(ImpossibleLoad, match=r"--dtype of a random model must be one of .* not 'float16'"):
        preset_dir("nano", "float16", tmp_path)


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
async def test_impossible_commands_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    outcome = await penstock("bench", *arguments, XDG_CACHE_HOME=str(tmp_path))
    assert outcome.status == 2
    assert message in outcome.err.splitlines()[-1]


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
        "    print('loaded:', *sys.modules.keys() & {'jax', 'numpy', 'penstock.engine', 'matplotlib'})"
    )
    for command in ("engine", "serve"):
        outcome = await penstock("bench", command, "--help", code=code)
        assert outcome.out.splitlines()[-1].strip() == "loaded:"
