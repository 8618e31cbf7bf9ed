"""The filters of the TPU sampling kernel: they find the logit below which a row's filters drop its tokens.

This threshold is found by bisection over all floats. If each pass read every token, that would take long, so passes
read a few candidates instead. The maxima of groups of tokens give a lower bound of the threshold, and the tokens that
reach the bound are collected. The candidates of a lane stay in their order. All other tokens would only add zeros to
the sums, so the sums have the same bits as those of all tokens, and thresholds do not depend on what was collected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.execution.sampling.prefix_sums import LANES
from penstock.engine.execution.sampling_rows import DrawParameters, ordered_to_float
from penstock.engine.kernels.pallas import Ref

MOST_CANDIDATES = 4  # in one lane of a strip
_MINUS_INFINITY, _PLUS_INFINITY = 0x007FFFFF, 0xFF800000  # in the order of `ordered_to_float`
_LEAST = float(np.finfo(np.float32).min)
_WEIGHTLESS = 128  # logits that are less than the highest one by this have a weight of 0
_ALL_BITS, _HIGH_BITS = 32, 16
_MARGIN = 1 + 2.0**-11  # more than sums of up to 2**19 tokens, over LANES lanes, are rounded by

_Measure = Callable[[Any, Sequence[jax.Array]], list[list[jax.Array]]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Logits of some rows in VMEM, and their weights. A column is an array `[rows, 1]`."""

    logits: Ref  # [rows, width], of whole strips
    weights: Ref
    strip: int  # lanes that one block of code processes

    @property
    def num_strips(self) -> int:
        return int(self.logits.shape[1]) // self.strip

    def lanes(self, strip: Any) -> Any:
        return lanes_of(strip, self.strip)

    def each_strip(self, work: Callable[[Any], None]) -> None:
        lax.fori_loop(0, self.num_strips, lambda strip, _: work(strip), None)

    def weigh(self, top: jax.Array, are_equal: jax.Array | bool = False) -> None:
        """Computes weights of the logits; they are 1 in rows where all `are_equal`."""

        def weigh(strip: Any) -> None:
            logits, is_equal = self.logits[:, self.lanes(strip)], jnp.asarray(are_equal)
            self.weights[:, self.lanes(strip)] = jnp.where(is_equal, 1.0, jnp.exp(logits - top))

        self.each_strip(weigh)

    def count(self, strip: Any, thresholds: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """Returns for each register of a strip, and each threshold `[rows, LANES]`, where it is reached."""
        logits = registers_of(self.logits[:, self.lanes(strip)])
        return [[jnp.where(x >= threshold, 1.0, 0.0) for threshold in thresholds] for x in logits]

    def mass(self, strip: Any, thresholds: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """Returns the weights of what `count` counts."""
        pairs = zip(*(registers_of(ref[:, self.lanes(strip)]) for ref in (self.logits, self.weights)), strict=True)
        return [[jnp.where(x >= threshold, weight, 0.0) for threshold in thresholds] for x, weight in pairs]

    def totals(self, measure: _Measure, thresholds: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the columns of what `measure` finds in each register, added in order and then over the lanes."""
        shape = (self.logits.shape[0], LANES)
        thresholds = [jnp.broadcast_to(threshold, shape) for threshold in thresholds]

        def add(strip: Any, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            for register in measure(strip, thresholds):
                found = tuple(x + y for x, y in zip(found, register, strict=True))
            return found

        found = lax.fori_loop(0, self.num_strips, add, (jnp.zeros(shape, jnp.float32),) * len(thresholds))
        return [jnp.sum(x, axis=1, keepdims=True) for x in found]

    def highest(
        self, measure: _Measure, wanted: jax.Array, at_least: jax.Array | float = -jnp.inf, num_bits: int = _ALL_BITS
    ) -> jax.Array:
        """Returns the column of the highest thresholds that still reach `wanted`, as `sampling._highest` does.

        Thresholds below `at_least` count as `at_least`. With fewer bits, the result may be a lower threshold.
        """

        def quarter(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            """Halves the bounds twice in one pass: it computes the sums for the middle of either half as well."""
            low, high = bounds
            middle = _middle(low, high)
            places = _middle(low, middle), middle, _middle(middle, high)
            sums = self.totals(measure, [jnp.maximum(ordered_to_float(place), at_least) for place in places])
            first, second, third = (total >= wanted for total in sums)
            low = jnp.where(second, jnp.where(third, places[2], middle), jnp.where(first, places[0], low))
            high = jnp.where(second, jnp.where(third, high, places[2]), jnp.where(first, middle, places[0]))
            return low, high

        shape = (self.logits.shape[0], 1)
        bounds = jnp.full(shape, _MINUS_INFINITY, jnp.uint32), jnp.full(shape, _PLUS_INFINITY, jnp.uint32)
        low, _ = lax.fori_loop(0, num_bits // 2, quarter, bounds)
        return ordered_to_float(low)


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters that the rows ask for.

    Attributes:
        asked: columns, all f32.
        vocab_size: a top_k of as many tokens filters nothing.
    """

    asked: DrawParameters
    vocab_size: int

    @property
    def has_top_k(self) -> jax.Array:
        return (self.asked.top_k > 0) & (self.asked.top_k < self.vocab_size)

    @property
    def has_top_p(self) -> jax.Array:
        return self.asked.top_p < 1.0

    def least(self, tokens: Tokens, few: Tokens, top: jax.Array, total: jax.Array) -> jax.Array:
        """Returns the column of the least logits that are kept.

        Args:
            tokens: all.
            few: a place for candidates. It has the maxima of each strip, as `maxima_of` returns them.
            top: the highest logit.
            total: the sum of all weights.
        """

        def bisected() -> Any:
            fullest = _collect(tokens, few, self._bound(few, top, total), top)
            of_few, of_all = (partial(self._bisected, those, top, total) for those in (few, tokens))
            return lax.cond(fullest <= MOST_CANDIDATES, of_few, of_all)

        nothing = jnp.full(top.shape, -jnp.inf, jnp.float32)
        found = lax.cond(_any(self.has_top_k | self.has_top_p), bisected, lambda: nothing)
        return jnp.maximum(found, self.asked.floor(top))

    def _bound(self, maxima: Tokens, top: jax.Array, total: jax.Array) -> jax.Array:
        """Returns the column of lower bounds of thresholds: top_k maxima reach them, or maxima with top_p's mass."""
        maxima.weigh(top, self.has_top_k)
        wanted = jnp.where(self.has_top_k, self.asked.top_k, self.asked.top_p * total * _MARGIN)
        bound = maxima.highest(maxima.mass, wanted, num_bits=_HIGH_BITS)
        return jnp.where(self.has_top_k | self.has_top_p, bound, jnp.inf)

    def _bisected(self, tokens: Tokens, top: jax.Array, total: jax.Array) -> jax.Array:
        nothing = jnp.full(top.shape, -jnp.inf, jnp.float32)

        def by_top_k() -> jax.Array:
            wanted = jnp.where(self.has_top_k, self.asked.top_k, 1.0)  # f32 has these counts exactly
            return jnp.where(self.has_top_k, tokens.highest(tokens.count, wanted), -jnp.inf)

        def by_top_p(least: jax.Array) -> jax.Array:
            left = jnp.where(self.has_top_k, tokens.totals(tokens.mass, [least])[0], total)
            found = tokens.highest(tokens.mass, self.asked.top_p * left, least)
            # A top_p that f32 rounds to 0 wants no mass at all, and still keeps the most likely token.
            return jnp.where(self.has_top_p, jnp.maximum(least, jnp.minimum(found, top)), least)

        least = lax.cond(_any(self.has_top_k), by_top_k, lambda: nothing)
        both: jax.Array = lax.cond(_any(self.has_top_p), by_top_p, lambda least: least, least)
        return both


def few_of_a_strip(strip: int) -> int:
    """Returns the lanes for the candidates of a strip."""
    return min(MOST_CANDIDATES * LANES, strip)


def maxima_of(logits: jax.Array, number: int) -> jax.Array:
    """Returns `[rows, number]`: the maxima of groups of a strip."""
    groups = (logits[:, first : first + number] for first in range(0, logits.shape[1], number))
    maxima: jax.Array = reduce(jnp.maximum, groups)
    return maxima


def _collect(tokens: Tokens, few: Tokens, bound: jax.Array, top: jax.Array) -> jax.Array:
    """Moves the logits that reach `bound` to `few`, with their weights. Returns a scalar, more than MOST_CANDIDATES if
    there was no place for some.
    """
    none = jnp.full((tokens.logits.shape[0], LANES), -jnp.inf, jnp.float32)
    bound = jnp.broadcast_to(jnp.maximum(jnp.maximum(bound, top - _WEIGHTLESS), _LEAST), none.shape)
    number = few_of_a_strip(tokens.strip)

    def collect(strip: Any, lost: jax.Array) -> jax.Array:
        held = [none] * (number // LANES)
        for x in reversed(registers_of(tokens.logits[:, tokens.lanes(strip)])):  # the first one is on top in the end
            is_candidate = x >= bound
            lost = jnp.where(is_candidate, jnp.maximum(lost, held[-1]), lost)
            held = [jnp.where(is_candidate, new, old) for new, old in zip([x, *held], held, strict=False)]
        few.logits[:, lanes_of(strip, number)] = jnp.concatenate(held, axis=1)
        return lost

    lost = lax.fori_loop(0, tokens.num_strips, collect, none)
    few.weigh(top)
    return jnp.max(jnp.where(lost >= _LEAST, MOST_CANDIDATES + 1.0, 1.0))


def _middle(low: jax.Array, high: jax.Array) -> jax.Array:
    return low + lax.shift_right_logical(high - low, jnp.uint32(1))


def _any(columns: jax.Array) -> jax.Array:
    """Returns whether any is true, as a scalar; f32 is what every TPU can reduce."""
    return jnp.max(columns.astype(jnp.float32)) > 0


def lanes_of(strip: Any, size: int) -> Any:
    """Returns the lanes of a strip. One that is loaded whole takes one address, which the scalar unit computes."""
    return pl.ds(aligned(strip * size), size)


def registers_of(x: jax.Array) -> list[jax.Array]:
    return [x[:, first : first + LANES] for first in range(0, x.shape[1], LANES)]


def aligned(lane: Any) -> Any:
    return lane if isinstance(lane, int) else pl.multiple_of(lane, LANES)
