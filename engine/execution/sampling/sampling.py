"""Turns logits into tokens, on the device, each row by its own parameters.

A token is drawn by inverting the distribution's cumulative sum at one uniform number that depends only on (seed, output
index). So a row's token does not depend on what else is in the batch, and one random number per row is enough.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from penstock.engine.execution.sampling.draw_kernel import draw
from penstock.engine.execution.sampling_rows import (
    NEVER,
    NOT_A_TOKEN,
    NOTHING_LEFT,
    SamplingRows,
    ordered_to_float,
    uniforms,
)
from penstock.engine.kernels.cpu import SURVEY

_ARGMAX_BLOCK = 64


class Form(enum.Enum):
    """What samples rows: a TPU's kernel, XLA after a CPU's survey of the logits, XLA on CPUs, or XLA without loops.

    It is known before a program is traced: tracing the kernel takes longer than all else in a head, on any device.
    """

    TPU = "tpu"
    NATIVE = "native"
    XLA = "xla"
    GPU = "gpu"

    @classmethod
    def on(cls, platform: str, *, is_native: bool) -> Form:
        """Returns the form for JAX's `platform`, where the CPU's kernels compute the logits if `is_native`."""
        if platform == "cpu":
            return cls.NATIVE if is_native else cls.XLA
        return cls.TPU if platform == "tpu" else cls.GPU


class Survey(NamedTuple):
    """Facts about each row of logits, whatever its parameters."""

    greedy: jax.Array  # i32 [num_rows]: its first maximum
    is_sound: jax.Array  # bool [num_rows]: no logit is NaN or plus infinity; minus infinity has no chance


def survey(logits: jax.Array, form: Form = Form.XLA) -> Survey:
    """Surveys f32 logits `[num_rows, vocab]`; if NATIVE, the CPU's kernel reads them once.

    Soundness is checked per logit, not by their maximum: XLA's maximum on CPU drops a NaN in some shapes.
    """
    if form is Form.NATIVE:
        shape = logits.shape[:1]
        places, are_sound = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_))
        return Survey(*SURVEY({"logits": logits}, {"places": places, "are_sound": are_sound}))
    greedy = _argmax_on_cpu(logits) if form is Form.XLA else jnp.argmax(logits, axis=-1)
    return Survey(greedy.astype(jnp.int32), jnp.all(logits < jnp.inf, axis=-1))


def sample(
    shares: jax.Array,
    rows: SamplingRows,
    vocab_size: int,
    form: Form = Form.XLA,
    *,
    is_sound: jax.Array | None = None,  # bool [num_rows]: of the model's own logits; None: `shares` are its own
) -> jax.Array:
    """Draws one token per row, i32 `[num_rows]`, from f32 logits `[num_shares, num_rows, share]`.

    The shares are consecutive parts of the vocabulary; everything from `vocab_size` on is padding.

    Filters apply in the order of Hugging Face's generate: temperature, top_k, top_p, then a floor. All equally likely
    tokens at a filter's edge are kept; among equal maxima, greedy takes the first. A row with unsound logits gives
    NOT_A_TOKEN, and a row without any allowed token gives NOTHING_LEFT.
    """
    sampled = draw(shares, rows, vocab_size) if form is Form.TPU else _sample_by_xla(shares, rows, vocab_size, form)
    return sampled if is_sound is None else jnp.where(is_sound, sampled, NOT_A_TOKEN)


def joined(shares: jax.Array, vocab_size: int) -> jax.Array:
    """Joins shares into logits `[num_rows, vocab_size]`, without the padding."""
    num_shares, num_rows, share = shares.shape
    logits = shares[0] if num_shares == 1 else shares.swapaxes(0, 1).reshape(num_rows, -1)
    return logits if num_shares * share == vocab_size else logits[:, :vocab_size]


def greedy_tokens(top: jax.Array, found: Survey) -> jax.Array:
    """Returns the greedy tokens of rows whose maxima are `top`."""
    return jnp.where(found.is_sound, jnp.where(top > NEVER, found.greedy, NOTHING_LEFT), NOT_A_TOKEN)


def _sample_by_xla(shares: jax.Array, rows: SamplingRows, vocab_size: int, form: Form = Form.XLA) -> jax.Array:
    logits = joined(shares, vocab_size)
    found = survey(logits, form)
    greedy = found.greedy
    drawn = jax.lax.cond(
        jnp.any(rows.temperature > 0),
        partial(_draw, form=form),
        lambda _logits, _rows, greedy: greedy,
        logits,
        rows,
        greedy,
    )
    sampled = jnp.where(rows.temperature > 0, drawn, greedy)
    top = jnp.take_along_axis(logits, greedy[:, None], axis=-1)[:, 0]
    return greedy_tokens(top, found._replace(greedy=sampled))


def _argmax_on_cpu(logits: jax.Array) -> jax.Array:
    """Returns the first maximum of each row: the first best block, then the first best within it.

    XLA on CPU finds a maximum many times faster than its index.
    """
    blocks = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % _ARGMAX_BLOCK)), constant_values=-jnp.inf)
    blocks = blocks.reshape(logits.shape[0], -1, _ARGMAX_BLOCK)
    best = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    within = jnp.argmax(jnp.take_along_axis(blocks, best[:, None, None], axis=1)[:, 0], axis=-1)
    return best * _ARGMAX_BLOCK + within


def _draw(logits: jax.Array, rows: SamplingRows, greedy: jax.Array, form: Form = Form.XLA) -> jax.Array:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    logits = _filter(logits / temperature[:, None], rows, form)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    cumulative = jnp.cumsum(weights, axis=-1)
    target = uniforms(rows)[:, None] * cumulative[:, -1:]
    return _first_past(target, cumulative, weights, greedy)


def _first_past(target: jax.Array, cumulative: jax.Array, weights: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Returns the first weighted token whose cumulative weight exceeds `target` `[num_rows, 1]`, i32 `[num_rows]`.

    The weight must be above 0 because each sum of a parallel scan rounds in its own way: one may grow slightly where
    the weight is 0. For the same reason there may be no such token; nor is there one if a temperature close to 0 made
    logits overflow. Such a row takes its `otherwise`.
    """
    vocab = weights.shape[-1]
    place = jnp.where((cumulative > target) & (weights > 0), jnp.arange(vocab, dtype=jnp.int32), vocab)
    first = jnp.min(place, axis=-1)
    return jnp.where(first < vocab, first, otherwise)


def _filter(logits: jax.Array, rows: SamplingRows, form: Form = Form.XLA) -> jax.Array:
    """Masks what top_k, then top_p, then a floor leave out, by a threshold each, without sorting the vocabulary.

    A filter that no row asks for is skipped.
    """
    is_cut, is_bounded = jnp.any(rows.top_k > 0), jnp.any((rows.top_p < 1.0) | rows.has_floor)
    logits = jax.lax.cond(is_cut, partial(_keep_top_k, form=form), lambda logits, _: logits, logits, rows)
    kept: jax.Array = jax.lax.cond(is_bounded, partial(_keep_mass, form=form), lambda logits, _: logits, logits, rows)
    return kept


def _keep_top_k(logits: jax.Array, rows: SamplingRows, form: Form) -> jax.Array:
    vocab = logits.shape[-1]
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)

    def enough_tokens(threshold: jax.Array) -> jax.Array:
        return jnp.sum(logits >= threshold, axis=-1, keepdims=True) >= top_k[:, None]

    return jnp.where(logits >= _highest(enough_tokens, logits, form), logits, NEVER)


def _keep_mass(logits: jax.Array, rows: SamplingRows, form: Form) -> jax.Array:
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    wanted = rows.top_p[:, None] * jnp.sum(weights, axis=-1, keepdims=True)

    def enough_mass(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(logits >= threshold, weights, 0.0), axis=-1, keepdims=True) >= wanted

    # A top_p that f32 rounds to 0 wants no mass at all, and still keeps the most likely token.
    kept = (logits >= jnp.minimum(_highest(enough_mass, logits, form), top)) | (rows.top_p[:, None] >= 1.0)
    return jnp.where(kept & (logits >= rows.columns.floor(top)), logits, NEVER)


def _highest(holds: Callable[[jax.Array], jax.Array], logits: jax.Array, form: Form) -> jax.Array:
    """Returns the highest f32 threshold for which `holds`, per row `[num_rows, 1]`, by bisection over all floats.

    `holds` is true for low thresholds, minus infinity included, and false for high ones. 32 halvings of the integers
    that order floats are exact.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds at low, not at high
        middle = low + (high - low) // 2
        ok = holds(ordered_to_float(middle))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    shape = (logits.shape[0], 1)
    low = jnp.full(shape, 0x007FFFFF, jnp.uint32)  # minus infinity
    high = jnp.full(shape, 0xFF800000, jnp.uint32)  # plus infinity
    # A CUDA graph can contain branches, but no loops: with a loop, the host would have to read each step's branch.
    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high), unroll=form is Form.GPU)
    return ordered_to_float(low)
