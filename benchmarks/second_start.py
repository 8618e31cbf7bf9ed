"""Measures how long an engine takes to start with an empty `compile_cache_dir`, and with the first start's cache.

    python -m benchmarks.second_start --model tiny --dtype bfloat16 --without-torch

Each start is a process of its own; a round is a first and a second start. Seconds from the process's start to an engine
that is warmed up, by part, medians over rounds; C++ kernels are built in a first start. `beyond reading` is all of it
but reading the checkpoint's bytes once, which is timed before each start. Appends to
`benchmarks/results/second_start.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.parts.tables import RESULTS, table_of
from penstock.tools.bench.presets import GEOMETRIES, preset_dir, preset_root
from penstock.tools.bench.report import append_result
from tests.support.packages import process_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(GEOMETRIES), default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-torch", action="store_true", help="as in images and for users, who have no torch")
    arguments = parser.parse_args()
    folder = preset_dir(arguments.model, arguments.dtype, preset_root())
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as cache:
            rounds.append([start_apart(arguments, folder, cache) for _ in ("first", "second")])
    rows = [
        {"start": name} | {part: round(median(each[part] for each in starts), 2) for part in starts[0]}
        for name, starts in zip(("first", "second"), zip(*rounds, strict=True), strict=True)
    ]
    ratio = median(second["whole s"] / first["whole s"] for first, second in rounds)
    title = f"{arguments.model} {arguments.dtype}, {arguments.rounds} rounds: second over first start {ratio:.2f}"
    Console().print(table_of(title, rows))
    append_result(RESULTS / "second_start.jsonl", {"options": vars(arguments), "rows": rows, "ratio": ratio})


def start_apart(arguments: argparse.Namespace, folder: Path, cache: str) -> dict[str, float]:
    """Returns the seconds of a start in another process, by part."""
    reading_s = seconds_to_read(folder)
    command = [sys.executable, "-m", "benchmarks.parts.engine_start", str(folder), arguments.dtype, cache]
    environment = os.environ | ({"PYTHONPATH": process_path()} if arguments.without_torch else {})
    done = subprocess.run([*command, str(time.time())], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    whole_s = sum(parts.values())
    return {"reading s": reading_s, **parts, "whole s": whole_s, "beyond reading s": whole_s - reading_s}


def seconds_to_read(folder: Path) -> float:
    """Returns the seconds of reading the files once, from wherever the system holds them."""
    begun_s = time.perf_counter()
    for file in folder.iterdir():
        file.read_bytes()
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    main()
