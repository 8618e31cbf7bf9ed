"""Times the matmuls of the CPU's kernels against XLA's."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.cpu.panels import joined
from penstock.engine.models.layers.linear import Linear

_ROUNDS = 30
_ENOUGH_S = 0.2  # for one number of rows, after at least two rounds: slow ones need fewer rounds to compare
_WORTHWHILE = 0.9  # of C++'s time: kernels of whole layers save calls that one matmul does not show


def matmul_times_s(
    library: ctypes.CDLL, dtype: str, rows: Sequence[int], shape: tuple[int, int]
) -> dict[int, tuple[float, float]]:
    """Returns, by number of rows, the least seconds of a matmul in C++ and in XLA, which are measured in turn.

    Args:
        library: the C++ kernels.
        dtype: of weights and activations.
        rows: numbers of rows to measure.
        shape: features in and out.
    """
    plain = Linear.plain(*shape, bias=False, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    forms = _callable(joined(library, plain)), _callable(plain)
    found = {}
    for count in rows:
        x = jax.random.normal(jax.random.key(1), (count, shape[0]), dtype)
        for form in forms:
            _seconds(form, x)  # compiles
        rounds: list[tuple[float, ...]] = []
        while len(rounds) < 2 or (len(rounds) < _ROUNDS and sum(map(sum, rounds)) < _ENOUGH_S):
            rounds.append(tuple(_seconds(form, x) for form in forms))
        ours_s, other_s = zip(*rounds, strict=True)
        found[count] = min(ours_s), min(other_s)
    return found


def shares_of_xla(times_s: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """Returns by rows the time in C++ over that in XLA."""
    return {rows: ours_s / other_s for rows, (ours_s, other_s) in times_s.items()}


def is_xla_quicker(times_s: Mapping[int, tuple[float, float]]) -> bool:
    """Tells whether XLA's matmuls are worth taking: by the geometric mean over the numbers of rows."""
    return 1 / statistics.geometric_mean(shares_of_xla(times_s).values()) < _WORTHWHILE


def _callable(linear: Linear) -> Callable[[jax.Array], jax.Array]:
    """Compiles a matmul whose weights are arguments: XLA prepares constants while it compiles."""
    definition, arrays = nnx.split(linear)
    run = jax.jit(lambda arrays, x: nnx.merge(definition, arrays)(x))
    return lambda x: run(arrays, x)


def _seconds(form: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    start_s = time.perf_counter()
    form(x).block_until_ready()
    return time.perf_counter() - start_s
