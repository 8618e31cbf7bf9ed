"""Sums over lanes inside a kernel, associated as in a parallel prefix sum.

These are sums of aligned powers of two, the large ones first (Blelloch, Prefix Sums and Their Applications,
CMU-CS-90-190).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128


def sums_of(registers: Sequence[jax.Array]) -> jax.Array:
    """Returns the sums over lanes of n arrays `[rows, LANES]`: lane i has the sum of array number i modulo n.

    n is a power of two. Each step adds neighbouring lanes and merges two arrays into one, in which every other block of
    lanes comes from the second.
    """
    size, held = 1, list(registers)
    lane = lax.broadcasted_iota(jnp.int32, held[0].shape, 1)
    while len(held) > 1:
        is_first = lane & size == 0
        held = [
            jnp.where(is_first, a, pltpu.roll(b, size, axis=1))
            + jnp.where(is_first, pltpu.roll(a, LANES - size, axis=1), b)
            for a, b in zip(held[::2], held[1::2], strict=True)
        ]
        size *= 2
    while size < LANES:
        held, size = [held[0] + _neighbours(held[0], size)], 2 * size
    return held[0]


def _neighbours(x: jax.Array, size: int) -> jax.Array:
    """Swaps each block of `size` lanes with the other one of its pair."""
    is_first = lax.broadcasted_iota(jnp.int32, x.shape, 1) & size == 0
    return jnp.where(is_first, pltpu.roll(x, LANES - size, axis=1), pltpu.roll(x, size, axis=1))


def prefix_lanes(x: jax.Array, before: jax.Array, end: jax.Array) -> jax.Array:
    """Returns the prefix sums of `[rows, LANES]` after a sum `before`; the last is `end`, from a larger block."""
    levels = [x]  # in each lane, the sum of its aligned block of 1, 2, 4 and so on
    for size in (1 << k for k in range(LANES.bit_length() - 1)):
        levels.append(levels[-1] + _neighbours(levels[-1], size))
    count = lax.broadcasted_iota(jnp.int32, x.shape, 1) + 1
    total = jnp.broadcast_to(before, x.shape)
    for k in reversed(range(len(levels) - 1)):
        size = 1 << k
        # The last block of this size within `count` lanes precedes the lane's own block if smaller ones follow.
        is_own = count & (size - 1) == 0
        block = jnp.where(is_own, levels[k], pltpu.roll(levels[k], size, axis=1))
        total = jnp.where(count & size != 0, total + block, total)
    return jnp.where(count == LANES, jnp.broadcast_to(end, x.shape), total)


def prefix_sums(sums: list[jax.Array]) -> list[jax.Array]:
    """Returns inclusive prefix sums of whole arrays, associated in the same way."""
    blocks = {(0, i): x for i, x in enumerate(sums)}
    size = 1
    while 1 << size <= len(sums):
        for i in range(len(sums) >> size):
            blocks[size, i] = blocks[size - 1, 2 * i] + blocks[size - 1, 2 * i + 1]
        size += 1
    found = []
    for count in range(1, len(sums) + 1):
        parts = [blocks[k, (count >> k) - 1] for k in reversed(range(size)) if count >> k & 1]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        found.append(total)
    return found
