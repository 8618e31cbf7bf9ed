"""Calls `block.cc`, which computes any number of halves of layers in one call, by the tables of `layout.h`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax

from penstock.engine.errors import KernelLayoutError
from penstock.engine.kernels.cpu.layout import ANY, BATCH_ROWS, F32, FLOAT, GROUPS, HALVES, INTEGER, S32, Table, rows

_NORMS = rows("operand", F32, "norm_before", "norm_after")
FEED_FORWARD = Table(
    "FeedForward",
    (
        *rows("operand", ANY, "source"), *rows("operand", S32, "num_rows"), *_NORMS,
        *rows("group", "Linear", "gate_up", "down"),
    ),
)  # fmt: skip
ATTENTION_HALF = Table(
    "Attention",
    (
        *rows("cache", ANY, "keys", "values"), *rows("cache", F32, "key_scales", "value_scales"), *BATCH_ROWS, *_NORMS,
        *rows("group", "Linear", "qkv", "out"),
        *rows("operand", F32, "q_norm", "k_norm", "cos", "sin", "query_scales", "sinks"),
    ),
)  # fmt: skip
SHORT_CONV = Table(
    "ShortConv",
    (
        *rows("cache", ANY, "kept"), *rows("group", "States", "states"), *_NORMS,
        *rows("group", "Linear", "joined", "out"), *rows("operand", F32, "taps", "taps_bias"),
    ),
)  # fmt: skip
DELTA_NET = Table(
    "DeltaNet",
    (
        *rows("cache", ANY, "q_kept", "k_kept", "v_kept"), *rows("cache", F32, "matrices"),
        *rows("group", "States", "states"), *_NORMS, *rows("group", "Linear", "joined", "rates", "out"),
        *rows("operand", F32, "q_taps", "k_taps", "v_taps", "exponents", "dt_bias", "norm"),
    ),
)  # fmt: skip
HALF_KINDS = (FEED_FORWARD, ATTENTION_HALF, SHORT_CONV, DELTA_NET)
"""The halves of layers, by their number `kind`."""

HALF_INTEGERS = Table(
    "HalfIntegers",
    rows(
        "number", INTEGER,
        "kind", "is_layer_norm", "columns", "gate", "first_offset", "first_reads_bytes", "last_offset",
        "last_reads_bytes", "rates_offset", "rates_reads_bytes", "num_heads", "head_dim", "is_qk_layer_norm",
        "is_interleaved", "window", "has_gate",
    ),
)  # fmt: skip
HALF_FLOATS = Table("HalfFloats", rows("number", FLOAT, "eps", "residual_scale", "head_eps", "scale", "soft_cap"))

HALF_TABLES = (*HALF_KINDS, *GROUPS.values(), HALF_INTEGERS, HALF_FLOATS)


class Half(NamedTuple):
    """Half of a block, as the kernel takes it."""

    kind: Table
    arrays: Mapping[str, Any]
    numbers: Mapping[str, float]


def run_halves(x: jax.Array, halves: Sequence[Half]) -> tuple[jax.Array, list[tuple[jax.Array, ...]]]:
    """Runs the halves on the residual stream `x`. Returns it, and the pages or states of the halves that have any.

    Raises:
        KernelLayoutError: something of a half is missing or not declared, or an array has another type.
    """
    operands, results, aliases, num_caches = [x], [jax.typeof(x)], {0: 0}, []
    for half in halves:
        arrays, first = half.kind.arrays(half.arrays), len(results)
        for place, row in enumerate(half.kind.having("cache"), len(operands)):  # caches are first
            if half.arrays[row.name].size:
                aliases[place] = len(results)
                results.append(jax.typeof(half.arrays[row.name]))
        num_caches.append(len(results) - first)
        operands += arrays
    call = jax.ffi.ffi_call(HALVES.target, results, input_output_aliases=aliases)
    integers, floats = zip(*(_numbers(half) for half in halves), strict=True)
    x, *changed = call(*operands, **HALVES.attributes({"integers": integers, "floats": floats}))
    updated = iter(changed)
    return x, [tuple(islice(updated, count)) for count in num_caches if count]


def _numbers(half: Half) -> tuple[list[float], list[float]]:
    """Returns the integers and the floats of a half in order; what is not given is 0.

    Raises:
        KernelLayoutError: a name is not declared.
    """
    given = {**half.numbers, "kind": HALF_KINDS.index(half.kind)}
    for name in sorted(given.keys() - {row.name for row in (*HALF_INTEGERS.rows, *HALF_FLOATS.rows)}):
        raise KernelLayoutError(f"{half.kind.name}: the number {name!r} is not declared")
    integers, floats = ([given.get(row.name, 0) for row in table.rows] for table in (HALF_INTEGERS, HALF_FLOATS))
    return integers, floats
