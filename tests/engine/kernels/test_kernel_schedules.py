"""Small kernels take no more cycles than they did: their schedules are read from what libtpu dumps.

What adds 5 % is red. Where that is meant, or where a kernel became quicker, write its new figure here, and read the
table of large geometries anew (`python -m benchmarks.tpu_schedules`). A new libtpu has new figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import pytest

from benchmarks.parts.tpu_kernels import KERNELS, Geometry, compile_kernel
from penstock.tools.plan.schedules import compiled_schedules
from tests.support.needs import needs_libtpu
from tests.support.patience import slow

pytestmark = [
    pytest.mark.versions,
    needs_libtpu,
]

TOPOLOGY = "v6e:2x2"
GEOMETRIES: dict[str, tuple[Geometry, int | str]] = {
    "decode attention": ({"heads": 4, "kv_heads": 1, "head_dim": 128, "kv": "bfloat16"}, 1000),
    "quantized matmul": ({"form": "fp8 of rows", "out": 256, "in": 1024}, 16),
    "draw": ({"rows": 8, "vocab": 4096}, "filtered"),
    "prefill attention": ({"heads": 4, "kv_heads": 1, "head_dim": 128, "kv": "bfloat16"}, 1536),
    "experts": ({"form": "mxfp4", "out": 256, "in": 512}, 16),
    "adjust": ({"rows": 8, "vocab": 8192}, "anything"),
    "delta rule": ({"key_heads": 2, "value_heads": 4, "head_dim": 128}, 64),
}
CYCLES: dict[str, dict[str, float]] = {
    "0.0.42.1": {
        "decode attention": 992,
        "quantized matmul": 168,
        "draw": 5970,
        "prefill attention": 18607,
        "experts": 141,
        "adjust": 3233,
        "delta rule": 1099.5,
    },
    "0.0.50.1": {
        "decode attention": 995,
        "quantized matmul": 167,
        "draw": 6061,
        "prefill attention": 18295,
        "experts": 141,
        "adjust": 3115,
        "delta rule": 1099.7,
    },
}


def compile_several(kinds: Sequence[str]) -> None:
    for kind in kinds:
        geometry, point = GEOMETRIES[kind]
        compile_kernel(kind, TOPOLOGY, geometry, [point])


@pytest.mark.parametrize(
    "kinds",
    [
        ("decode attention", "quantized matmul", "draw"),
        slow(("prefill attention", "experts", "adjust", "delta rule")),
    ],
)
def test_kernels_take_no_more_cycles_than_they_did(kinds: Sequence[str]) -> None:
    held = CYCLES.get(version("libtpu"))
    assert held is not None, f"libtpu {version('libtpu')} has no figures here yet"
    schedules = {schedule.name: schedule for schedule in compiled_schedules(compile_several, kinds)}
    now = {kind: KERNELS[kind].cycles(*GEOMETRIES[kind], schedules[KERNELS[kind].name]) for kind in kinds}
    more = {kind: (held[kind], cycles) for kind, cycles in now.items() if cycles > 1.05 * held[kind]}
    assert not more, f"cycles before and now: {more}"
