"""Rotary position embeddings (Su et al., arXiv 2104.09864) and the ways their frequencies are scaled for long contexts.

The numbers follow `transformers` to the last bit but for a few roundings: at position 100,000 an error of one part in
2^23 rotates a head by a hundredth of a radian.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.errors import ConfigError
from penstock.engine.models.config import QueryScale, RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "yarn")

Rotary: TypeAlias = tuple[jax.Array, jax.Array]
"""Cosines and sines of positions, each f32 `[num_tokens, pairs of features]`."""


def rotary_tables(positions: jax.Array, rope: RopeConfig) -> Rotary:
    inv_freq, scale = rotary_frequencies(rope)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq)[None, :]
    cos, sin = jax.lax.platform_dependent(angles, cpu=_waves_on_cpu, default=lambda x: (jnp.cos(x), jnp.sin(x)))
    return cos * scale, sin * scale


def _waves_on_cpu(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """In a loop, whose results are kept: XLA on CPU would compute cosines again for every head of every layer."""
    cos, sin = jax.lax.map(lambda i: jax.lax.switch(i, (jnp.cos, jnp.sin), angles), jnp.arange(2))
    return cos, sin


def rotate(x: jax.Array, tables: Rotary, *, interleaved: bool = False) -> jax.Array:
    """Applies rotary positions to `x` `[num_tokens, num_heads, head_dim]`, halves paired, or `interleaved` neighbours.

    Features behind those that `tables` are for stay as they are.
    """
    cos, sin = (table[:, None, :] for table in tables)
    dim = 2 * cos.shape[-1]
    x32 = x[..., :dim].astype(jnp.float32)
    x1, x2 = (x32[..., ::2], x32[..., 1::2]) if interleaved else jnp.split(x32, 2, axis=-1)
    pairs = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    joined = jnp.stack(pairs, axis=-1).reshape(x32.shape) if interleaved else jnp.concatenate(pairs, axis=-1)
    rotated = joined.astype(x.dtype)
    return rotated if dim == x.shape[-1] else jnp.concatenate([rotated, x[..., dim:]], axis=-1)


def query_scales(positions: jax.Array, scale: QueryScale) -> jax.Array:
    """Of queries at `positions`, f32 (Llama 4's temperature of attention, which Ministral 3 has too)."""
    return 1 + scale.beta * jnp.log(1 + (positions // scale.original_max_position).astype(jnp.float32))


def rotary_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies f32 `[pairs of features]` and the factor that cosines and sines are multiplied by."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    # An f32 power is off by up to 2 units in the last place, differently so in each library: round a f64 one instead.
    inv_freq = np.float32(1.0) / (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    if rope.kind == "default":
        return inv_freq, 1.0
    if rope.kind == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, inv_freq), _yarn_attention_factor(rope)
    raise ConfigError(f"rope kind {rope.kind!r} is not one of {', '.join(ROPE_KINDS)}")


def _llama3_frequencies(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    rotations = rope.original_max_position * inv_freq / np.float32(2 * math.pi)  # within the original context
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    scaled: np.ndarray = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    return scaled.astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """YaRN (Peng et al., arXiv 2309.00071): a ramp between unchanged and interpolated frequencies."""

    def dim_of(rotations: float) -> float:
        """The dimension that rotates this many times within the original context."""
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
