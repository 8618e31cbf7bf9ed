"""Checks by which arithmetic a worker here would multiply, and measures what that costs against the other one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from flax import nnx

from penstock.cli.checks import Finding
from penstock.engine.deployment.deployment import native_build_dir
from penstock.engine.kernels.cpu import NativeLibrary, is_ready, panel_width
from penstock.engine.models.cpu.panels import joined
from penstock.engine.models.layers.linear import Linear

FEATURES = 1024  # in and out, of the weights that are multiplied by
ROWS = (1, 64)  # of one stream, and of a batch
_ROUNDS = 30
_SLOWER = 1.2  # times of the other arithmetic from which it is worth a look: less may be the machine's noise


def check_arithmetic(dtype: str, compile_cache_dir: Path | None) -> Finding:
    """Times C++ and XLA in turn where the kernels are there. Elsewhere the price is unknown, and is said to be."""
    try:
        platform = jax.devices()[0].platform
    except RuntimeError:
        return Finding("arithmetic", "warn", "unknown without a device", "see what is said of the devices")
    if platform != "cpu":
        return Finding(
            "arithmetic", "ok", f"that of XLA and Pallas on {platform}; its price against others is not measured"
        )
    build_dir = native_build_dir(compile_cache_dir)
    if not is_ready(build_dir):
        detail = (
            "C++'s where it can be built, else XLA's; which one is quicker here is unknown until the kernels are built"
        )
        return Finding("arithmetic", "ok", detail, "start a worker once, which builds them, and look again")
    native = NativeLibrary(build_dir)
    library = native.load_for("matmul", "auto")
    if library is None:
        return Finding("arithmetic", "warn", f"XLA's: {native.missing}", "see what is said of the compiler")
    dtype = "bfloat16" if dtype == "auto" else dtype
    return _compared(matmul_times_s(panel_width(library), dtype), dtype, native.instructions or "")


def _compared(times_s: Mapping[int, tuple[float, float]], dtype: str, instructions: str) -> Finding:
    ratios = {rows: ours_s / other_s for rows, (ours_s, other_s) in times_s.items()}
    shown = " and ".join(f"{ratio:.2f} for {rows}" for rows, ratio in ratios.items())
    detail = (
        f"C++'s (bf16 by {instructions}); a matmul in {dtype} takes this share of XLA's time, by rows: {shown}. "
        "Other instructions are not measured"
    )
    if max(ratios.values()) < _SLOWER:
        return Finding("arithmetic", "ok", detail)
    return Finding("arithmetic", "ok", detail, "--matmul xla is an arithmetic of its own: compare whole requests first")


def matmul_times_s(width: int, dtype: str) -> dict[int, tuple[float, float]]:
    """Returns by rows the least seconds of a matmul in C++, with panels of this width, and in XLA, measured in turn."""
    plain = Linear.plain(FEATURES, FEATURES, bias=False, dtype=jax.numpy.dtype(dtype), rngs=nnx.Rngs(0))
    forms: tuple[Callable[[jax.Array], jax.Array], ...] = (jax.jit(joined(width, plain)), jax.jit(plain))
    found = {}
    for rows in ROWS:
        x = jax.random.normal(jax.random.key(1), (rows, FEATURES), dtype)
        rounds = [tuple(_seconds(form, x) for form in forms) for _ in range(1 + _ROUNDS)]
        ours_s, other_s = zip(*rounds[1:], strict=True)  # the first compiles
        found[rows] = min(ours_s), min(other_s)
    return found


def _seconds(form: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    start_s = time.perf_counter()
    form(x).block_until_ready()
    return time.perf_counter() - start_s
