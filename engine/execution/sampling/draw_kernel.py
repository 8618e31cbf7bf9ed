"""Sampling for TPU: one kernel that reads each row of logits once and does everything else in VMEM.

As XLA operations, two bisections and a cumulative sum would read the logits from HBM about seventy times. A block is
the rows of a tile with their whole vocabulary. The sums behind a draw are associated as in a parallel prefix sum, so
they do not depend on how many devices the vocabulary was split over. They differ from the XLA form's sums by rounding,
and so does a token if its random number falls into that difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.execution.sampling.draw_filters import (
    Filters,
    Tokens,
    aligned,
    few_of_a_strip,
    lanes_of,
    maxima_of,
    registers_of,
)
from penstock.engine.execution.sampling.prefix_sums import LANES, prefix_lanes, prefix_sums, sums_of
from penstock.engine.execution.sampling_rows import (
    NEVER,
    NOT_A_TOKEN,
    NOTHING_LEFT,
    PARAMETERS,
    DrawParameters,
    SamplingRows,
    uniforms,
)
from penstock.engine.kernels.pallas import Ref
from penstock.engine.kernels.tpu.vmem import VMEM_BYTES

_FLOPS = 50  # for each logit, if rows have filters
_UNIFORM = len(PARAMETERS)  # the lane after those of a row's parameters


def draw(
    logits: jax.Array,
    rows: SamplingRows,
    vocab_size: int,
    *,
    block_rows: int = 8,  # rows of a tile
    strip: int = 4096,  # lanes processed at once; LANES times a power of two below LANES
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
    few = -(-width // strip * few_of_a_strip(strip) // strip) * strip
    num_chunks = -(-width // (LANES * LANES)) * LANES
    block = min(block_rows, num_rows)
    drawn = pl.pallas_call(
        partial(_kernel, vocab_size=vocab_size, share=share, strip=strip),
        grid=(pl.cdiv(num_rows, block),),
        in_specs=[
            pl.BlockSpec((num_shares, block, logits.shape[2]), lambda i: (0, i, 0)),
            pl.BlockSpec((block, LANES), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((block, LANES), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((num_rows, LANES), jnp.int32),
        scratch_shapes=[pltpu.VMEM((block, n), jnp.float32) for n in (width, width, few, few, num_chunks, num_chunks)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=_FLOPS * logits.size,
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
    columns = *(getattr(rows, name).astype(jnp.float32) for name in PARAMETERS), uniforms(rows)
    return jnp.pad(jnp.stack(columns, axis=1), ((0, 0), (0, LANES - len(columns))))


def _kernel(
    logits: Ref,  # [num_shares, rows, share]
    parameters: Ref,  # [rows, LANES]
    out: Ref,  # i32 [rows, LANES]
    scaled: Ref,  # [rows, width]: logits over temperature, NEVER for padding
    weights: Ref,  # [rows, width]
    few_scaled: Ref,  # [rows, few]: candidates of the filters
    few_weights: Ref,
    sums: Ref,  # [rows, chunks]: of the weights of each LANES tokens
    prefixes: Ref,  # [rows, chunks]: inclusive prefix sums of the sums
    *,
    vocab_size: int,
    share: int,  # tokens per share, without the last register's padding
    strip: int,
) -> None:
    work = _Block(Tokens(scaled, weights, strip), Tokens(few_scaled, few_weights, strip), sums, prefixes)

    def of(lane: int) -> jax.Array:
        column: jax.Array = parameters[:, lane : lane + 1]
        return column

    asked = DrawParameters(*map(of, range(len(PARAMETERS))))
    is_drawn = asked.temperature > 0
    temperature = jnp.where(is_drawn, asked.temperature, 1.0)
    raw_top, greedy, is_sound = work.take(logits, temperature, vocab_size, share)

    def put(tokens: jax.Array) -> None:
        token = jnp.where(is_sound, jnp.where(raw_top > NEVER, tokens, NOTHING_LEFT), NOT_A_TOKEN)
        out[...] = jnp.broadcast_to(token, out.shape)

    put(greedy)

    @pl.when(jnp.max(is_drawn.astype(jnp.float32)) > 0)  # rows behind the last may be anything
    def _() -> None:
        top = jnp.maximum(raw_top / temperature, NEVER)
        total = work.weigh(top)
        top_k, top_p = jnp.where(is_drawn, asked.top_k, 0.0), jnp.where(is_drawn, asked.top_p, 1.0)
        filters = Filters(replace(asked, top_k=top_k, top_p=top_p), vocab_size)
        work.add_up(filters.least(work.tokens, work.few, top, total))
        put(jnp.where(is_drawn, work.first_past(of(_UNIFORM), greedy), greedy))


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows in VMEM. A column is an array `[rows, 1]`."""

    tokens: Tokens
    few: Tokens
    sums: Ref
    prefixes: Ref

    @property
    def num_rows(self) -> int:
        return int(self.tokens.logits.shape[0])

    def take(
        self, logits: Ref, temperature: jax.Array, vocab_size: int, share: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Loads the logits; returns the columns of their maximum, its first index, and whether all are sound.

        Tokens lie next to each other without gaps, so a share may begin within a register: it is rotated there.
        """
        shape = (self.num_rows, LANES)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)
        strip, scaled = self.tokens.strip, self.tokens.logits
        found: tuple[jax.Array, ...] = jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

        def take(source: int, start: Any, size: int, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Loads `size` lanes of a share from `start` on; the last of `found` is the previous register, rotated."""
            top, place, broken, before = found
            shift = source * share % LANES
            taken = []
            for number, x in enumerate(registers_of(logits[source, :, pl.ds(aligned(start), size)])):
                inside = start + number * LANES + lane
                token = source * share + inside
                is_real = (inside < share) & (token < vocab_size)
                broken = jnp.where(is_real & ~(x < jnp.inf), 1.0, broken)
                is_higher = is_real & (x > top)
                top, place = jnp.where(is_higher, x, top), jnp.where(is_higher, token, place)
                taken.append(jnp.where(is_real, x / temperature, NEVER))
                if shift:
                    rotated = pltpu.roll(taken[-1], shift, axis=1)
                    taken[-1], before = jnp.where(lane < shift, before, rotated), rotated
            scaled[:, pl.ds(aligned(source * share - shift + start), size)] = jnp.concatenate(taken, axis=1)
            return top, place, broken, before

        width = logits.shape[2]
        for source in range(logits.shape[0]):
            begin, shift = source * share // LANES * LANES, source * share % LANES
            whole = width // strip

            def take_strip(i: Any, found: tuple[jax.Array, ...], source: int = source) -> tuple[jax.Array, ...]:
                return take(source, i * strip, strip, found)

            found = *found[:3], scaled[:, begin : begin + LANES]
            if whole:
                found = lax.fori_loop(0, whole, take_strip, found)
            if width % strip:
                found = take(source, whole * strip, width % strip, found)
            after = begin + width
            if shift and after < scaled.shape[1]:  # lanes rotated out of the last register
                scaled[:, after : after + LANES] = jnp.where(lane < shift, found[3], NEVER)
                after += LANES
        for padding in range(after, scaled.shape[1], LANES):
            scaled[:, padding : padding + LANES] = jnp.full(shape, NEVER)
        top, place, broken = found[:3]
        highest = jnp.max(top, axis=1, keepdims=True)
        # f32 has all of a vocabulary's integers exactly, and not every TPU can reduce integers.
        first = jnp.where(top == highest, place.astype(jnp.float32), float(vocab_size))
        greedy = jnp.min(first, axis=1, keepdims=True).astype(jnp.int32)
        return highest, jnp.minimum(greedy, vocab_size - 1), jnp.max(broken, axis=1, keepdims=True) == 0

    def weigh(self, top: jax.Array) -> jax.Array:
        """Turns logits into weights; returns the column of their sums. Keeps maxima for the filters."""
        number = few_of_a_strip(self.tokens.strip)
        none = jnp.zeros((self.num_rows, LANES), jnp.float32)

        def weigh(strip: Any, total: jax.Array) -> jax.Array:
            lanes = self.tokens.lanes(strip)
            logits = self.tokens.logits[:, lanes]
            weights = jnp.exp(logits - top)
            self.tokens.weights[:, lanes] = weights
            self.few.logits[:, lanes_of(strip, number)] = maxima_of(logits, number)
            return reduce(jnp.add, registers_of(weights), total)

        for first in range(self.tokens.num_strips * number, self.few.logits.shape[1], LANES):
            self.few.logits[:, first : first + LANES] = jnp.full(none.shape, -jnp.inf)
        total = lax.fori_loop(0, self.tokens.num_strips, weigh, none)
        return jnp.sum(total, axis=1, keepdims=True)

    def add_up(self, least: jax.Array) -> None:
        """Sets weights of logits below `least` to 0. Computes the sum of each chunk of LANES weights, and the prefix
        sums of these sums.
        """
        self.sums[...] = jnp.zeros_like(self.sums)
        lane = lax.broadcasted_iota(jnp.int32, (self.num_rows, LANES), 1)
        per_strip = self.tokens.strip // LANES  # a power of two: a strip's chunks lie in one register of sums

        def add(strip: Any, _: None) -> None:
            lanes = self.tokens.lanes(strip)
            kept = jnp.where(self.tokens.logits[:, lanes] >= least, self.tokens.weights[:, lanes], 0.0)
            self.tokens.weights[:, lanes] = kept
            first = strip * per_strip
            register = pl.ds(aligned(first & -LANES), LANES)
            is_own = lane & -per_strip == first & LANES - 1
            self.sums[:, register] = jnp.where(is_own, sums_of(registers_of(kept)), self.sums[:, register])

        lax.fori_loop(0, self.tokens.num_strips, add, None)
        num_registers = self.sums.shape[1] // LANES
        held = [self.sums[:, i * LANES : (i + 1) * LANES] for i in range(num_registers)]
        ends = prefix_sums([sums_of([x])[:, :1] for x in held])
        for i, x in enumerate(held):
            before = ends[i - 1] if i else jnp.zeros_like(ends[0])
            self.prefixes[:, i * LANES : (i + 1) * LANES] = prefix_lanes(x, before, ends[i])

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
        is_past = (prefix_lanes(weights, before, after) > target) & (weights > 0)
        first = jnp.min(jnp.where(is_past, lane, float(LANES)), axis=1, keepdims=True)
        # The prefix sums within the chunk round differently from its own sum, so they may all fall short of it.
        last = jnp.max(jnp.where(weights > 0, lane, 0.0), axis=1, keepdims=True)
        token = chunk * LANES + jnp.where(first < LANES, first, last)
        return jnp.where(chunk < end, token.astype(jnp.int32), otherwise)

    def _chunk(self, chunk: jax.Array) -> jax.Array:
        """Returns the weights of one chunk for each row, [rows, LANES]."""

        def pick(strip: Any, found: jax.Array) -> jax.Array:
            registers = registers_of(self.tokens.weights[:, self.tokens.lanes(strip)])
            for place, x in enumerate(registers):
                found = jnp.where(chunk == strip * len(registers) + place, x, found)
            return found

        none = jnp.zeros((self.num_rows, LANES), jnp.float32)
        picked: jax.Array = lax.fori_loop(0, self.tokens.num_strips, pick, none)
        return picked


def _value_at(x: jax.Array, place: jax.Array, wanted: float) -> jax.Array:
    return jnp.sum(jnp.where(place == wanted, x, 0.0), axis=1, keepdims=True)
