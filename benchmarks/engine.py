"""Measures the offline throughput of the bare engine on the shared workload, with random weights.

    python -m benchmarks.engine --model tiny --dtype float32 --repeats 3

Prints tables and appends one JSON line to `benchmarks/results/engine.jsonl`; with `--profile`,
shows what its steps are made of (`step_profile`). `penstock bench engine` has more options.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console

from benchmarks.parts.step_profile import profiled
from benchmarks.parts.tables import RESULTS, table_of
from penstock.engine import Engine, EngineConfig
from penstock.serving import garbage
from penstock.tools.bench.machine import describe_machine
from penstock.tools.bench.on_engine import run_on_engine
from penstock.tools.bench.options import LoadOptions
from penstock.tools.bench.presets import GEOMETRIES, preset_dir, preset_root
from penstock.tools.bench.report import Report, append_result
from penstock.tools.bench.summary import Summary
from penstock.tools.bench.traffic.load import Load

COMPILE_CACHE = preset_root().parent / "compile"


def loaded_engine(arguments: argparse.Namespace, **options: Any) -> tuple[Engine, float]:
    """Returns a warmed-up engine with random weights and no prefix cache, and the seconds of its warm-up."""
    settings = EngineConfig(
        dtype=arguments.dtype,
        max_num_seqs=64,
        max_batch_tokens=arguments.max_batch_tokens,
        page_size=arguments.page_size,
        max_model_len=1024,
        kv_cache_bytes=3 * 2**30,
        prefix_caching=False,
        compile_cache_dir=COMPILE_CACHE,
        **options,
    )
    engine = Engine.from_checkpoint(preset_dir(arguments.model, arguments.dtype, preset_root()), settings)
    start = time.perf_counter()
    engine.warm_up()
    engine.settle()
    garbage.settle()
    return engine, round(time.perf_counter() - start, 1)


def shared_load(model: str, count: int, **options: Any) -> Load:
    """Returns the workload that engines are compared on."""
    return LoadOptions(requests=count, **options).load(GEOMETRIES[model].vocab_size)


def engine_arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that say which engine is measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(GEOMETRIES), default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--page-size", type=int, default=None)
    return parser


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="show what steps are made of, in one run more")
    arguments = parser.parse_args()
    machine = describe_machine()
    engine, warm_up_s = loaded_engine(arguments)
    load = shared_load(arguments.model, arguments.requests)
    runs, steps = [], []
    for _ in range(arguments.repeats):
        before = engine.stats().steps_total
        before_s = time.process_time()
        recorder = run_on_engine(engine, engine.tokenizer, load)
        cpu_s = time.process_time() - before_s
        steps.append(engine.stats().steps_total - before)
        runs.append((Summary.of(recorder), recorder, cpu_s))
    title = f"{arguments.model} {arguments.dtype}, warm-up {warm_up_s} s, {steps[0]} steps"
    report = Report.of(title, {**vars(arguments), "warm_up_s": warm_up_s, "steps": steps}, runs, machine)
    Console().print(report.tables())
    append_result(RESULTS / "engine.jsonl", report.to_json())
    if arguments.profile:
        show_profile(engine, load)


def show_profile(engine: Engine, load: Load) -> None:
    profile = profiled(engine, lambda: run_on_engine(engine, engine.tokenizer, load))
    for title, rows in (("programs", profile.programs), ("who computes", profile.places), ("what", profile.operations)):
        Console().print(table_of(title, rows, digits=3))
    Console().print(f"no operation ran in {profile.idle_share:.1%} of the time")


if __name__ == "__main__":
    main()
