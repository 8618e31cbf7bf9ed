"""A decoder's blocks as calls of a CPU kernel, `engine/kernels/cpu/block.cc`: one call for all of them if possible."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.kernels.cpu import value_or_empty
from penstock.engine.kernels.cpu.halves import (
    ATTENTION_HALF,
    DELTA_NET,
    FEED_FORWARD,
    SHORT_CONV,
    Half,
    run_halves,
)
from penstock.engine.kernels.cpu.layout import batch_arrays
from penstock.engine.models.attention_interface import AttentionOptions, GroupCache, LayerCache, NativeAttend
from penstock.engine.models.block import Block, Cache
from penstock.engine.models.config import AttentionConfig
from penstock.engine.models.cpu.held import Panels
from penstock.engine.models.cpu.panels import pack_halves
from penstock.engine.models.decoder import Decoder, WantedTokens, select_wanted
from penstock.engine.models.layer_groups import StatePlace, layer_groups
from penstock.engine.models.layers.attention import Attention, LayerInputs
from penstock.engine.models.layers.basic import GatedMLP, LayerNorm, RMSNorm
from penstock.engine.models.layers.delta_net import DeltaNet
from penstock.engine.models.layers.experts import Experts
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.recurrence import StateCache
from penstock.engine.models.layers.rope import query_scales
from penstock.engine.models.layers.short_conv import ShortConv


@dataclass(frozen=True, slots=True)
class _Matmul:
    """A matmul of a half, with all that a kernel takes of it."""

    held: Panels
    operands: dict[str, jax.Array]

    @classmethod
    def of(cls, linear: Linear) -> _Matmul | None:
        """Returns None if there is no kernel for it."""
        held = linear.held
        return cls(held, held.operands(linear.arrays, linear.bias_value)) if isinstance(held, Panels) else None


_Matmuls = tuple[_Matmul, ...]
"""The matmuls of a half, in order."""
_SILU = ("silu", "swish")
_RECURRENCE_FACTORS = {
    SHORT_CONV.name: ("taps", "taps_bias"),
    DELTA_NET.name: ("q_taps", "k_taps", "v_taps", "exponents", "dt_bias", "norm"),
}


def pack_blocks(model: Decoder, library: ctypes.CDLL) -> Decoder:
    """Returns the model, which must not be stacked, with packed blocks. Blocks are replaced one at a time, so that only
    one is ever in memory twice.
    """
    for number, block in enumerate(model.blocks):
        model.blocks[number] = pack_block(block, library)
    return PackedDecoder(model)


def pack_block(block: Block, library: ctypes.CDLL) -> PackedBlock:
    """Returns the block, which is used up, with its matmuls packed.

    Queries, keys and values become one matmul; gate and up another, with the activation in it.
    """
    pack_halves(block, library)
    return PackedBlock(block)


class PackedDecoder(Decoder):
    """A decoder that computes all its layers in one call if the kernel supports all of them, otherwise one by one."""

    def __init__(self, model: Decoder) -> None:
        _take_over(self, model)

    def _layers(
        self,
        x: jax.Array,
        step: LayerInputs,
        caches: tuple[LayerCache, ...],
        wanted: WantedTokens | None,
        vectors: jax.Array | None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        halves = self._halves(x, step, caches)
        if halves is None:
            return super()._layers(x, step, caches, wanted, vectors)
        x, changed = run_halves(x, halves[:-1])
        if wanted is not None:  # the last feed-forward is computed only for these tokens
            x, step = x[wanted.tokens], select_wanted(step, wanted)
        written = dict(zip(self._arrays, changed, strict=True))
        return self.blocks[-1].feed_forward(x, x, step), tuple(written[array] for array in range(len(caches)))

    def _halves(self, x: jax.Array, step: LayerInputs, caches: tuple[LayerCache, ...]) -> list[Half] | None:
        """Returns the halves of all layers in order. None if a layer lacks one, or if two layers have their pages in
        one array.
        """
        arrays, places = self._arrays, layer_groups(self.config).places
        if len(set(arrays)) < len(arrays):
            return None
        halves: list[Half | None] = []
        for block, place, array in zip(cast("list[PackedBlock]", self.blocks), places, arrays, strict=True):
            if isinstance(place, StatePlace):
                halves.append(block.recurrence_half(step, StateCache(caches[array])))
            else:
                halves.append(block.attention_half(step, GroupCache(caches[array], place.group)))
            halves.append(None if block.is_parallel or block.has_end else block.feed_forward_half(x, step))
        return None if None in halves else cast("list[Half]", halves)

    @property
    def _arrays(self) -> list[int]:
        """Index, for each layer, of the cache with its pages or states."""
        groups = layer_groups(self.config)
        return [
            groups.state_array(place) if isinstance(place, StatePlace) else groups.page_array(place)
            for place in groups.places
        ]


class PackedBlock(Block):
    """A block that computes each half in one call if the kernel supports all of it, and otherwise like any block."""

    def __init__(self, block: Block) -> None:
        _take_over(self, block)
        self.attention_factors = nnx.List([_factors_of(block.attention_norm), _factors_of(block.attention_out_norm)])
        read_norm = block.attention_norm if block.is_parallel else block.mlp_norm
        self.mlp_factors = nnx.List([_factors_of(read_norm), _factors_of(block.mlp_out_norm)])
        has_attention = block.config.has_attention
        self.head_factors = nnx.List(_head_factors(block.attention) if has_attention else [])
        sinks = block.attention.sinks if has_attention else None
        self.sinks = None if sinks is None else nnx.Param(sinks[...].astype(jnp.float32))
        self.recurrence_factors = nnx.List([] if block.recurrence is None else _recurrence_factors(block.recurrence))

    def attend(
        self, x: jax.Array, step: LayerInputs, cache: Cache, squares: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        if isinstance(cache, GroupCache):
            half = self.attention_half(step, cache)
            if half is not None:
                x, (pages,) = run_halves(x, [half])
                return x, cache._replace(pages=pages)
        else:
            half = self.recurrence_half(step, cache)
            if half is not None:
                x, (arrays,) = run_halves(x, [half])
                return x, cache._replace(arrays=arrays)
        return super().attend(x, step, cache, squares)

    def feed_forward(self, x: jax.Array, before: jax.Array, step: LayerInputs) -> jax.Array:
        half = self.feed_forward_half(before, step)
        return super().feed_forward(x, before, step) if half is None else self.ended(run_halves(x, [half])[0], step)

    @property
    def has_end(self) -> bool:
        """Whether anything follows the feed-forward, which the kernel does not support."""
        return self.per_layer is not None or self.scalar is not None

    def attention_half(self, step: LayerInputs, cache: GroupCache) -> Half | None:
        """Returns the half as a kernel call, or None if the kernel does not support all of it."""
        matmuls = _attention_linears(self.attention)
        if matmuls is None or not isinstance(step.attend, NativeAttend):
            return None
        config, batch = self.config.attention, step.attend.batch_of(cache.group)
        none = value_or_empty(None)
        keys, values, *scales = cache.pages
        key_scales, value_scales = scales or (none, none)  # only int8 has them
        cos, sin = (none, none) if config.rope is None else step.rotary[config.rope]
        q_norm, k_norm = _given(self.head_factors)
        qkv, out = matmuls
        arrays = {
            "keys": keys, "values": values, "key_scales": key_scales, "value_scales": value_scales,
            **batch_arrays(batch), **self._norms(self.attention_factors),
            "qkv": qkv.operands, "out": out.operands, "q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin,
            "sinks": value_or_empty(self.sinks),
            "query_scales": none if config.query_scale is None else query_scales(step.positions, config.query_scale),
        }  # fmt: skip
        num_gates = config.num_heads if config.has_gate else 0
        columns = (config.num_heads + num_gates + 2 * keys.shape[1]) * config.head_dim
        return Half(ATTENTION_HALF, arrays, self._numbers(matmuls, columns, 0, _head_numbers(config)))

    def recurrence_half(self, step: LayerInputs, cache: StateCache) -> Half | None:
        """Returns the half as a kernel call, or None if the kernel does not support all of it."""
        module = self.recurrence
        matmuls = None if module is None else _recurrence_linears(module)
        if matmuls is None or step.states is None or not isinstance(step.attend, NativeAttend):
            return None
        states, batch = step.states, step.attend.batch_of(0)
        kind = DELTA_NET if isinstance(module, DeltaNet) else SHORT_CONV
        first, *rates, last = matmuls
        factors = dict(zip(_RECURRENCE_FACTORS[kind.name], _given(self.recurrence_factors), strict=True))
        arrays = {
            **dict(zip((row.name for row in kind.having("cache")), cache.arrays, strict=True)),
            "states": {
                "cu_q_lens": batch.cu_q_lens, "num_seqs": batch.num_seqs, "positions": step.positions,
                "reads": states.reads, "ends": states.ends, "writes": states.writes,
            },
            **self._norms(self.attention_factors), "joined": first.operands, "out": last.operands, **factors,
        }  # fmt: skip
        numbers: dict[str, Any] = {}
        if isinstance(module, DeltaNet):
            arrays["rates"] = rates[0].operands
            numbers = {"head_eps": module.config.norm.eps, **rates[0].held.numbers("rates")}
        return Half(kind, arrays, self._numbers((first, last), first.held.num_columns, first.held.gate, numbers))

    def feed_forward_half(self, before: jax.Array, step: LayerInputs) -> Half | None:
        """Returns the half as a kernel call, or None if the kernel does not support all of it."""
        matmuls = _mlp_linears(self.mlp)
        if matmuls is None or not isinstance(step.attend, NativeAttend):
            return None
        num_rows = step.attend.num_tokens if step.num_rows is None else step.num_rows
        source = before if self.is_parallel else jnp.zeros((0,), before.dtype)
        gate_up, down = matmuls
        norms = self._norms(self.mlp_factors)
        arrays: dict[str, Any] = {"source": source, "num_rows": num_rows, **norms}
        arrays |= {"gate_up": gate_up.operands, "down": down.operands}
        numbers = self._numbers(matmuls, gate_up.held.num_columns, gate_up.held.gate, {})
        return Half(FEED_FORWARD, arrays, numbers)

    def _norms(self, factors: Iterable[nnx.Param[jax.Array] | None]) -> dict[str, jax.Array]:
        return dict(zip(("norm_before", "norm_after"), _given(factors), strict=True))

    def _numbers(self, matmuls: _Matmuls, columns: int, gate: int, numbers: Mapping[str, Any]) -> dict[str, Any]:
        first, last = matmuls
        return {
            "is_layer_norm": self.config.norm.kind == "layer",
            "columns": columns,
            "gate": gate,
            "eps": self.config.norm.eps,
            "residual_scale": self.residual_scale,
            **first.held.numbers("first"),
            **last.held.numbers("last"),
            **numbers,
        }


def _take_over(module: nnx.Module, other: nnx.Module) -> None:
    """Copies the attributes of `other` to `module`, except private ones."""
    for name, value in vars(other).items():
        if not name.startswith("_"):
            setattr(module, name, value)


def _attention_linears(attention: Attention) -> _Matmuls | None:
    """Returns the matmuls for the kernel, if it supports everything that this attention does."""
    config = attention.config
    has_one_norm = config.qk_norm is None or config.qk_projection_norm is None
    is_usual = has_one_norm and config.v_norm is None and config.has_v and config.has_kv
    return _matmuls(attention.inputs, (attention.out,)) if is_usual else None


def _recurrence_linears(module: ShortConv | DeltaNet) -> _Matmuls | None:
    """Returns the matmuls like `_attention_linears`; those of a delta net's rates come between first and last."""
    if isinstance(module, ShortConv):
        return _matmuls(module.inputs, (module.out,))
    return _matmuls(module.inputs, module.rate_inputs, (module.out,)) if module.config.activation in _SILU else None


def _mlp_linears(mlp: GatedMLP | Experts) -> _Matmuls | None:
    return None if isinstance(mlp, Experts) else _matmuls(mlp.inputs, (mlp.down,))


def _matmuls(*inputs: tuple[Linear, ...]) -> _Matmuls | None:
    """Returns the matmuls, or None if one of them has no kernel, or those of one input are not joined."""
    found = [_Matmul.of(linears[0]) if len(linears) == 1 else None for linears in inputs]
    return None if None in found else cast("_Matmuls", tuple(found))


def _head_factors(attention: Attention) -> list[nnx.Param[jax.Array] | None]:
    """Returns the factors of the norms of queries and keys: for one head, or for all if those are normed together."""
    if attention.q_norm is not None:
        return [_factors_of(attention.q_norm), _factors_of(attention.k_norm)]
    return [_factors_of(attention.q_projection_norm), _factors_of(attention.k_projection_norm)]


def _factors_of(norm: RMSNorm | LayerNorm | None) -> nnx.Param[jax.Array] | None:
    """Returns a norm's factors in f32, as the kernel takes them."""
    if norm is None or norm.scale is None:
        return None
    factors = norm.scale[...].astype(jnp.float32)
    has_offset = isinstance(norm, RMSNorm) and norm.config.unit_offset
    return nnx.Param(factors + 1 if has_offset else factors)


def _recurrence_factors(module: ShortConv | DeltaNet) -> list[nnx.Param[jax.Array] | None]:
    """Returns a recurrence's factors in f32. Those of convolutions are ordered by tap: the kernel reads one tap of all
    channels at once.
    """
    if isinstance(module, ShortConv):
        bias = module.taps_bias
        return [_transposed_taps(module.taps), None if bias is None else nnx.Param(bias[...].astype(jnp.float32))]
    exponents, dt_bias = -jnp.exp(module.a_log[...]), module.dt_bias[...].astype(jnp.float32)
    taps = [_transposed_taps(taps) for taps in (module.q_taps, module.k_taps, module.v_taps)]
    return [*taps, nnx.Param(exponents), nnx.Param(dt_bias), _factors_of(module.norm)]


def _transposed_taps(
    taps: nnx.Param[jax.Array],
) -> nnx.Param[jax.Array]:  # [channels, 1, num_taps] -> [num_taps, channels]
    return nnx.Param(taps[...].astype(jnp.float32)[:, 0].T)


def _given(factors: Iterable[nnx.Param[jax.Array] | None]) -> tuple[jax.Array, ...]:
    return tuple(map(value_or_empty, factors))


def _head_numbers(config: AttentionConfig) -> dict[str, Any]:
    options = AttentionOptions(config.sliding_window, config.scale, config.soft_cap)
    qk_norm = config.qk_norm or config.qk_projection_norm
    return {
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "is_qk_layer_norm": qk_norm is not None and qk_norm.kind == "layer",
        "is_interleaved": config.rope is not None and config.rope.interleaved,
        "window": options.sliding_window or 0,
        "has_gate": config.has_gate,
        "head_eps": 0.0 if qk_norm is None else qk_norm.eps,
        "scale": options.scale_for(config.head_dim),
        "soft_cap": options.soft_cap or 0.0,
    }
