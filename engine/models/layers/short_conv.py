"""Short convolutions, in place of attention."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.config import ShortConvConfig
from penstock.engine.models.layers.attention import LayerInputs
from penstock.engine.models.layers.linear import Linear, present, project
from penstock.engine.models.layers.recurrence import StateBatch, StateCache


class ShortConv(nnx.Module):
    """Computes `out(behind(x) * conv(before(x) * input(x)))`: a causal convolution of each channel by itself, between
    two gates (LFM2, Liquid AI 2025).

    The state is the earlier inputs that the convolution still reads, in the model's type. A result is summed in f32,
    oldest token first, from the same numbers wherever they come from. So nothing depends on how a prompt is split.
    """

    def __init__(self, config: ShortConvConfig, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        def linear(num_in: int, num_out: int) -> Linear:
            return Linear.plain(num_in, num_out, bias=config.bias, dtype=dtype, rngs=rngs)

        self.before = linear(hidden_size, config.channels)
        self.behind = linear(hidden_size, config.channels)
        self.input = linear(hidden_size, config.channels)
        self.out = linear(config.channels, hidden_size)
        init = nnx.initializers.normal(0.02)
        # The layout of a depthwise convolution in checkpoints: the newest token's factor is last.
        self.taps = nnx.Param(init(rngs.params(), (config.channels, 1, config.num_taps), dtype))
        self.taps_bias = nnx.Param(jnp.zeros((config.channels,), dtype)) if config.bias else None
        self.config = config

    def __call__(self, x: jax.Array, step: LayerInputs, cache: StateCache) -> tuple[jax.Array, StateCache]:
        before, behind, inputs = self.project(x)
        if step.states is None:
            raise TypeError("a step of a model that keeps states says which")
        convolved, cache = self.convolved(before * inputs, step.positions, step.states, cache)
        return self.out(behind * convolved), cache

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """Returns the gate before the convolution, the one after it, and its input, each `[num_tokens, channels]`."""
        return project(x, self.inputs)

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return present(self.before, self.behind, self.input)

    def convolved(
        self,
        inputs: jax.Array,  # [num_tokens, channels]
        positions: jax.Array,  # i32 [num_tokens]
        batch: StateBatch,
        cache: StateCache,
    ) -> tuple[jax.Array, StateCache]:
        """Returns the convolution's result, and the states with this step's inputs."""
        (states,), first = cache
        window = _window(inputs, positions, batch, states[first + batch.reads])
        taps = self.taps[...].astype(jnp.float32)
        total = window[0].astype(jnp.float32) * taps[:, 0, 0]
        for place, tap in enumerate(window[1:], 1):
            total = total + tap.astype(jnp.float32) * taps[:, 0, place]
        if self.taps_bias is not None:
            total = total + self.taps_bias[...].astype(jnp.float32)
        kept = jnp.stack([tap[batch.ends] for tap in window[1:]], axis=1)
        return total.astype(inputs.dtype), cache._replace(arrays=(states.at[first + batch.writes].set(kept),))


def _window(
    inputs: jax.Array, positions: jax.Array, batch: StateBatch, states: jax.Array
) -> list[jax.Array]:  # [max_seqs, num_taps - 1, channels] -> num_taps times [num_tokens, channels]
    """Returns what each token convolves over, oldest first: inputs of its sequence from this step, or from the state
    for those of an earlier step. They are zeros before the sequence's beginning.
    """
    num_kept = states.shape[1]
    window = [inputs]
    for back in range(1, num_kept + 1):
        place = jnp.clip(num_kept - back + batch.offsets, 0, num_kept - 1)
        earlier = jnp.where((batch.offsets >= back)[:, None], jnp.roll(inputs, back, axis=0), states[batch.rows, place])
        window.append(jnp.where((positions >= back)[:, None], earlier, 0))
    return window[::-1]
