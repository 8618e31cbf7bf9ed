"""Reads the schedules of our TPU kernels at the presets' geometries, with no TPU, and keeps their cycles in a table.

    python -m benchmarks.tpu_schedules [--case 1 ...] [--left-out]

Writes `tools/plan/schedules/table.jsonl`, which plans read, and `benchmarks/results/tpu_schedules.md` from it. A case
that ran again replaces its line; another libtpu adds lines of its own. With `--left-out` it reads geometries that are
not in the table, and keeps them in a file of their own: they show how far off plans of such geometries are.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.parts.tables import RESULTS
from benchmarks.parts.tpu_kernels import KERNELS, measured
from penstock.engine.errors import EngineError
from penstock.installed import how_to_install
from penstock.tools.plan import has_libtpu
from penstock.tools.plan.device.chips import CHIPS
from penstock.tools.plan.schedules import ScheduleError, table
from penstock.tools.plan.schedules.scaling import cycles_of

RESULT, LEFT_OUT = RESULTS / "tpu_schedules.md", RESULTS / "tpu_schedules_left_out.jsonl"
CONTEXTS = (65, 520, 1000, 1023, 1024, 1100, 2047, 2048, 4096)
BEFORE = (0, 1536, 7168)
ROWS = (16, 64, 256)
TILES = (16, 64)  # rows of an expert's tile


@dataclass(frozen=True)
class Case:
    kernel: str
    topology: str
    geometry: Mapping[str, Any]
    points: tuple[int | str, ...]


def _heads(heads: int, kv_heads: int, kv: str = "bfloat16", head_dim: int = 128) -> dict[str, Any]:
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "kv": kv}


def _attention(topology: str, *shares: dict[str, Any]) -> Iterator[Case]:
    for share in shares:
        yield Case("decode attention", topology, share, CONTEXTS)
        yield Case("prefill attention", topology, share, BEFORE)


def _matmul(topology: str, form: str, num_out: int, num_in: int) -> Case:
    return Case("quantized matmul", topology, {"form": form, "out": num_out, "in": num_in}, ROWS)


CASES = (
    # Qwen3-0.6B on one device; Llama-3.1-8B and Qwen3-8B over four; Llama-3.3-70B and Qwen3-32B over eight
    *_attention("v6e:2x2", _heads(16, 8), _heads(8, 2), _heads(8, 1)),
    *_attention("v6e:2x2", _heads(8, 2, "float8_e4m3fn"), _heads(8, 2, "int8")),
    *_attention("v5e:2x2", _heads(16, 8), _heads(4, 1)),
    *_attention("tpu7x:2x2x1", _heads(32, 8), _heads(32, 4, "float8_e4m3fn")),
    _matmul("v5e:1x1", "int4 of 32, float16", 4096, 4096),
    _matmul("v6e:2x2", "int4 of 32, float16", 4096, 4096),
    _matmul("v6e:2x2", "int4 of 128, zeros, float16", 4096, 4096),
    _matmul("v6e:2x2", "int4 of 128, zeros, bfloat16", 4096, 4096),
    _matmul("v6e:2x2", "int8 of 32, float16", 4096, 4096),
    _matmul("v6e:2x2", "fp8 of rows", 4096, 5120),
    _matmul("v6e:2x2", "fp8 of 128 x 128", 4096, 5120),
    _matmul("v6e:2x2", "int4 of 32, minimums, float16", 4096, 4096),
    _matmul("v5e:1x1", "int4 of 32, minimums, float16", 4096, 4096),
    Case("experts", "v5e:2x4", {"form": "mxfp4", "out": 2880, "in": 2880}, TILES),
    Case("experts", "v6e:2x2", {"form": "mxfp4", "out": 2880, "in": 2880}, TILES),
    Case("delta rule", "v6e:2x2", {"key_heads": 8, "value_heads": 24, "head_dim": 128}, (64,)),
    Case("delta rule", "v6e:2x2", {"key_heads": 4, "value_heads": 8, "head_dim": 128}, (64,)),
    *(
        Case(kernel, topology, {"rows": 8, "vocab": vocab}, points)
        for topology, vocab in (("v6e:2x2", 151_936), ("v6e:2x2", 128_256), ("v5e:1x1", 151_936))
        for kernel, points in (("draw", ("greedy", "filtered", "flat")), ("adjust", ("anything",)))
    ),
)

CASES_LEFT_OUT = (
    *_attention("v6e:2x2", _heads(16, 4)),
    _matmul("v6e:2x2", "int4 of 32, minimums, float16", 7168, 2048),
    _matmul("v6e:2x2", "fp8 of 128 x 128", 2048, 14336),
    Case("experts", "v6e:2x2", {"form": "mxfp4", "out": 5760, "in": 1024}, TILES),
    Case("draw", "v6e:2x2", {"rows": 16, "vocab": 201_088}, ("greedy", "filtered", "flat")),
    Case("adjust", "v6e:2x2", {"rows": 16, "vocab": 262_144}, ("anything",)),
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--case", type=int, nargs="*", help=f"numbers of cases, 1 to {len(CASES)}; none: all")
    arguments.add_argument("--left-out", action="store_true", help="read what is not in the table")
    if not has_libtpu():
        print(f"libtpu is not installed, so there are no schedules to read: {how_to_install('worker,tpu')}")
        return
    given = arguments.parse_args()
    cases, path = (CASES_LEFT_OUT, LEFT_OUT) if given.left_out else (CASES, table.PATH)
    for number in given.case or range(1, len(cases) + 1):
        case = cases[number - 1]
        print(f"{number}. {case.kernel}, {case.topology}, {_named(case.geometry)}", file=sys.stderr, flush=True)
        try:
            table.keep([read(case)], path)
        except EngineError as error:
            print(f"not read: {error}", file=sys.stderr)
    RESULT.write_text("\n".join(_page()) + "\n", encoding="utf-8")
    print(f"wrote {RESULT}")


def read(case: Case) -> table.Row:
    """Compiles a case and follows its schedules."""
    schedules, cycles = measured(case.kernel, case.topology, case.geometry, case.points)
    static = schedules[-1].counts
    return table.Row(
        libtpu=version("libtpu"),
        chip=case.topology.partition(":")[0],
        kernel=case.kernel,
        geometry=dict(case.geometry),
        bundles=len(schedules[-1].bundles),
        spills=static["spill"],
        fills=static["fill"],
        transfers=static["transfer"],
        bounds_checks=static["bounds check"],
        cycles={str(point): count for point, count in zip(case.points, cycles, strict=True)},
    )


def _named(geometry: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in geometry.items())


def _page() -> Iterator[str]:
    yield _HEAD
    kept = table.rows()
    for libtpu in sorted({row.libtpu for row in kept}):
        for name, kernel in KERNELS.items():
            of_kernel = [row for row in kept if (row.libtpu, row.kernel) == (libtpu, name)]
            if of_kernel:
                yield f"\n## {name}, libtpu {libtpu}\n\nCycles of {kernel.unit}, by {kernel.points}.\n"
                yield from _lines(of_kernel)
    yield _LEFT_OUT
    for row in table.rows(LEFT_OUT):
        for point, cycles in row.cycles.items():
            ruled = by_rule(row, point)
            cells = [row.libtpu, row.chip, row.kernel, _named(row.geometry), point, f"{cycles:,.0f}", f"{ruled:,.0f}"]
            yield f"| {' | '.join(cells)} | {ruled / cycles - 1:+.0%} |"


def by_rule(row: table.Row, point: str) -> float:
    """Returns what the table gives for a row that is not in it."""
    of_version = [replace(kept, libtpu=version("libtpu")) for kept in table.rows() if kept.libtpu == row.libtpu]
    found = cycles_of(row.chip, row.kernel, row.geometry, of_version)
    if found is None:
        raise ScheduleError(f"nothing in the table is like {row.kernel}, {_named(row.geometry)}")
    return found.at(float(point) if point.isdigit() else point)


def _lines(of_kernel: list[table.Row]) -> Iterator[str]:
    points = list(dict.fromkeys(point for row in of_kernel for point in row.cycles))
    cells = ["chip", "geometry", "bundles", "spills", "fills", "DMAs", "bounds checks", *points]
    yield f"| {' | '.join(cells)} |"
    yield f"|{' --- |' * len(cells)}"
    for row in of_kernel:
        counts = (row.bundles, row.spills, row.fills, row.transfers, row.bounds_checks)
        cycles = (f"{row.cycles[point]:,.0f}" if point in row.cycles else "" for point in points)
        yield f"| {' | '.join([row.chip, _named(row.geometry), *(f'{count:,}' for count in counts), *cycles])} |"


_CLOCKS = ", ".join(f"{name} {chip.clock_hz / 1e9:.2f}" for name, chip in CHIPS.items())
_HEAD = f"""# Schedules of our TPU kernels

Read from what libtpu dumps when it compiles, by `python -m benchmarks.tpu_schedules`; nothing ran on a TPU. A bundle is
a cycle. Waits, for memory above all, are not in it, so cycles are a lower bound of a kernel's time, as its bytes are.
Clocks in GHz, as plans use them: {_CLOCKS}. Spills, fills, DMAs and bounds checks are counted in
the text of the program, not as often as they run."""

_LEFT_OUT = """
## Left out

Geometries that are not in the table: cycles by their schedules, and by the rule of `tools/plan/schedules/scaling.py`.

| libtpu | chip | kernel | geometry | at | schedule | rule | error |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


if __name__ == "__main__":
    main()
