"""Turns logits into tokens, on the device, each row by its own parameters.

A token is drawn by inverting the distribution's cumulative sum at one uniform number that depends on (seed, output
index) alone. So a row's token does not depend on what else is in the batch, and one random number per row is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from penstock.engine.native import SURVEY

NOT_A_TOKEN = -1
"""Sampled where a logit is NaN or plus infinity: the model's numbers broke down for that row."""

NOTHING_LEFT = -2
"""Sampled where every token is forbidden, by the request or by a model that gives minus infinity to all."""

NEVER = -1e30
"""The logit of a token that may not be drawn: softmax gives it exactly 0, and it stays finite when shifted."""

_ARGMAX_BLOCK = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What every sampled row carries."""

    temperature: jax.Array  # f32 [num_rows]; 0 is greedy
    top_p: jax.Array  # f32 [num_rows]
    min_p: jax.Array  # f32 [num_rows]
    top_k: jax.Array  # i32 [num_rows]; 0 keeps all
    seed: jax.Array  # u32 [num_rows, 2]
    output_index: jax.Array  # i32 [num_rows]


class Survey(NamedTuple):
    """What is asked of each row of logits, whatever its parameters."""

    greedy: jax.Array  # i32 [num_rows]: its first maximum
    top: jax.Array  # f32 [num_rows]: the logit of that
    is_sound: jax.Array  # bool [num_rows]: no logit is NaN or plus infinity; minus infinity is a token with no chance


def survey(logits: jax.Array, *, is_native: bool = False) -> Survey:
    """Of f32 logits `[num_rows, vocab]`; `is_native`: by the CPU's kernel, which reads them once.

    XLA's maximum on CPU drops a NaN, from some shapes on, so there soundness is asked of each logit. Elsewhere a NaN is
    the first maximum, and logits are read once.
    """
    if is_native:
        shape = logits.shape[:1]
        results = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_)]  # type: ignore[no-untyped-call]
        greedy, is_sound = jax.ffi.ffi_call(SURVEY, results)(logits)
        return Survey(greedy, _logits_of(greedy, logits), is_sound)
    found: Survey = jax.lax.platform_dependent(logits, cpu=_survey_on_cpu, default=_survey)
    return found


def sample(
    logits: jax.Array,
    rows: SamplingRows,
    found: Survey,
    whole: Callable[[jax.Array], jax.Array] = lambda logits: logits,
) -> jax.Array:
    """Draws one token per row, i32 `[num_rows]`, from f32 logits `[num_rows, vocab]`, which `whole` makes of `logits`
    where any row is not greedy.

    Filters apply in the order of Hugging Face's generate: temperature, top_k, top_p, min_p. Of equally likely tokens at
    a filter's edge all are kept; of equal maxima greedy takes the first. `found` has the first maximum of these logits,
    and whether the model's own were sound: a row whose were not gives NOT_A_TOKEN. One without a token that may be
    drawn gives NOTHING_LEFT.
    """
    drawn = jax.lax.cond(
        jnp.any(rows.temperature > 0),
        lambda logits, rows, greedy: _draw(whole(logits), rows, greedy),
        lambda _logits, _rows, greedy: greedy,
        *(logits, rows, found.greedy),
    )
    sampled = jnp.where(rows.temperature > 0, drawn, found.greedy)
    return jnp.where(found.is_sound, jnp.where(found.top > NEVER, sampled, NOTHING_LEFT), NOT_A_TOKEN)


def _survey(logits: jax.Array) -> Survey:
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    top = _logits_of(greedy, logits)
    return Survey(greedy, top, top < jnp.inf)


def _survey_on_cpu(logits: jax.Array) -> Survey:
    greedy = _argmax_on_cpu(logits).astype(jnp.int32)
    return Survey(greedy, _logits_of(greedy, logits), jnp.all(logits < jnp.inf, axis=-1))


def _logits_of(token_ids: jax.Array, logits: jax.Array) -> jax.Array:
    """Of one token for each row, `[num_rows]`."""
    return jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]


def _argmax_on_cpu(logits: jax.Array) -> jax.Array:
    """The first maximum of each row: that of block maxima, then that within the block.

    XLA on CPU finds a maximum many times faster than where it is.
    """
    blocks = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % _ARGMAX_BLOCK)), constant_values=-jnp.inf)
    blocks = blocks.reshape(logits.shape[0], -1, _ARGMAX_BLOCK)
    best = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    within = jnp.argmax(jnp.take_along_axis(blocks, best[:, None, None], axis=1)[:, 0], axis=-1)
    return best * _ARGMAX_BLOCK + within


def _draw(logits: jax.Array, rows: SamplingRows, greedy: jax.Array) -> jax.Array:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    logits = logits / temperature[:, None]
    is_filtered = jnp.any((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0))
    logits = jax.lax.cond(is_filtered, _filter, lambda logits, _: logits, logits, rows)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    cumulative = jnp.cumsum(weights, axis=-1)
    target = jax.vmap(_uniform)(rows.seed, rows.output_index)[:, None] * cumulative[:, -1:]
    return _first_past(target, cumulative, weights, greedy)


def _first_past(target: jax.Array, cumulative: jax.Array, weights: jax.Array, otherwise: jax.Array) -> jax.Array:
    """The first token with a weight whose cumulative weight exceeds `target` `[num_rows, 1]`, i32 `[num_rows]`.

    The weight is asked for because the sums of a parallel scan are rounded each in its own way: one may grow by a hair
    where the weight is 0. For the same reason there may be no such token, and also where a temperature next to 0 made
    logits overflow: that row takes its `otherwise`.
    """
    vocab = weights.shape[-1]
    place = jnp.where((cumulative > target) & (weights > 0), jnp.arange(vocab, dtype=jnp.int32), vocab)
    first = jnp.min(place, axis=-1)
    return jnp.where(first < vocab, first, otherwise)


def _uniform(seed: jax.Array, output_index: jax.Array) -> jax.Array:
    """A number in [0, 1) that is a function of its arguments alone."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, output_index))


def _filter(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Masks what top_k, then top_p, then min_p leave out, by a threshold each, without sorting the vocabulary."""
    vocab = logits.shape[-1]
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)

    def enough_tokens(threshold: jax.Array) -> jax.Array:
        return jnp.sum(logits >= threshold, axis=-1, keepdims=True) >= top_k[:, None]

    logits = jnp.where(logits >= _highest(enough_tokens, logits), logits, NEVER)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    wanted = rows.top_p[:, None] * jnp.sum(weights, axis=-1, keepdims=True)

    def enough_mass(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(logits >= threshold, weights, 0.0), axis=-1, keepdims=True) >= wanted

    # A top_p that f32 takes for 0 wants no mass at all, and still keeps the most likely token.
    kept = (logits >= jnp.minimum(_highest(enough_mass, logits), top)) | (rows.top_p[:, None] >= 1.0)
    floor = top + jnp.log(rows.min_p)[:, None]  # -inf where min_p is 0
    return jnp.where(kept & (logits >= floor), logits, NEVER)


def _highest(holds: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """The highest f32 threshold for which `holds`, one per row `[num_rows, 1]`, found by bisection over all floats.

    `holds` is true for low thresholds, minus infinity among them, and false for high ones. 32 halvings of the integers
    that order floats are exact.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds at low, not at high
        middle = low + (high - low) // 2
        ok = holds(_ordered_to_float(middle))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    shape = (logits.shape[0], 1)
    low = jnp.full(shape, 0x007FFFFF, jnp.uint32)  # minus infinity
    high = jnp.full(shape, 0xFF800000, jnp.uint32)  # plus infinity
    found = partial(jax.lax.fori_loop, 0, 32, halve)
    # A CUDA graph takes in branches, but no loops: with one, the host would have to look where each step branches.
    low, _ = jax.lax.platform_dependent((low, high), cuda=partial(found, unroll=True), default=found)
    return _ordered_to_float(low)


def _ordered_to_float(ordered: jax.Array) -> jax.Array:
    """Maps u32 to f32 so that the order is kept: the sign bit is flipped, negative numbers are mirrored."""
    sign = jnp.uint32(0x80000000)
    return jax.lax.bitcast_convert_type(jnp.where(ordered >= sign, ordered ^ sign, ~ordered), jnp.float32)
