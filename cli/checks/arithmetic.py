"""Checks which arithmetic a worker here would use, and measures its cost against the other one."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from penstock.cli.checks import Finding
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import native_build_dir
from penstock.engine.kernels.cpu import NativeLibrary, is_ready
from penstock.engine.models.cpu.timing import is_xla_quicker, matmul_times_s, shares_of_xla

SHAPE = (1024, 1024)  # of the weights that are multiplied by
ROWS = (1, 64)  # of one stream, and of a batch
_SLOWER = 1.2  # times of the other arithmetic from which it is worth a look: less may be the machine's noise


def check_arithmetic(config: EngineConfig) -> Finding:
    """Times C++ and XLA in turn where the kernels are there. Elsewhere it reports that the price is unknown."""
    try:
        platform = jax.devices()[0].platform
    except RuntimeError:
        return Finding("arithmetic", "warn", "unknown without a device", "see what is said of the devices")
    if platform != "cpu":
        return Finding(
            "arithmetic", "ok", f"that of XLA and Pallas on {platform}; its price against others is not measured"
        )
    build_dir = native_build_dir(config.compile_cache_dir)
    if not is_ready(build_dir):
        detail = (
            "C++'s where it can be built, else XLA's; which one is quicker here is unknown until the kernels are built"
        )
        return Finding("arithmetic", "ok", detail, "start a worker once, which builds them, and look again")
    native = NativeLibrary(build_dir)
    library = native.load_for("matmul", "auto")
    if library is None:
        return Finding("arithmetic", "warn", f"XLA's: {native.missing}", "see what is said of the compiler")
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    times_s = matmul_times_s(library, dtype, ROWS, SHAPE)
    is_timed = not config.same_tokens and config.matmul == "auto"
    return _compared(times_s, dtype, native.instructions or "", is_timed=is_timed)


def _compared(times_s: Mapping[int, tuple[float, float]], dtype: str, instructions: str, *, is_timed: bool) -> Finding:
    ratios = shares_of_xla(times_s)
    shown = " and ".join(f"{ratio:.2f} for {rows}" for rows, ratio in ratios.items())
    detail = (
        f"C++'s (bf16 by {instructions}); a matmul in {dtype} takes this share of XLA's time, by rows: {shown}. "
        "Other instructions are not measured"
    )
    if is_timed:
        quicker = "XLA's" if is_xla_quicker(times_s) else "C++'s"
        detail += f". With same_tokens off a start takes the quicker one by such times, which here is {quicker}"
    elif max(ratios.values()) >= _SLOWER:
        fix = "--matmul xla, or --same-tokens off, is an arithmetic of its own: compare whole requests first"
        return Finding("arithmetic", "ok", detail, fix)
    return Finding("arithmetic", "ok", detail)
