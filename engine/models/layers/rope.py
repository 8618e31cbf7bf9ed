"""Rotary position embeddings (Su et al., arXiv 2104.09864) and the ways their frequencies are scaled for long contexts.

The numbers follow `transformers` to the last bit but for a few roundings: at position 100,000 an error of one part in
2^23 rotates a head by a hundredth of a radian.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.errors import ConfigError
from penstock.engine.models.config import QueryScale, RopeConfig

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""The kinds that any family may have."""

Rotary: TypeAlias = tuple[jax.Array, jax.Array]
"""Cosines and sines of positions, each f32 `[num_tokens, pairs of features]`."""


def rotary_tables(positions: jax.Array, rope: RopeConfig, lengths: jax.Array | None = None) -> Rotary:
    """Returns the tables for `positions`. `lengths`, i32 like them, are the lengths of the tokens' sequences; None: the
    length up to each token.
    """
    inv_freq, scale = rotary_frequencies(rope)
    frequencies = jnp.asarray(inv_freq)[None, :]
    if rope.length_rule is not None:
        lengths = positions + 1 if lengths is None else lengths
        is_long = lengths[:, None] > rope.original_max_position
        frequencies = jnp.where(is_long, _frequencies_of_long(rope, lengths), frequencies)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    cos, sin = jax.lax.platform_dependent(angles, cpu=_waves_on_cpu, default=lambda x: (jnp.cos(x), jnp.sin(x)))
    return cos * scale, sin * scale


def _waves_on_cpu(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes cosines and sines in a loop, whose results are kept: XLA on CPU would recompute cosines for every head
    of every layer.
    """
    cos, sin = jax.lax.map(lambda i: jax.lax.switch(i, (jnp.cos, jnp.sin), angles), jnp.arange(2))
    return cos, sin


def rotate(x: jax.Array, tables: Rotary, *, interleaved: bool = False) -> jax.Array:
    """Applies rotary positions to `x` `[num_tokens, num_heads, head_dim]`, with halves paired, or `interleaved`
    neighbours.

    Features beyond those of `tables` stay as they are.
    """
    forms = {"tpu": partial(_rotate_by_matmul, interleaved=interleaved)}
    rotated: jax.Array = jax.lax.platform_dependent(
        x, *tables, **forms, default=partial(_rotate_pairs, interleaved=interleaved)
    )
    return rotated


def _rotate_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    cos, sin = cos[:, None, :], sin[:, None, :]
    dim = 2 * cos.shape[-1]
    x32 = x[..., :dim].astype(jnp.float32)
    x1, x2 = (x32[..., ::2], x32[..., 1::2]) if interleaved else jnp.split(x32, 2, axis=-1)
    pairs = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    joined = jnp.stack(pairs, axis=-1).reshape(x32.shape) if interleaved else jnp.concatenate(pairs, axis=-1)
    rotated = joined.astype(x.dtype)
    return rotated if dim == x.shape[-1] else jnp.concatenate([rotated, x[..., dim:]], axis=-1)


def _rotate_by_matmul(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotates by a matmul with a matrix of ones and zeros, for devices on which moving features along the lanes takes
    longer. The matmul is exact, and everything else is fused into it.
    """
    dim, head_dim = 2 * cos.shape[-1], x.shape[-1]
    place = np.arange(dim)
    partner = place ^ 1 if interleaved else (place + dim // 2) % dim
    swap = np.zeros((head_dim, head_dim), np.float32)
    swap[partner, place] = 1
    if interleaved:
        signed = jnp.stack([-sin, sin], axis=-1).reshape(sin.shape[0], dim)
        cos = jnp.repeat(cos, 2, axis=-1)
    else:
        signed, cos = jnp.concatenate([-sin, sin], axis=-1), jnp.concatenate([cos, cos], axis=-1)
    rest = ((0, 0), (0, head_dim - dim))
    cos, signed = jnp.pad(cos, rest, constant_values=1)[:, None], jnp.pad(signed, rest)[:, None]
    partners = jnp.einsum(
        "thd,de->the",
        x,
        jnp.asarray(swap, x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (x.astype(jnp.float32) * cos + partners * signed).astype(x.dtype)


def query_scales(positions: jax.Array, scale: QueryScale) -> jax.Array:
    """Returns the factors of queries at `positions`, f32 (Llama 4's attention temperature; Ministral 3 has it too)."""
    return 1 + scale.beta * jnp.log(1 + (positions // scale.original_max_position).astype(jnp.float32))


def rotary_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Returns inverse frequencies, f32 `[pairs of features]`, and the factor of cosines and sines.

    With a length rule, these are for sequences up to the original length.
    """
    # An f32 power is off by up to 2 units in the last place, differently in each library: round an f64 one instead.
    powers = (rope.theta ** _exponents(rope).astype(np.float64)).astype(np.float32)
    inv_freq = np.float32(1.0) / powers
    if rope.kind in ("default", "dynamic"):
        return inv_freq, 1.0
    if rope.kind == "proportional":
        stands_still = np.arange(len(inv_freq)) >= rope.num_turning
        return np.where(stands_still, np.float32(0), inv_freq) / np.float32(rope.factor), 1.0
    if rope.kind == "longrope":
        return np.float32(1.0) / (np.array(rope.short_factors, np.float32) * powers), _longrope_attention_factor(rope)
    if rope.kind == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, inv_freq), _yarn_attention_factor(rope)
    raise ConfigError(f"rope kind {rope.kind!r} is not one of {', '.join(ROPE_KINDS)}, proportional")


def _exponents(rope: RopeConfig) -> np.ndarray:
    exponents: np.ndarray = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    return exponents


def _frequencies_of_long(rope: RopeConfig, lengths: jax.Array) -> jax.Array:
    """Returns frequencies for sequences longer than the original length, f32 `[num_tokens or 1, pairs of features]`."""
    if rope.kind == "longrope":
        frequencies, _ = rotary_frequencies(replace(rope, short_factors=rope.long_factors))
        return jnp.asarray(frequencies)[None, :]
    # Dynamic NTK: the base grows with the length (https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr).
    growth = rope.factor * lengths.astype(jnp.float32) / rope.original_max_position - (rope.factor - 1)
    bases = rope.theta * jnp.maximum(growth, 1.0) ** (rope.dim / (rope.dim - 2))
    return 1.0 / bases[:, None] ** jnp.asarray(_exponents(rope))[None, :]


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """Returns the attention factor of LongRoPE (Ding et al., arXiv 2402.13753)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


def _llama3_frequencies(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Scales as in Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    rotations = rope.original_max_position * inv_freq / np.float32(2 * math.pi)  # within the original context
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    scaled: np.ndarray = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    return scaled.astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Scales as in YaRN (Peng et al., arXiv 2309.00071): a ramp between unchanged and interpolated frequencies."""

    def dim_of(rotations: float) -> float:
        """Returns the dimension that rotates this many times within the original context."""
        return rope.dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / width, 0.0, 1.0)
    scaled: np.ndarray = inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)
    return scaled.astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
