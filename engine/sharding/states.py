"""Delta nets by a TPU kernel: each device has its own heads and its own parts of the states."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from penstock.engine.kernels.tpu import (
    LANES,
    MOST_STATE_BYTES,
    DeltaTokens,
    DeltaWeights,
    TokenSlots,
    gated_delta_rule,
)
from penstock.engine.models.config import DeltaNetConfig
from penstock.engine.models.layers.delta_net import DeltaInputs, DeltaNet
from penstock.engine.models.layers.recurrence import StateBatch, StateCache
from penstock.engine.sharding.placement import Placement

F32 = jnp.float32
_KEYS, _VALUES = "key_heads", "value_heads"
_WHOLE: Any = PartitionSpec()


def has_kernel(config: DeltaNetConfig, placement: Placement | None) -> bool:
    """Whether heads are whole tiles, and a device's share of a state fits into VMEM as often as needed."""
    shares = 1 if placement is None else placement.ways(_VALUES)
    state_bytes = config.num_value_heads // shares * config.key_dim * config.value_dim * 4
    return (
        config.key_dim % LANES == 0
        and config.value_dim % LANES == 0
        and config.activation in ("silu", "swish")
        and state_bytes <= MOST_STATE_BYTES
    )


class KernelDeltaNet(DeltaNet):
    """A `DeltaNet` that runs as a kernel, with the same parameters."""

    def __init__(self, net: DeltaNet, placement: Placement | None, *, interpret: bool) -> None:
        for name, value in vars(net).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        self.placement, self.interpret = placement, interpret

    def through(
        self, inputs: DeltaInputs, positions: jax.Array, batch: StateBatch, cache: StateCache
    ) -> tuple[jax.Array, StateCache]:
        tokens = DeltaTokens(*inputs[:4], jnp.stack([inputs.beta, inputs.decay], axis=1))
        slots = TokenSlots.of(
            positions, batch.reads, batch.ends, batch.writes, batch.rows, batch.offsets, cache.first_slot
        )
        num_seqs = batch.reads.shape[0]
        run = partial(gated_delta_rule, num_writes=num_seqs, eps=self.config.norm.eps, interpret=self.interpret)
        if self.placement is not None:
            run = self._shard_run(run, self.placement)
        results, arrays = run(tokens, self._weights(), slots, cache.arrays)
        return results, cache._replace(arrays=arrays)

    def _weights(self) -> DeltaWeights:
        config = self.config

        def turned_taps(taps: Any, heads: int, size: int) -> jax.Array:  # [channels, 1, num_taps]
            turned: jax.Array = taps[...].astype(F32)[:, 0].T.reshape(-1, heads, size)
            return turned

        return DeltaWeights(
            turned_taps(self.q_taps, config.num_key_heads, config.key_dim),
            turned_taps(self.k_taps, config.num_key_heads, config.key_dim),
            turned_taps(self.v_taps, config.num_value_heads, config.value_dim),
            -jnp.exp(self.a_log[...].astype(F32)),
            self.dt_bias[...].astype(F32),
            self.norm.factors(F32),
        )

    def _shard_run(self, run: Any, placement: Placement) -> Any:
        axes = [(None, _KEYS, None), (None, _VALUES, None), (None, None, _VALUES), (_VALUES,)]
        specs: Any = [placement.spec(each) for each in axes]
        keys, values, rates, own = specs
        of_states = tuple(placement.spec((None, *array.axes)) for array in self.config.states("bfloat16"))
        return jax.shard_map(
            run,
            mesh=placement.mesh,
            in_specs=(
                DeltaTokens(keys, keys, values, values, rates),
                DeltaWeights(keys, keys, values, own, own, _WHOLE),
                TokenSlots(_WHOLE, _WHOLE, _WHOLE),
                of_states,
            ),
            out_specs=(values, of_states),
            check_vma=False,
        )
