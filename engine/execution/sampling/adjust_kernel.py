"""Penalties, biases, restrictions and masks for TPU: one kernel that reads logits and the state of their slots once.

As XLA operations, the rows of slots would be copied out of the state, and a mask's words spread over the lanes, each in
an array of its own. A block is some rows with a tile of the vocabulary. Each row of the state comes by a transfer of
its own, while the block before is computed. Beside the logits the kernel gives what log-probabilities and the draw need
of them: whether they are sound, and the maximum of each LANES tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.execution.sampling.adjusting import LARGEST
from penstock.engine.execution.sampling.extended_rows import ADJUSTED, BIASED, ExtendedRows, SeenDrafts
from penstock.engine.execution.sampling.sampling_rows import NEVER
from penstock.engine.execution.sampling.sampling_state import GENERATED, IN_PROMPT, LANES, STOPS, SamplingState
from penstock.engine.kernels.pallas import Ref

_ROWS = 8  # of a block
_WORD = 32  # tokens in a word of a mask
_STRIP = _WORD * LANES  # tokens whose mask is one register
_MOST_STRIPS = 4  # of a block
_OPERATIONS = 40  # for each logit
_REPETITION, _PRESENCE, _FREQUENCY, _ADJUSTED, _BIASED, _BLOCKED, _NUM_PARAMETERS = range(7)  # lanes of a row


class Adjusted(NamedTuple):
    """Logits with everything applied that their rows ask for, and facts about them.

    `maxima` are those of each LANES logits; the last ones may be minus infinity. None: they are not known.
    """

    logits: jax.Array  # f32 [num_rows, vocab]
    is_sound: jax.Array  # bool [num_rows]: of the logits before
    maxima: jax.Array | None  # f32 [num_rows, blocks]


def adjust_by_kernel(
    logits: jax.Array,  # f32 [num_rows, vocab]
    rows: ExtendedRows,
    state: SamplingState,
    output_index: jax.Array,
    drafts: SeenDrafts,
    masks: jax.Array | None,  # i32 [num_rows, mask_words]
    *,
    raw_maxima: bool = False,  # whether `maxima` are of the logits before
    at_once: int = 8,  # registers of logits; a power of two
    interpret: Any = False,  # as of pallas_call
) -> Adjusted:
    """Adjusts logits as `adjusting.adjust` and then `adjusting.masked` do."""
    num_rows, vocab_size = logits.shape
    tile = _STRIP * min(_MOST_STRIPS, pl.cdiv(vocab_size, _STRIP))
    num_tiles = pl.cdiv(vocab_size, tile)
    block = min(_ROWS, num_rows)
    padded = pl.cdiv(num_rows, block) * block - num_rows
    flags = ADJUSTED * rows.is_adjusted.astype(jnp.int32) + BIASED * rows.is_biased.astype(jnp.int32)
    of_rows = (jnp.pad(array, (0, padded)) for array in (rows.slot, flags, drafts.last, drafts.num_seen))
    words = [] if masks is None else [_at_least(masks, tile // _WORD)]
    held = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in (state.tokens, state.bias)]

    def by_tile(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, lanes), lambda i, j, *_: (i, j))

    by_row = pl.BlockSpec((block, LANES), lambda i, j, *_: (i, 0))
    found, maxima, broken = pl.pallas_call(
        partial(_kernel, vocab_size=vocab_size, raw_maxima=raw_maxima, at_once=at_once),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(num_rows, block), num_tiles),
            in_specs=[
                by_tile(tile),
                by_row,
                *([by_tile(tile // _WORD)] * len(words)),
                *([pl.BlockSpec(memory_space=pl.ANY)] * len(held)),
            ],
            out_specs=[by_tile(tile), by_tile(tile // LANES), by_row],
            scratch_shapes=[
                pltpu.VMEM((2, block, tile), state.tokens.dtype),
                pltpu.VMEM((2, block, tile), state.bias.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, max(vocab_size, tile)), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_tiles * tile // LANES), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=_cost(logits, held, words),
        interpret=interpret,
        name="adjust_logits",
    )(*of_rows, drafts.ids, _at_least(logits, tile), _parameters(rows, output_index), *words, *held)
    return Adjusted(found[:, :vocab_size], broken[:, 0] == 0, maxima)


def _cost(logits: jax.Array, held: Sequence[jax.Array], words: Sequence[jax.Array]) -> pl.CostEstimate:
    """Returns what the kernel costs if each row changes by all of its state: logits are read and written."""
    per_logit = 2 * logits.dtype.itemsize + sum(array.dtype.itemsize for array in held)
    of_masks = sum(array.size * array.dtype.itemsize for array in words)
    return pl.CostEstimate(
        flops=_OPERATIONS * logits.size, transcendentals=0, bytes_accessed=logits.size * per_logit + of_masks
    )


def _at_least(array: jax.Array, lanes: int) -> jax.Array:
    """Pads rows that are shorter than a block."""
    return jnp.pad(array, ((0, 0), (0, max(0, lanes - array.shape[1]))))


def _parameters(rows: ExtendedRows, output_index: jax.Array) -> jax.Array:
    """Packs what a row asks for as f32 `[num_rows, LANES]`."""
    columns = (
        rows.repetition_penalty,
        rows.presence_penalty,
        rows.frequency_penalty,
        rows.is_adjusted.astype(jnp.float32),
        rows.is_biased.astype(jnp.float32),
        (output_index < rows.min_tokens).astype(jnp.float32),
    )
    return jnp.pad(jnp.stack(columns, axis=1), ((0, 0), (0, LANES - _NUM_PARAMETERS)))


def _kernel(*refs: Ref, vocab_size: int, raw_maxima: bool, at_once: int) -> None:
    scalars, (logits, parameters, *masks), outs = refs[:5], refs[5:-8], refs[-6:-3]
    slots = _Slots(*scalars, *refs[-8:-6], *refs[-3:])
    number = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

    @pl.when(number == 0)
    def _() -> None:
        slots.start(number)

    @pl.when(number + 1 < pl.num_programs(0) * pl.num_programs(1))
    def _() -> None:
        slots.start(number + 1)

    slots.wait(number)
    slots.add_drafts(number)
    held = slots.held(number)
    _Block(logits, parameters, masks[0] if masks else None, held, vocab_size, raw_maxima, at_once).adjust(*outs)


@dataclass(frozen=True, slots=True)
class _Slots:
    """Rows of the state, and their way into VMEM. Blocks are numbered in the order of the grid."""

    slots: Ref  # i32 [rows], in scalar memory like all up to `ids`
    flags: Ref
    last: Ref
    num_seen: Ref
    ids: Ref
    tokens: Ref  # i32 [num_slots, width], in HBM
    bias: Ref  # f32 [num_slots, width], in HBM
    words: Ref  # i32 [2, rows, tile]: of the block that is computed, and the one that is coming
    biases: Ref  # f32, likewise
    arrived: Ref

    def start(self, number: Any) -> None:
        self._each_transfer(number, lambda transfer: transfer.start())

    def wait(self, number: Any) -> None:
        self._each_transfer(number, lambda transfer: transfer.wait())

    def held(self, number: Any) -> tuple[Ref, Ref]:
        return self.words.at[lax.rem(number, 2)], self.biases.at[lax.rem(number, 2)]

    def _each_transfer(self, number: Any, do: Callable[[Any], None]) -> None:
        """Calls `do` with the transfers of a block: of rows that change by their tokens or biases, and of no others."""
        width, tile = self.tokens.shape[1], self.words.shape[2]
        first, after = self._first(number), lax.rem(number, pl.num_programs(1)) + 1
        sizes = {min(tile, width): after * tile <= width, width % tile: after * tile > width}
        for size, is_size in sizes.items():
            if not size:
                continue
            for row in range(self.words.shape[1]):
                flags = jnp.where(is_size, self.flags[self._row(number, row)], 0)
                for bit, source, target in ((ADJUSTED, self.tokens, self.words), (BIASED, self.bias, self.biases)):

                    @pl.when(flags & bit != 0)
                    def _(row: int = row, size: int = size, source: Ref = source, target: Ref = target) -> None:
                        slot = self.slots[self._row(number, row)]
                        do(
                            pltpu.make_async_copy(
                                source.at[pl.ds(slot, 1), pl.ds(first, size)],
                                target.at[lax.rem(number, 2), pl.ds(row, 1), pl.ds(0, size)],
                                self.arrived.at[lax.rem(number, 2)],
                            )
                        )

    def add_drafts(self, number: Any) -> None:
        """Counts the drafts that each row sees as if they had been generated."""
        first, tile = self._first(number), self.words.shape[2]
        shape = (self.words.shape[1], LANES)
        sublane, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))

        for row in range(shape[0]):

            def add(back: Any, carry: None, row: int = row) -> None:
                place = self.ids[self.last[self._row(number, row)] - back] - first

                @pl.when((place >= 0) & (place < tile))
                def _() -> None:
                    lanes = pl.ds(pl.multiple_of(place & -LANES, LANES), LANES)
                    is_it = (sublane == row) & (lane == place & LANES - 1)
                    self.words[lax.rem(number, 2), :, lanes] += jnp.where(is_it, GENERATED, 0)

            lax.fori_loop(0, self.num_seen[self._row(number, row)], add, None)

    def _first(self, number: Any) -> Any:
        """Returns the first token of a block."""
        tile = self.words.shape[2]
        return pl.multiple_of(lax.rem(number, pl.num_programs(1)) * tile, tile)

    def _row(self, number: Any, row: int) -> Any:
        return lax.div(number, pl.num_programs(1)) * self.words.shape[1] + row


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of a tile of the vocabulary. A column is an array `[rows, 1]`."""

    logits: Ref  # [rows, tile]
    parameters: Ref  # [rows, LANES]
    masks: Ref | None  # i32 [rows, tile / _WORD]
    held: tuple[Ref, Ref]  # words and biases, [rows, tile]
    vocab_size: int
    raw_maxima: bool
    at_once: int

    def adjust(self, adjusted: Ref, maxima: Ref, broken: Ref) -> None:
        rows, tile = self.logits.shape
        lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        place = lax.broadcasted_iota(jnp.int32, maxima.shape, 1)
        first = pl.program_id(1) * tile

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            broken[...] = jnp.zeros_like(broken)

        def several(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            found, unsound = carry
            for number in (i * self.at_once + j for j in range(self.at_once)):
                start = pl.multiple_of(number * LANES, LANES)
                lanes, is_real = pl.ds(start, LANES), first + start + lane < self.vocab_size
                x = self.logits[:, lanes]
                unsound = jnp.where(is_real & ~(x < jnp.inf), 1.0, unsound)
                y = self._masked(self._adjusted(x, lanes), number)
                adjusted[:, lanes] = y
                top = jnp.max(jnp.where(is_real, x if self.raw_maxima else y, -jnp.inf), axis=1, keepdims=True)
                found = jnp.where(place == number, top, found)
            return found, unsound

        start = jnp.full(maxima.shape, -jnp.inf, jnp.float32), broken[...]
        maxima[...], broken[...] = lax.fori_loop(0, tile // LANES // self.at_once, several, start)

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _() -> None:
            broken[...] = jnp.broadcast_to(jnp.max(broken[...], axis=1, keepdims=True), broken.shape)

    def _adjusted(self, x: jax.Array, lanes: Any) -> jax.Array:
        words, bias = (ref[:, lanes] for ref in self.held)
        is_adjusted, is_biased = self._of(_ADJUSTED) != 0, self._of(_BIASED) != 0
        counts = lax.shift_right_logical(words, GENERATED.bit_length() - 1)
        is_generated = counts > 0
        is_seen = is_generated | (words & IN_PROMPT > 0)
        is_blocked = (words & STOPS > 0) & (self._of(_BLOCKED) != 0)
        penalty = self._of(_REPETITION)
        y = jnp.where(is_seen, jnp.where(x > 0, x / penalty, x * penalty), x)
        y = y - jnp.where(is_generated, self._of(_PRESENCE), 0.0) - self._of(_FREQUENCY) * counts.astype(jnp.float32)
        y = jnp.where(is_adjusted, _bounded(y, x, is_blocked), x)
        is_forbidden = (bias < NEVER / 2) | ((y == NEVER) & is_adjusted)
        return jnp.where(is_biased, _bounded(y + bias, y, is_forbidden), y)

    def _masked(self, y: jax.Array, number: Any) -> jax.Array:
        """Forbids what the mask of a register does: its lanes' bits are in four words."""
        if self.masks is None:
            return y
        words = self.masks[:, pl.ds(pl.multiple_of(lax.div(number, _WORD) * LANES, LANES), LANES)]
        lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
        word = lax.rem(number, _WORD) * (LANES // _WORD) + lax.div(lane, _WORD)
        spread = jnp.take_along_axis(words, word, axis=1)
        return jnp.where(lax.shift_right_logical(spread, lane & _WORD - 1) & 1 != 0, y, NEVER)

    def _of(self, lane: int) -> jax.Array:
        column: jax.Array = self.parameters[:, lane : lane + 1]
        return column


def _bounded(adjusted: jax.Array, logits: jax.Array, is_forbidden: jax.Array) -> jax.Array:
    return jnp.where(is_forbidden | ~(logits > -jnp.inf), NEVER, jnp.clip(adjusted, -LARGEST, LARGEST))
