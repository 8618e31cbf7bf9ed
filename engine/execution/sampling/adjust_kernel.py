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
from penstock.engine.execution.sampling.draw_filters import aligned, registers_of
from penstock.engine.execution.sampling.extended_rows import ADJUSTED, BIASED, ExtendedRows, SeenDrafts
from penstock.engine.execution.sampling.sampling_state import GENERATED, IN_PROMPT, LANES, STOPS, SamplingState
from penstock.engine.execution.sampling_rows import NEVER
from penstock.engine.kernels.pallas import Ref

_ROWS = 8  # of a block
_WORD = 32  # tokens in a word of a mask
_WORDS = LANES // _WORD  # whose bits are those of a register's tokens
_STRIP = _WORD * LANES  # tokens whose mask is one register
_FEW_STRIPS, _MANY_STRIPS = 4, 8  # of a block
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
    at_once: int = 16,  # registers of logits; a power of two
    interpret: Any = False,  # as of pallas_call
) -> Adjusted:
    """Adjusts logits as `adjusting.adjust` and then `adjusting.masked` do."""
    num_rows, vocab_size = logits.shape
    tile = _STRIP * _strips_of_a_block(pl.cdiv(vocab_size, _STRIP))
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


def _strips_of_a_block(num_strips: int) -> int:
    """Returns the strips of a block. Starting one is slow, so many pay; the maxima of `_FEW_STRIPS` fill a register."""
    return min(num_strips, _FEW_STRIPS) if num_strips < _MANY_STRIPS else _MANY_STRIPS


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


class _Asked(NamedTuple):
    """What rows ask for, each over all lanes `[rows, LANES]`: spreading a column takes far longer than reading it."""

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    is_adjusted: jax.Array
    is_biased: jax.Array
    is_blocked: jax.Array

    @classmethod
    def of(cls, parameters: jax.Array) -> _Asked:
        columns = [jnp.broadcast_to(parameters[:, i : i + 1], parameters.shape) for i in range(_NUM_PARAMETERS)]
        return cls(*columns[:_ADJUSTED], *(column != 0 for column in columns[_ADJUSTED:]))


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of a tile of the vocabulary."""

    logits: Ref  # [rows, tile]
    parameters: Ref  # [rows, LANES]
    masks: Ref | None  # i32 [rows, tile / _WORD]
    held: tuple[Ref, Ref]  # words and biases, [rows, tile]
    vocab_size: int
    raw_maxima: bool
    at_once: int

    def adjust(self, adjusted: Ref, maxima: Ref, broken: Ref) -> None:
        asked = _Asked.of(self.parameters[...])
        num_maxima = min(LANES, maxima.shape[1])  # in one register

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            broken[...] = jnp.zeros_like(broken)

        unsound, before = broken[...], pl.program_id(1) * self.logits.shape[1]
        for part in range(0, maxima.shape[1], num_maxima):
            several = partial(self._several, adjusted, asked, before, part)
            start = jnp.full((maxima.shape[0], num_maxima), -jnp.inf, jnp.float32), unsound
            found, unsound = lax.fori_loop(0, num_maxima // self.at_once, several, start)
            maxima[:, part : part + num_maxima] = found
        broken[...] = unsound

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _() -> None:
            broken[...] = jnp.broadcast_to(jnp.max(broken[...], axis=1, keepdims=True), broken.shape)

    def _several(
        self, adjusted: Ref, asked: _Asked, before: Any, part: int, i: Any, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Adjusts the `i`th `at_once` registers from number `part` on; `before` are the tokens of the tiles before."""
        found, unsound = carry
        first = part + i * self.at_once
        lanes = pl.ds(aligned(first * LANES), self.at_once * LANES)
        loaded = (registers_of(ref[:, lanes]) for ref in (self.logits, *self.held))
        place, lane = (lax.broadcasted_iota(jnp.int32, each.shape, 1) for each in carry)
        taken = []
        for number, (x, words, bias, mask) in enumerate(zip(*loaded, self._masks(first), strict=True)):
            is_real = lane < self.vocab_size - before - (first + number) * LANES
            unsound = jnp.where(is_real & ~(x < jnp.inf), 1.0, unsound)
            y = _adjusted(x, words, bias, asked)
            taken.append(y if mask is None else jnp.where(mask, y, NEVER))
            top = jnp.max(jnp.where(is_real, x if self.raw_maxima else taken[-1], -jnp.inf), axis=1, keepdims=True)
            found = jnp.where(place == i * self.at_once + number, top, found)
        adjusted[:, lanes] = jnp.concatenate(taken, axis=1)
        return found, unsound

    def _masks(self, first: Any) -> list[jax.Array | None]:
        """Returns which tokens are allowed in each register from number `first` on; four words hold one's bits."""
        if self.masks is None:
            return [None] * self.at_once
        words = self.masks[:, pl.ds(aligned(lax.shift_right_logical(first, _WORD.bit_length() - 1) * LANES), LANES)]
        lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
        word = (first & _WORD - 1) * _WORDS + lax.shift_right_logical(lane, _WORD.bit_length() - 1)
        spread = (jnp.take_along_axis(words, word + number * _WORDS, axis=1) for number in range(self.at_once))
        bit = lax.shift_left(jnp.int32(1), lane & _WORD - 1)
        return [each & bit != 0 for each in spread]


def _adjusted(x: jax.Array, words: jax.Array, bias: jax.Array, asked: _Asked) -> jax.Array:
    counts = lax.shift_right_logical(words, GENERATED.bit_length() - 1)
    is_generated = counts > 0
    is_seen = is_generated | (words & IN_PROMPT > 0)
    is_blocked = (words & STOPS > 0) & asked.is_blocked
    y = jnp.where(is_seen, jnp.where(x > 0, x / asked.repetition, x * asked.repetition), x)
    y = y - jnp.where(is_generated, asked.presence, 0.0) - asked.frequency * counts.astype(jnp.float32)
    y = jnp.where(asked.is_adjusted, _bounded(y, x, is_blocked), x)
    is_forbidden = (bias < NEVER / 2) | ((y == NEVER) & asked.is_adjusted)
    return jnp.where(asked.is_biased, _bounded(y + bias, y, is_forbidden), y)


def _bounded(adjusted: jax.Array, logits: jax.Array, is_forbidden: jax.Array) -> jax.Array:
    return jnp.where(is_forbidden | ~(logits > -jnp.inf), NEVER, jnp.clip(adjusted, -LARGEST, LARGEST))
