"""Measures this processor: the peak of each of its instructions for products, and how near the kernels' matmuls come.

    python -m benchmarks.processors

Weights are read one after the other, more than caches hold. The bound of a matmul is the slower of the peak on all
threads and reading the weights once at memory's rate, both measured in the same run. Prints tables and appends them to
`benchmarks/results/processors.jsonl`.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks.cpu_kernels import in_turn, streams
from benchmarks.parts.tables import RESULTS, table_of
from penstock.engine.kernels.cpu import compilation, kind_here
from penstock.engine.kernels.cpu.processor_kinds import features, kinds_here
from penstock.engine.processors import cpu_facts, num_processors
from penstock.tools.bench.report import append_result

SHAPE = (1024, 3072)  # features in and out, of `qwen06`
ROWS = (1, 4, 16, 64, 512)
FORMS = {"bf16": ("TDPBF16PS", "BFMMLA", "VDPBF16PS", "FMA"), "W8A8": ("TDPBSSD", "VPDPBUSD", "SDOT")}
"""The forms, and the instructions whose peak bounds them: the first that the processor has."""

_PEAKS = Path(__file__).parent / "parts" / "peaks.cc"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console = Console()
    peaks = peak_rates()
    model = next(iter(cpu_facts("model name", "CPU part")), "").partition(":")[2].strip()
    processor = {"processor": model, "threads": num_processors(), "kernels for": kind_here()}
    for title, rows in (("peaks of all threads, GOP/s", [processor | peaks]), ("matmuls", matmuls(peaks))):
        console.print(table_of(title, rows))
        record = {"title": title, "processor": processor, "flags": sorted(features()), "rows": rows}
        append_result(RESULTS / "processors.jsonl", record)


def peak_rates() -> dict[str, float]:
    """Returns operations per second, in 10^9, of all threads at once, by instruction."""
    flags = next((kind.native_flags for kind in kinds_here()), ("-march=native",))
    flags = tuple(flag for flag in flags if flag != "-mno-avx512bf16")  # what the table avoids is measured too
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "peaks"
        sources = (f"-I{Path(compilation.__file__).parent}", str(_PEAKS))
        command = (compilation.find_compiler(), "-std=c++17", "-O3", *flags, *sources, "-o", str(program))
        subprocess.run(command, check=True)
        with ThreadPoolExecutor(num_processors()) as threads:
            told = list(threads.map(lambda _: subprocess.check_output([program], text=True), range(num_processors())))
    lines = [line.split() for each in told for line in each.splitlines()]
    return {name: sum(float(rate) for other, rate in lines if other == name) for name, _ in lines}


def matmuls(peaks: dict[str, float]) -> list[dict[str, Any]]:
    """Times a matmul of each form. `of the bound` is the time at the bound over the time that it took."""
    rows = []
    forms = {name: form for name, form in streams(*SHAPE).items() if not peaks.keys().isdisjoint(FORMS.get(name, ()))}
    for num_rows in ROWS:
        x = jax.random.normal(jax.random.key(1), (num_rows, SHAPE[0]), "bfloat16")
        seconds, read_rate = in_turn({name: partial(form, x) for name, (form, _, _) in forms.items()})
        for name, (_, num_layers, num_bytes) in forms.items():
            each_s, operations = seconds[name] / num_layers, 2 * num_rows * SHAPE[0] * SHAPE[1]
            peak = next(peaks[instruction] for instruction in FORMS[name] if instruction in peaks) * 1e9
            rows.append({
                "weights": f"{name}, {SHAPE[0]} x {SHAPE[1]}", "rows": num_rows,
                "us": round(each_s * 1e6, 1), "GOP/s": round(operations / each_s * 1e-9),
                "memory, GB/s": round(read_rate * 1e-9, 1),
                "of the bound": round(max(operations / peak, num_bytes / read_rate) / each_s, 2),
            })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
