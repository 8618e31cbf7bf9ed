"""The gated delta rule on TPU, with everything between the matmuls of a delta net: convolutions, norms, rates, gates.

One step of the grid is one token. The state after it is in the block that its sequence is going to write, which stays
in VMEM from the first token with that target to the last. A decoding token reads and writes its state once, while those
of its neighbours in the grid are in flight, and a prompt's tokens find it in place. Every token runs the same
instructions on the same shapes: its result depends only on its inputs and on the state before it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.kernels.pallas import Ref
from penstock.engine.kernels.tpu.form import LANES
from penstock.engine.kernels.tpu.vmem import VMEM_BYTES

F32 = jnp.float32
GATED_DELTA_RULE = "gated_delta_rule"
"""The kernel's name in a compiled program."""
MOST_STATE_BYTES = 8 * 2**20  # of a device's share of one state; VMEM holds five of them

_IS_REAL, _BEGINS, _HAS_PAST, _GOES_ON, _IS_LEFT = (1 << bit for bit in range(5))

_States = tuple[jax.Array, ...]


class DeltaTokens(NamedTuple):
    """The results of the matmuls for a step's tokens."""

    q: jax.Array  # [num_tokens, key_heads, key_dim]
    k: jax.Array  # [num_tokens, key_heads, key_dim]
    v: jax.Array  # [num_tokens, value_heads, value_dim]
    gate: jax.Array  # [num_tokens, value_heads, value_dim]
    rates: jax.Array  # f32 [num_tokens, 2, value_heads]: the inputs of beta and decay


class DeltaWeights(NamedTuple):
    """The weights of a layer, f32."""

    q_taps: jax.Array  # [num_taps, key_heads, key_dim]: that of the oldest input first
    k_taps: jax.Array  # [num_taps, key_heads, key_dim]
    v_taps: jax.Array  # [num_taps, value_heads, value_dim]
    exponents: jax.Array  # [value_heads]: -exp(a_log)
    dt_bias: jax.Array  # [value_heads]
    norm: jax.Array  # [value_dim]


class TokenSlots(NamedTuple):
    """The state that each token continues from, and the block that its sequence is going to write; i32 [num_tokens]."""

    reads: jax.Array
    writes: jax.Array
    flags: jax.Array

    @classmethod
    def of(
        cls,
        positions: jax.Array,  # i32 [num_tokens]
        reads: jax.Array,  # i32 [max_seqs]; the others are as in StateBatch
        ends: jax.Array,
        writes: jax.Array,
        rows: jax.Array,
        offsets: jax.Array,
        first_slot: int | jax.Array,
    ) -> TokenSlots:
        """Derives the slots of a step.

        A token is not computed if its sequence writes no state after it, nor is padding.
        """
        num_tokens = positions.shape[0]
        behind = jnp.zeros(num_tokens + 1, jnp.int32).at[jnp.where(writes > 0, ends, num_tokens)].set(writes)
        behind = behind[:num_tokens]
        numbers = jnp.arange(num_tokens)
        end = lax.cummin(jnp.where(behind > 0, numbers, num_tokens), reverse=True)
        found = jnp.minimum(end, num_tokens - 1)
        is_real = (end < num_tokens) & (rows[found] == rows)
        slots = jnp.where(is_real, behind[found], 0)
        goes_on = (offsets > 0) & (jnp.roll(behind, 1) > 0)
        is_left = (behind > 0) & (numbers + 1 < num_tokens) & (jnp.roll(offsets, -1) > 0)
        flags = (
            is_real * _IS_REAL
            + (offsets == 0) * _BEGINS
            + (positions > 0) * _HAS_PAST
            + goes_on * _GOES_ON
            + is_left * _IS_LEFT
        )
        return cls(first_slot + reads[rows], first_slot + slots, flags.astype(jnp.int32))


def gated_delta_rule(
    tokens: DeltaTokens,
    weights: DeltaWeights,
    slots: TokenSlots,
    states: _States,  # [slots, num_taps - 1, heads, dim] of q, k, v, and f32 [slots, value_heads, key_dim, value_dim]
    *,
    num_writes: int,  # for the cost estimate
    eps: float,  # for the norm of results
    interpret: Any = False,  # as for pallas_call
) -> tuple[jax.Array, _States]:
    """Returns `norm(delta_rule(q, k, v)) * silu(gate)`, `[num_tokens, value_heads, value_dim]`, and the states, updated
    in place. Results of tokens that are not computed are zeros.
    """
    num_tokens, (value_heads, key_dim, value_dim) = tokens.q.shape[0], states[3].shape[1:]
    lanes = -(-value_heads // LANES) * LANES
    padding = (0, lanes - value_heads)
    rates = jnp.pad(tokens.rates, ((0, 0), (0, 0), padding))
    held = [*weights[:3], jnp.pad(weights.exponents, padding)[None], jnp.pad(weights.dt_bias, padding)[None]]
    held.append(weights.norm[None])
    inputs = (*tokens[:4], rates)
    state_bytes = sum(state.nbytes // state.shape[0] for state in states)
    moved = 2 * min(num_writes, num_tokens) * state_bytes + tokens.gate.nbytes
    moved += sum(array.nbytes for array in (*inputs, *held))
    y = jax.ShapeDtypeStruct(tokens.gate.shape, tokens.gate.dtype)
    run = pl.pallas_call(
        partial(_kernel, eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_tokens,),
            in_specs=[*map(_token_spec, inputs), *map(_whole, held), *(_slot_spec(state, 0) for state in states)],
            out_specs=[_token_spec(tokens.gate), *(_slot_spec(state, 1) for state in states)],
            scratch_shapes=[
                *(pltpu.VMEM(state.shape[1:], state.dtype) for state in states),
                *(pltpu.VMEM(part.shape[1:], F32) for part in tokens[:3]),
                *(pltpu.VMEM((lanes, value_dim), F32) for _ in range(2)),
                pltpu.VMEM((value_heads, value_dim), F32),
            ],
        ),
        # In HBM, otherwise XLA moves small ones to VMEM and back around each call. libtpu refuses that for arguments
        # of the whole program, but not for those of a loop in it.
        out_shape=[y, *(pltpu.HBM(state.shape, state.dtype) for state in states)],
        input_output_aliases={3 + len(inputs) + len(held) + place: 1 + place for place in range(len(states))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=8 * num_tokens * value_heads * key_dim * value_dim, transcendentals=0, bytes_accessed=moved
        ),
        interpret=interpret,
        name=GATED_DELTA_RULE,
    )
    y, *changed = run(*slots, *inputs, *held, *states)
    return y, tuple(changed)


def _token_spec(array: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec((1, *array.shape[1:]), lambda t, *_: (t, *(0 for _ in array.shape[1:])))


def _whole(array: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _slot_spec(state: jax.Array, which: int) -> pl.BlockSpec:
    """Returns the spec of each token's slot, by its `reads` or `writes`."""
    return pl.BlockSpec((1, *state.shape[1:]), lambda t, *slots: (slots[which][t], *(0 for _ in state.shape[1:])))


def _kernel(eps: float, reads: Ref, writes: Ref, flags: Ref, *refs: Ref) -> None:
    del reads, writes  # used by the block specs
    q, k, v, gate, rates, *rest = refs
    weights, before, (y, *own), left = rest[:6], rest[6:10], rest[10:15], rest[15:19]
    rows, (betas, decays, results) = rest[19:22], rest[22:]
    flag = flags[pl.program_id(0)]

    @pl.when(flag & _IS_REAL == 0)
    def _skip() -> None:
        y[...] = jnp.zeros_like(y)

    @pl.when(flag & _IS_REAL > 0)
    def _compute() -> None:
        @pl.when(flag & (_BEGINS | _HAS_PAST) == _BEGINS)
        def _begin() -> None:
            for state in own:
                state[...] = jnp.zeros_like(state)

        @pl.when(flag & (_BEGINS | _HAS_PAST) == _BEGINS | _HAS_PAST)
        def _read() -> None:
            for state, kept in zip(own, before, strict=True):
                state[...] = kept[...]

        @pl.when(flag & _GOES_ON > 0)
        def _go_on() -> None:
            for state, kept in zip(own, left, strict=True):
                state[0] = kept[...]

        for part, kept, taps, row in zip((q, k, v), own[:3], weights[:3], rows, strict=True):
            row[...] = _convolved(part, kept, taps)
        rows[0][...] = _normalized(rows[0][...]) * rows[0].shape[1] ** -0.5
        rows[1][...] = _normalized(rows[1][...])
        betas[...] = _along_lanes(_sigmoid(rates[0, :1]), betas)
        x = rates[0, 1:] + weights[4][...]
        softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        decays[...] = _along_lanes(jnp.exp(weights[3][...] * softplus), decays)
        lax.fori_loop(0, q.shape[1], partial(_head, rows, betas, decays, own[3], results), None)
        mixed = results[...]
        normed = mixed * lax.rsqrt(jnp.mean(mixed * mixed, axis=1, keepdims=True) + eps) * weights[5][...]
        y[0] = (normed * _silu(gate[0].astype(F32))).astype(y.dtype)

        @pl.when(flag & _IS_LEFT > 0)
        def _leave() -> None:
            for kept, state in zip(left, own, strict=True):
                kept[...] = state[0]


def _head(rows: list[Ref], betas: Ref, decays: Ref, matrices: Ref, results: Ref, number: Any, _: None) -> None:
    """Computes a key head, and the value heads that it serves."""
    q, k = (row[pl.ds(number, 1), :] for row in rows[:2])
    key_dim, value_dim = matrices.shape[2:]
    q_column, k_column = (jnp.broadcast_to(row, (value_dim, key_dim)).T for row in (q, k))
    qk = jnp.sum(q * k, axis=1, keepdims=True)
    copies = matrices.shape[1] // rows[0].shape[0]
    for copy in range(copies):
        head = number * copies + copy
        matrix, own = matrices[0, head], pl.ds(head, 1)
        beta, decay = betas[own, :], decays[own, :]
        of_q = jnp.sum(q_column * matrix, axis=0, keepdims=True)
        of_k = jnp.sum(k_column * matrix, axis=0, keepdims=True)
        change = beta * (rows[2][own, :] - decay * of_k)
        results[own, :] = decay * of_q + qk * change
        matrices[0, head] = decay * matrix + k_column * change


def _convolved(new: Ref, kept: Ref, taps: Ref) -> jax.Array:  # [1, heads, dim], [1, num_taps - 1, heads, dim] -> f32
    """Convolves a token's inputs with the kept ones of earlier tokens, and updates what is kept."""
    num_kept = kept.shape[1]
    window = [*(kept[0, place] for place in range(num_kept)), new[0]]
    total = window[0].astype(F32) * taps[0]
    for place in range(1, num_kept + 1):
        total = total + window[place].astype(F32) * taps[place]
    for place in range(num_kept):
        kept[0, place] = window[place + 1]
    return _silu(total)


def _along_lanes(row: jax.Array, to: Ref) -> jax.Array:  # [1, heads] -> [heads, dim]
    return jnp.broadcast_to(row, to.shape[::-1]).T


def _normalized(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _silu(x: jax.Array) -> jax.Array:
    return x * _sigmoid(x)
