"""Sampling for TPU: one kernel that reads each row of logits once and does everything else in VMEM.

As XLA operations, two bisections and a cumulative sum would read the logits from HBM about seventy times. A block is
the rows of a tile with their whole vocabulary. The sums behind a draw are associated as in a parallel prefix sum
(Blelloch, Prefix Sums and Their Applications, CMU-CS-90-190): sums of aligned powers of two, the large ones first. So
they do not depend on how many devices the vocabulary was split over. They differ from the XLA form's sums by rounding,
and so does a token if its random number falls into that difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.execution.sampling.sampling_rows import (
    NEVER,
    NOT_A_TOKEN,
    NOTHING_LEFT,
    SamplingRows,
    ordered_to_float,
    uniforms,
)
from penstock.engine.kernels.pallas import Ref

LANES = 128
_VMEM_BYTES = 56 * 2**20  # of 64 MiB on TPU7x and 128 MiB before it
_MINUS_INFINITY, _PLUS_INFINITY = 0x007FFFFF, 0xFF800000  # in the order of `ordered_to_float`
_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _UNIFORM, _NUM_PARAMETERS = range(6)  # lanes of a row's parameters

_Masses = Callable[[jax.Array], jax.Array]


def draw(
    logits: jax.Array,
    rows: SamplingRows,
    vocab_size: int,
    *,
    block_rows: int = 8,  # rows of a tile
    strip: int = 2048,  # lanes processed at once; LANES times a power of two below LANES
    interpret: Any = False,  # as of pallas_call
) -> jax.Array:
    """Samples each row as `sampling.sample` does, i32 `[num_rows]`.

    `logits` are f32 `[num_shares, num_rows, share]`: consecutive shares of the vocabulary. Everything from `vocab_size`
    on is padding.
    """
    num_shares, num_rows, share = logits.shape
    if share % LANES:
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, -share % LANES)))
    width = -(-(num_shares * share + LANES) // strip) * strip
    num_chunks = -(-width // (LANES * LANES)) * LANES
    block = min(block_rows, num_rows)
    passes = 2 * 34 + 8  # over a block in VMEM
    drawn = pl.pallas_call(
        partial(_kernel, vocab_size=vocab_size, share=share, strip=strip),
        grid=(pl.cdiv(num_rows, block),),
        in_specs=[
            pl.BlockSpec((num_shares, block, logits.shape[2]), lambda i: (0, i, 0)),
            pl.BlockSpec((block, LANES), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((block, LANES), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((num_rows, LANES), jnp.int32),
        scratch_shapes=[pltpu.VMEM((block, n), jnp.float32) for n in (width, width, num_chunks, num_chunks)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES, dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=3 * passes * logits.size,
            transcendentals=2 * logits.size,
            bytes_accessed=4 * logits.size + 2 * 4 * num_rows * LANES,
        ),
        interpret=interpret,
        name="draw_tokens",
    )(logits, _parameters(rows))
    tokens: jax.Array = drawn[:, 0]
    return tokens


def _parameters(rows: SamplingRows) -> jax.Array:
    """Packs the parameters as f32 `[num_rows, LANES]`. A top_k that f32 rounds, above 2**24, exceeds any vocabulary."""
    columns = (rows.temperature, rows.top_p, rows.min_p, rows.top_k.astype(jnp.float32), uniforms(rows))
    return jnp.pad(jnp.stack(columns, axis=1), ((0, 0), (0, LANES - _NUM_PARAMETERS)))


def _kernel(
    logits: Ref,  # [num_shares, rows, share]
    parameters: Ref,  # [rows, LANES]
    out: Ref,  # i32 [rows, LANES]
    scaled: Ref,  # [rows, width]: logits over temperature, NEVER for filtered tokens
    weights: Ref,  # [rows, width]
    sums: Ref,  # [rows, chunks]: of the weights of each LANES tokens
    prefixes: Ref,  # [rows, chunks]: inclusive prefix sums of the sums
    *,
    vocab_size: int,
    share: int,  # tokens per share, without the last register's padding
    strip: int,
) -> None:
    work = _Block(scaled, weights, sums, prefixes, strip)

    def of(lane: int) -> jax.Array:
        column: jax.Array = parameters[:, lane : lane + 1]
        return column

    is_drawn = of(_TEMPERATURE) > 0
    raw_top, greedy, is_sound = work.take(logits, jnp.where(is_drawn, of(_TEMPERATURE), 1.0), vocab_size, share)

    def put(tokens: jax.Array) -> None:
        token = jnp.where(is_sound, jnp.where(raw_top > NEVER, tokens, NOTHING_LEFT), NOT_A_TOKEN)
        out[...] = jnp.broadcast_to(token, out.shape)

    put(greedy)

    @pl.when(jnp.max(is_drawn.astype(jnp.float32)) > 0)  # rows behind the last may be anything
    def _() -> None:
        work.keep_top_k(of(_TOP_K), vocab_size)
        top = work.weigh()
        work.keep_mass(of(_TOP_P), of(_MIN_P), top)
        work.add_up()
        put(jnp.where(is_drawn, work.first_past(of(_UNIFORM), greedy), greedy))


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows in VMEM. A column is an array `[rows, 1]`."""

    scaled: Ref
    weights: Ref
    sums: Ref
    prefixes: Ref
    strip: int

    @property
    def num_rows(self) -> int:
        return int(self.scaled.shape[0])

    def take(
        self, logits: Ref, temperature: jax.Array, vocab_size: int, share: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Loads the logits; returns the columns of their maximum, its first index, and whether all are sound.

        Tokens lie next to each other without gaps, so a share may begin within a register: it is rotated there.
        """
        shape = (self.num_rows, LANES)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)
        none = jnp.full(shape, NEVER)
        self._each_strip(lambda lanes: self._put(lanes, none))
        found: tuple[jax.Array, ...] = jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

        def take(source: int, start: Any, size: int, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Loads `size` lanes of a share from `start` on; the last of `found` is the previous register, rotated."""
            top, place, broken, before = found
            shift = source * share % LANES
            for first in range(0, size, LANES):
                x = logits[source, :, pl.ds(_aligned(start + first), LANES)]
                inside = start + first + lane
                token = source * share + inside
                is_real = (inside < share) & (token < vocab_size)
                broken = jnp.where(is_real & ~(x < jnp.inf), 1.0, broken)
                x = jnp.where(is_real, x, -jnp.inf)
                is_higher = x > top
                top, place = jnp.where(is_higher, x, top), jnp.where(is_higher, token, place)
                x = jnp.where(is_real, x / temperature, NEVER)
                if shift:
                    rotated = pltpu.roll(x, shift, axis=1)
                    x, before = jnp.where(lane < shift, before, rotated), rotated
                self._put(pl.ds(_aligned(source * share - shift + start + first), LANES), x)
            return top, place, broken, before

        width = logits.shape[2]
        for source in range(logits.shape[0]):
            begin, shift = source * share // LANES * LANES, source * share % LANES
            whole = width // self.strip

            def take_strip(i: Any, found: tuple[jax.Array, ...], source: int = source) -> tuple[jax.Array, ...]:
                return take(source, i * self.strip, self.strip, found)

            found = lax.fori_loop(0, whole, take_strip, (*found[:3], self.scaled[:, begin : begin + LANES]))
            found = take(source, whole * self.strip, width % self.strip, found)
            if shift:  # lanes rotated out of the last register
                after = begin + width
                if after < self.scaled.shape[1]:
                    self.scaled[:, after : after + LANES] = jnp.where(lane < shift, found[3], NEVER)
        top, place, broken = found[:3]
        highest = jnp.max(top, axis=1, keepdims=True)
        # f32 has all of a vocabulary's integers exactly, and not every TPU can reduce integers.
        first = jnp.where(top == highest, place.astype(jnp.float32), float(vocab_size))
        greedy = jnp.min(first, axis=1, keepdims=True).astype(jnp.int32)
        return highest, jnp.minimum(greedy, vocab_size - 1), jnp.max(broken, axis=1, keepdims=True) == 0

    def _put(self, lanes: Any, logits: jax.Array) -> None:
        self.scaled[:, lanes] = logits

    def keep_top_k(self, top_k: jax.Array, vocab_size: int) -> None:
        """Sets logits below the `top_k` highest to NEVER; 0 keeps all."""
        is_asked = (top_k > 0) & (top_k < vocab_size)

        @pl.when(jnp.max(is_asked.astype(jnp.float32)) > 0)
        def _() -> None:
            wanted = jnp.where(is_asked, top_k, 1.0)  # f32 has these counts exactly

            def count(threshold: jax.Array) -> jax.Array:
                return self._total(lambda lanes: jnp.where(self.scaled[:, lanes] >= threshold, 1.0, 0.0))

            least = self._highest(lambda threshold: count(threshold) >= wanted)
            self._keep(jnp.where(is_asked, least, -jnp.inf))

    def weigh(self) -> jax.Array:
        """Turns logits into weights; returns the column of the highest logit."""
        top = self._reduced(jnp.maximum, jnp.max, -jnp.inf, lambda lanes: self.scaled[:, lanes])

        def weigh(lanes: Any) -> None:
            self.weights[:, lanes] = jnp.exp(self.scaled[:, lanes] - top)

        self._each_strip(weigh)
        return top

    def keep_mass(self, top_p: jax.Array, min_p: jax.Array, top: jax.Array) -> None:
        """Sets the weight to 0 for tokens that top_p and then min_p leave out."""
        is_asked = (top_p < 1.0) | (min_p > 0.0)

        @pl.when(jnp.max(is_asked.astype(jnp.float32)) > 0)
        def _() -> None:
            wanted = top_p * self._total(lambda lanes: self.weights[:, lanes])

            def mass(threshold: jax.Array) -> jax.Array:
                return self._total(
                    lambda lanes: jnp.where(self.scaled[:, lanes] >= threshold, self.weights[:, lanes], 0.0)
                )

            # A top_p that f32 rounds to 0 wants no mass at all, and still keeps the most likely token.
            least = jnp.minimum(self._highest(lambda threshold: mass(threshold) >= wanted), top)
            least = jnp.where(top_p >= 1.0, -jnp.inf, least)
            least = jnp.maximum(least, top + jnp.log(min_p))  # minus infinity where min_p is 0

            def keep(lanes: Any) -> None:
                kept = self.scaled[:, lanes] >= least
                self.weights[:, lanes] = jnp.where(kept, self.weights[:, lanes], 0.0)

            self._each_strip(keep)

    def add_up(self) -> None:
        """Computes the sum of each chunk of LANES weights, and the prefix sums of these sums."""
        self.sums[...] = jnp.zeros_like(self.sums)
        lane = lax.broadcasted_iota(jnp.int32, (self.num_rows, LANES), 1)
        per_strip = self.strip // LANES  # a power of two below LANES: a strip's chunks lie in one register of sums

        def add(i: Any, _: None) -> None:
            register = pl.ds(_aligned(i * per_strip & -LANES), LANES)
            found = self.sums[:, register]
            for j in range(per_strip):
                x = self.weights[:, pl.ds(_aligned(i * self.strip + j * LANES), LANES)]
                found = jnp.where(lane == i * per_strip + j & LANES - 1, _sum(x), found)
            self.sums[:, register] = found

        lax.fori_loop(0, self.weights.shape[1] // self.strip, add, None)
        num_registers = self.sums.shape[1] // LANES
        held = [self.sums[:, i * LANES : (i + 1) * LANES] for i in range(num_registers)]
        ends = _prefixes([_sum(x) for x in held])
        for i, x in enumerate(held):
            before = ends[i - 1] if i else jnp.zeros_like(ends[0])
            self.prefixes[:, i * LANES : (i + 1) * LANES] = _prefix_lanes(x, before, ends[i])

    def first_past(self, uniform: jax.Array, otherwise: jax.Array) -> jax.Array:
        """Returns the column of the first weighted token whose prefix sum exceeds `uniform` of the total, or
        `otherwise`.
        """
        sums, prefixes = self.sums[...], self.prefixes[...]
        place = lax.broadcasted_iota(jnp.int32, sums.shape, 1).astype(jnp.float32)
        end = float(sums.shape[1])
        target = uniform * _value_at(prefixes, place, end - 1)
        chunk = jnp.min(jnp.where((prefixes > target) & (sums > 0), place, end), axis=1, keepdims=True)
        after = jnp.sum(jnp.where(place == chunk, prefixes, 0.0), axis=1, keepdims=True)
        before = jnp.sum(jnp.where(place == chunk - 1, prefixes, 0.0), axis=1, keepdims=True)
        weights = self._chunk(chunk.astype(jnp.int32))
        lane = lax.broadcasted_iota(jnp.int32, weights.shape, 1).astype(jnp.float32)
        is_past = (_prefix_lanes(weights, before, after) > target) & (weights > 0)
        first = jnp.min(jnp.where(is_past, lane, float(LANES)), axis=1, keepdims=True)
        # The prefix sums within the chunk round differently from its own sum, so they may all fall short of it.
        last = jnp.max(jnp.where(weights > 0, lane, 0.0), axis=1, keepdims=True)
        token = chunk * LANES + jnp.where(first < LANES, first, last)
        return jnp.where(chunk < end, token.astype(jnp.int32), otherwise)

    def _chunk(self, chunk: jax.Array) -> jax.Array:
        """Returns the weights of one chunk for each row, [rows, LANES]."""

        def pick(i: Any, found: jax.Array) -> jax.Array:
            for j in range(self.strip // LANES):
                x = self.weights[:, pl.ds(_aligned(i * self.strip + j * LANES), LANES)]
                found = jnp.where(chunk == i * (self.strip // LANES) + j, x, found)
            return found

        none = jnp.zeros((self.num_rows, LANES), jnp.float32)
        picked: jax.Array = lax.fori_loop(0, self.weights.shape[1] // self.strip, pick, none)
        return picked

    def _keep(self, least: jax.Array) -> None:
        def keep(lanes: Any) -> None:
            self.scaled[:, lanes] = jnp.where(self.scaled[:, lanes] >= least, self.scaled[:, lanes], NEVER)

        self._each_strip(keep)

    def _highest(self, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Returns the column of the highest thresholds for which `holds`, like `sampling._highest`."""

        def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = low + lax.shift_right_logical(high - low, jnp.uint32(1))
            ok = holds(ordered_to_float(middle))
            return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

        shape = (self.num_rows, 1)
        bounds = jnp.full(shape, _MINUS_INFINITY, jnp.uint32), jnp.full(shape, _PLUS_INFINITY, jnp.uint32)
        low, _ = lax.fori_loop(0, 32, halve, bounds)
        return ordered_to_float(low)

    def _total(self, of_lanes: _Masses) -> jax.Array:
        return self._reduced(jnp.add, jnp.sum, 0.0, of_lanes)

    def _reduced(self, join: Any, reduce: Any, start: float, of_lanes: Any) -> jax.Array:
        """Reduces register by register, and then over the lanes, to a column."""

        def step(i: Any, found: jax.Array) -> jax.Array:
            for j in range(self.strip // LANES):
                found = join(found, of_lanes(pl.ds(_aligned(i * self.strip + j * LANES), LANES)))
            return found

        first = jnp.full((self.num_rows, LANES), start, jnp.float32)
        found = lax.fori_loop(0, self.scaled.shape[1] // self.strip, step, first)
        reduced: jax.Array = reduce(found, axis=1, keepdims=True)
        return reduced

    def _each_strip(self, work: Callable[[Any], None]) -> None:
        def strip(i: Any, _: None) -> None:
            for j in range(self.strip // LANES):
                work(pl.ds(_aligned(i * self.strip + j * LANES), LANES))

        lax.fori_loop(0, self.scaled.shape[1] // self.strip, strip, None)


def _aligned(lane: Any) -> Any:
    return lane if isinstance(lane, int) else pl.multiple_of(lane, LANES)


def _sum(x: jax.Array) -> jax.Array:
    """Returns the column of sums over the lanes, associated as in `_tree`."""
    for size in (1 << k for k in range(LANES.bit_length() - 1)):
        x = x + pltpu.roll(x, LANES - size, axis=1)  # correct in the lanes that are multiples of twice the size
    return x[:, :1]


def _tree(x: jax.Array) -> list[jax.Array]:
    """Returns for each k up to 7, in each lane of `[rows, LANES]`, the sum of its aligned block of 2**k lanes."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    levels = [x]
    for size in (1 << k for k in range(LANES.bit_length() - 1)):
        x = levels[-1]
        other = jnp.where(lane & size == 0, pltpu.roll(x, LANES - size, axis=1), pltpu.roll(x, size, axis=1))
        levels.append(x + other)
    return levels


def _prefix_lanes(x: jax.Array, before: jax.Array, end: jax.Array) -> jax.Array:
    """Returns the prefix sums of `[rows, LANES]` after a sum `before`; the last is `end`, from a larger block."""
    levels = _tree(x)
    count = lax.broadcasted_iota(jnp.int32, x.shape, 1) + 1
    total = jnp.broadcast_to(before, x.shape)
    for k in reversed(range(len(levels) - 1)):
        size = 1 << k
        # The last block of this size within `count` lanes precedes the lane's own block if smaller ones follow.
        is_own = count & (size - 1) == 0
        block = jnp.where(is_own, levels[k], pltpu.roll(levels[k], size, axis=1))
        total = jnp.where(count & size != 0, total + block, total)
    return jnp.where(count == LANES, jnp.broadcast_to(end, x.shape), total)


def _prefixes(sums: list[jax.Array]) -> list[jax.Array]:
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


def _value_at(x: jax.Array, place: jax.Array, wanted: float) -> jax.Array:
    return jnp.sum(jnp.where(place == wanted, x, 0.0), axis=1, keepdims=True)
