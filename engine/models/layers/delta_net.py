"""Gated delta nets, in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.config import DeltaNetConfig
from penstock.engine.models.layers.attention import LayerInputs
from penstock.engine.models.layers.basic import ACTIVATIONS, RMSNorm
from penstock.engine.models.layers.linear import Linear, present, project
from penstock.engine.models.layers.recurrence import StateBatch, StateCache
from penstock.engine.models.layers.token_loop import LoopStates, scan_tokens

F32 = jnp.float32


class DeltaNet(nnx.Module):
    """Computes `out(norm(delta_rule(q, k, v)) * silu(gate(x)))` (Yang et al., arXiv 2412.06464).

    Each value head keeps a matrix per sequence. The matrix forgets by `decay`, and the value stored for a token's key
    moves towards `v` by the fraction `beta`.

    The states are the inputs that the convolutions of queries, keys and values still read, in the model's type, and the
    matrices. Everything between the matmuls is computed token by token, in f32.
    """

    def __init__(self, config: DeltaNetConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        def linear(num_in: int, num_out: int) -> Linear:
            return Linear.plain(num_in, num_out, bias=False, dtype=dtype, rngs=rngs)

        def taps(channels: int) -> nnx.Param[jax.Array]:
            # The layout of a depthwise convolution in checkpoints: the newest token's factor is last.
            return nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (channels, 1, config.num_taps), dtype))

        keys, values = config.num_key_heads * config.key_dim, config.num_mixed
        self.q, self.k = linear(hidden_size, keys), linear(hidden_size, keys)
        self.v, self.gate = linear(hidden_size, values), linear(hidden_size, values)
        self.beta, self.decay = (linear(hidden_size, config.num_value_heads) for _ in range(2))
        self.q_taps, self.k_taps, self.v_taps = taps(keys), taps(keys), taps(values)
        self.a_log = nnx.Param(jnp.zeros((config.num_value_heads,), F32))
        self.dt_bias = nnx.Param(jnp.ones((config.num_value_heads,), F32))
        self.norm = RMSNorm(config.norm, config.value_dim, dtype=dtype)
        self.out = linear(values, hidden_size)
        self.config = config

    def __call__(self, x: jax.Array, step: LayerInputs, cache: StateCache) -> tuple[jax.Array, StateCache]:
        if step.states is None:
            raise TypeError("a step of a model that keeps states says which")
        config = self.config
        sizes = (config.key_dim, config.key_dim, config.value_dim, config.value_dim)
        heads = [
            part.reshape(-1, part.shape[1] // size, size) for part, size in zip(self.project(x), sizes, strict=True)
        ]
        inputs = DeltaInputs(*heads, *self.rates(x))
        results, cache = self.through(inputs, step.positions, step.states, cache)
        return self.out(results.reshape(x.shape[0], -1)), cache

    def through(
        self, inputs: DeltaInputs, positions: jax.Array, batch: StateBatch, cache: StateCache
    ) -> tuple[jax.Array, StateCache]:
        """Computes everything between the matmuls: results `[num_tokens, value_heads, value_dim]`, and the states."""
        return scan_tokens(self._token, inputs, jnp.zeros_like(inputs.gate), positions, batch, cache)

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """Returns queries, keys and values before their convolutions, and the gate, each `[num_tokens, heads *
        head_dim]`.
        """
        return project(x, self.inputs)

    def rates(self, x: jax.Array) -> Sequence[jax.Array]:
        """Returns the inputs of beta and decay, each f32 `[num_tokens, value_heads]`."""
        return project(x, self.rate_inputs, F32)

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return present(self.q, self.k, self.v, self.gate)

    @property
    def rate_inputs(self) -> tuple[Linear, ...]:
        return present(self.beta, self.decay)

    def _token(self, inputs: DeltaInputs, states: LoopStates) -> tuple[jax.Array, LoopStates]:
        """Computes one token's result, `[value_heads, value_dim]`, and the states after it."""
        (*kept, matrices), config = states, self.config
        windows = [jnp.concatenate([taps, new[None]]) for taps, new in zip(kept, inputs[:3], strict=True)]
        all_taps = (self.q_taps[...], self.k_taps[...], self.v_taps[...])
        q, k, v = (self._convolved(window, taps) for window, taps in zip(windows, all_taps, strict=True))
        copies = config.num_value_heads // config.num_key_heads
        q, k = (jnp.repeat(part, copies, axis=0) for part in (_normalized(q) * config.key_dim**-0.5, _normalized(k)))
        beta = jax.nn.sigmoid(inputs.beta)
        decay = jnp.exp(-jnp.exp(self.a_log[...]) * jax.nn.softplus(inputs.decay + self.dt_bias[...]))
        mixed, matrices = delta_rule(q, k, v, beta, decay, matrices)
        result = self.norm(mixed) * jax.nn.silu(inputs.gate.astype(F32))
        return result.astype(inputs.gate.dtype), (*(window[1:] for window in windows), matrices)

    def _convolved(self, window: jax.Array, taps: jax.Array) -> jax.Array:  # [num_taps, heads, head_dim] -> f32
        """Convolves one token's inputs with those before it, summed oldest first."""
        factors = taps.astype(F32).reshape(*window.shape[1:], -1)
        total = window[0].astype(F32) * factors[..., 0]
        for place in range(1, window.shape[0]):
            total = total + window[place].astype(F32) * factors[..., place]
        return ACTIVATIONS[self.config.activation](total)


class DeltaInputs(NamedTuple):
    """The inputs of a step's tokens; of a single token, without the first axis."""

    q: jax.Array  # [num_tokens, key_heads, key_dim]
    k: jax.Array  # [num_tokens, key_heads, key_dim]
    v: jax.Array  # [num_tokens, value_heads, value_dim]
    gate: jax.Array  # [num_tokens, value_heads, value_dim]
    beta: jax.Array  # f32 [num_tokens, value_heads]
    decay: jax.Array  # f32 [num_tokens, value_heads]


def delta_rule(
    q: jax.Array,  # f32 [heads, key_dim]
    k: jax.Array,  # f32 [heads, key_dim]
    v: jax.Array,  # f32 [heads, value_dim]
    beta: jax.Array,  # f32 [heads]
    decay: jax.Array,  # f32 [heads]
    matrices: jax.Array,  # f32 [heads, key_dim, value_dim]
) -> tuple[jax.Array, jax.Array]:
    """Returns what one token's query reads, `[heads, value_dim]`, and the matrices with its value added.

    The result is read from the old matrices, and the token's own contribution is added to it. So matrices are read
    once, for key and query together, and once more to be updated.
    """
    read = jnp.einsum(
        "hnk,hkv->hnv",
        jnp.stack([q, k], axis=1),
        matrices,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=F32,
    )
    decay, beta = decay[:, None], beta[:, None]
    change = beta * (v - decay * read[:, 1])
    result = decay * read[:, 0] + jnp.sum(q * k, axis=1, keepdims=True) * change
    return result, decay[..., None] * matrices + k[:, :, None] * change[:, None, :]


def _normalized(x: jax.Array) -> jax.Array:
    """Scales each head's vector to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
