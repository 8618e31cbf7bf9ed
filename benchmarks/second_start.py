"""Measures how long an engine takes to start with an empty `compile_cache_dir`, and with the first start's cache.

    python -m benchmarks.second_start --model tiny --dtype bfloat16

Each start is a process of its own; a round is a first and a second start. Seconds from the checkpoint on disk to an
engine that is warmed up, medians over rounds; C++ kernels are built in a first start. Appends to
`benchmarks/results/second_start.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.parts.tables import RESULTS, table_of
from penstock.engine import Engine, EngineConfig
from penstock.tools.bench.presets import GEOMETRIES, preset_dir, preset_root
from penstock.tools.bench.report import append_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(GEOMETRIES), default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start", type=Path, metavar="CACHE", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    folder = preset_dir(arguments.model, arguments.dtype, preset_root())
    if arguments.start is not None:
        print(json.dumps(start(folder, arguments.dtype, arguments.start)))
        return
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as cache:
            rounds.append([start_apart(arguments, cache) for _ in ("first", "second")])
    rows = [
        {"start": name, "load s": round(median(load_s), 2), "warm-up s": round(median(warm_s), 2)}
        for name, starts in zip(("first", "second"), zip(*rounds, strict=True), strict=True)
        for load_s, warm_s in [zip(*starts, strict=True)]
    ]
    ratio = median(sum(second) / sum(first) for first, second in rounds)
    title = f"{arguments.model} {arguments.dtype}, {arguments.rounds} rounds: second over first start {ratio:.2f}"
    Console().print(table_of(title, rows))
    options = {"model": arguments.model, "dtype": arguments.dtype, "rounds": arguments.rounds}
    append_result(RESULTS / "second_start.jsonl", {"options": options, "rows": rows, "ratio": ratio})


def start_apart(arguments: argparse.Namespace, cache: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.second_start", "--start", cache]
    command += ["--model", arguments.model, "--dtype", arguments.dtype]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def start(folder: Path, dtype: str, cache: Path) -> list[float]:
    """Returns the seconds of loading and of warm-up."""
    settings = EngineConfig(dtype=dtype, max_model_len=1024, kv_cache_bytes=2**30, compile_cache_dir=cache)
    begun_s = time.perf_counter()
    engine = Engine.from_checkpoint(folder, settings)
    loaded_s = time.perf_counter()
    engine.warm_up()
    return [loaded_s - begun_s, time.perf_counter() - loaded_s]


if __name__ == "__main__":
    main()
