"""A decoder's blocks as calls of a CPU kernel, `engine/kernels/cpu/block.cc`: one call for all of them if possible."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.engine.formats.packing import OFFSETS
from penstock.engine.kernels.cpu import HALVES, panel_width, value_or_empty
from penstock.engine.models.attend import AttentionOptions, GroupCache, LayerCache, NativeAttend
from penstock.engine.models.block import Block, Cache
from penstock.engine.models.config import AttentionConfig
from penstock.engine.models.cpu.panels import (
    PackedAttention,
    PackedDeltaNet,
    PackedLinear,
    PackedMLP,
    PackedShortConv,
    pack_halves,
)
from penstock.engine.models.cpu.quantized import PackedQuantizedLinear
from penstock.engine.models.decoder import Decoder, WantedTokens, of_wanted
from penstock.engine.models.layer_groups import StatePlace, layer_groups
from penstock.engine.models.layers.attention import Attention, LayerInputs
from penstock.engine.models.layers.basic import GatedMLP, LayerNorm, Linear, RMSNorm
from penstock.engine.models.layers.delta_net import DeltaNet
from penstock.engine.models.layers.experts import Experts
from penstock.engine.models.layers.recurrence import StateCache
from penstock.engine.models.layers.rope import query_scales
from penstock.engine.models.layers.short_conv import ShortConv

_Packed = PackedLinear | PackedQuantizedLinear
Linears = tuple[_Packed, ...]
"""The matmuls of a half, in order."""
_SILU = ("silu", "swish")


def pack_blocks(model: Decoder, library: ctypes.CDLL) -> Decoder:
    """Returns the model, which must not be stacked, with packed blocks. Blocks are replaced one at a time, so that only
    one is ever in memory twice.

    Queries, keys and values become one matmul; gate and up another, with the activation in it.
    """
    width = panel_width(library)
    for number, block in enumerate(model.blocks):
        pack_halves(block, width)
        model.blocks[number] = PackedBlock(block)
    return PackedDecoder(model)


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
        x, changed = _run(x, halves[:-1])
        if wanted is not None:  # the last feed-forward is computed only for these tokens
            x, step = x[wanted.tokens], of_wanted(step, wanted)
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


class Half(NamedTuple):
    """Half of a block, as the kernel takes it."""

    operands: tuple[jax.Array, ...]
    num_kept: int  # number of leading `operands` that are pages or states, updated in place
    numbers: _Numbers


class _Numbers(NamedTuple):
    """The `Integers` and `Floats` of block.cc, in their order."""

    kind: int  # as below
    is_layer_norm: bool
    columns: int
    gate: int
    first_offset: int
    first_reads_bytes: bool
    last_offset: int
    last_reads_bytes: bool
    rates_offset: int
    rates_reads_bytes: bool
    num_heads: int
    head_dim: int
    is_qk_layer_norm: bool
    is_interleaved: bool
    window: int
    has_gate: bool
    eps: float
    residual_scale: float
    head_eps: float
    scale: float
    soft_cap: float


_NUM_INTEGERS = _Numbers._fields.index("eps")
_FEED_FORWARD, _ATTENTION, _SHORT_CONV, _DELTA_NET = range(4)
"""Kinds of halves, by their index in `kRuns` of block.cc."""


def _run(x: jax.Array, halves: Sequence[Half]) -> tuple[jax.Array, list[LayerCache]]:
    """Runs the halves on the residual stream `x`. Returns it, and the pages or states of the halves that have any."""
    operands, results, aliases = [x], [jax.typeof(x)], {0: 0}
    for half in halves:
        for place, array in enumerate(half.operands[: half.num_kept], len(operands)):
            aliases[place] = len(results)
            results.append(jax.typeof(array))
        operands += half.operands
    call = jax.ffi.ffi_call(HALVES, results, input_output_aliases=aliases)
    x, *changed = call(
        *operands,
        integers=np.array([half.numbers[:_NUM_INTEGERS] for half in halves], np.int64).ravel(),
        floats=np.array([half.numbers[_NUM_INTEGERS:] for half in halves], np.float32).ravel(),
    )
    kept = iter(changed)
    return x, [tuple(islice(kept, half.num_kept)) for half in halves if half.num_kept]


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
                x, (pages,) = _run(x, [half])
                return x, cache._replace(pages=pages)
        else:
            half = self.recurrence_half(step, cache)
            if half is not None:
                x, (arrays,) = _run(x, [half])
                return x, cache._replace(arrays=arrays)
        return super().attend(x, step, cache, squares)

    def feed_forward(self, x: jax.Array, before: jax.Array, step: LayerInputs) -> jax.Array:
        half = self.feed_forward_half(before, step)
        return super().feed_forward(x, before, step) if half is None else self.ended(_run(x, [half])[0], step)

    @property
    def has_end(self) -> bool:
        """Whether anything follows the feed-forward, which the kernel does not support."""
        return self.per_layer is not None or self.scalar is not None

    def attention_half(self, step: LayerInputs, cache: GroupCache) -> Half | None:
        """Returns the half as a kernel call, or None if the kernel does not support all of it."""
        linears = _of_attention(self.attention)
        if linears is None or not isinstance(step.attend, NativeAttend):
            return None
        config, batch = self.config.attention, step.attend.batch_of(cache.group)
        none = value_or_empty(None)
        scales = () if len(cache.pages) == 4 else (none, none)  # only int8 has them
        cos, sin = (none, none) if config.rope is None else step.rotary[config.rope]
        operands = (
            *cache.pages, *scales, batch.slots, batch.kv_lens, batch.page_indices, batch.cu_q_lens, batch.num_seqs,
            *_given(self.attention_factors), *_operands(linears[0]), *_operands(linears[1]),
            *_given(self.head_factors), cos, sin,
            none if config.query_scale is None else query_scales(step.positions, config.query_scale),
            value_or_empty(self.sinks),
        )  # fmt: skip
        num_gates = config.num_heads if config.has_gate else 0
        columns = (config.num_heads + num_gates + 2 * cache.pages[0].shape[1]) * config.head_dim
        return Half(operands, len(cache.pages), self._numbers(_ATTENTION, linears, columns, 0, _of_heads(config)))

    def recurrence_half(self, step: LayerInputs, cache: StateCache) -> Half | None:
        """Returns the half as a kernel call, or None if the kernel does not support all of it."""
        module = self.recurrence
        linears = None if module is None else _of_recurrence(module)
        if linears is None or step.states is None or not isinstance(step.attend, NativeAttend):
            return None
        states, batch = step.states, step.attend.batch_of(0)
        first, *rates, last = linears
        operands = (
            *cache.arrays,
            batch.cu_q_lens, batch.num_seqs, step.positions, states.reads, states.ends, states.writes,
            *_given(self.attention_factors), *_operands(first), *(part for rate in rates for part in _operands(rate)),
            *_operands(last), *_given(self.recurrence_factors),
        )  # fmt: skip
        numbers: dict[str, Any] = {}
        if isinstance(module, DeltaNet):
            numbers = {"head_eps": module.config.norm.eps, **_of_packing("rates", rates[0])}
        kind = _DELTA_NET if isinstance(module, DeltaNet) else _SHORT_CONV
        return Half(
            operands, len(cache.arrays), self._numbers(kind, (first, last), first.num_columns, first.gate, numbers)
        )

    def feed_forward_half(self, before: jax.Array, step: LayerInputs) -> Half | None:
        """Returns the half as a kernel call, or None if the kernel does not support all of it."""
        linears = _of_mlp(self.mlp)
        if linears is None or not isinstance(step.attend, NativeAttend):
            return None
        num_rows = step.attend.num_tokens if step.num_rows is None else step.num_rows
        source = before if self.is_parallel else jnp.zeros((0,), before.dtype)
        operands = (source, num_rows, *_given(self.mlp_factors), *_operands(linears[0]), *_operands(linears[1]))
        return Half(operands, 0, self._numbers(_FEED_FORWARD, linears, linears[0].num_columns, linears[0].gate, {}))

    def _numbers(self, kind: int, linears: Linears, columns: int, gate: int, numbers: Mapping[str, Any]) -> _Numbers:
        first, last = linears
        own = {
            "kind": kind,
            "is_layer_norm": self.config.norm.kind == "layer",
            "columns": columns,
            "gate": gate,
            "eps": self.config.norm.eps,
            "residual_scale": self.residual_scale,
            **_of_packing("first", first),
            **_of_packing("last", last),
        }
        return _Numbers(**(dict.fromkeys(_Numbers._fields, 0) | dict(numbers) | own))


def _take_over(module: nnx.Module, other: nnx.Module) -> None:
    """Copies the attributes of `other` to `module`, except private ones."""
    for name, value in vars(other).items():
        if not name.startswith("_"):
            setattr(module, name, value)


def _of_attention(attention: Attention) -> Linears | None:
    """Returns the matmuls for the kernel, if it supports everything else that this attention does."""
    config = attention.config
    has_one_norm = config.qk_norm is None or config.qk_projection_norm is None
    is_usual = has_one_norm and config.v_norm is None and config.has_v and config.has_kv
    if not isinstance(attention, PackedAttention) or not is_usual:
        return None
    return _packed(attention.qkv, attention.out)


def _of_recurrence(module: ShortConv | DeltaNet) -> Linears | None:
    """Returns the matmuls like `_of_attention`; those for a delta net's rates are between the first and the last."""
    if isinstance(module, PackedShortConv):
        return _packed(module.joined, module.out)
    if not isinstance(module, PackedDeltaNet) or module.config.activation not in _SILU:
        return None
    return _packed(module.joined, module.joined_rates, module.out)


def _of_mlp(mlp: GatedMLP | Experts) -> Linears | None:
    return _packed(mlp.gate_up, mlp.down) if isinstance(mlp, PackedMLP) else None


def _packed(*linears: Linear) -> Linears | None:
    """Returns the matmuls, or None if one of them has no kernel."""
    found = tuple(linear for linear in linears if isinstance(linear, PackedLinear | PackedQuantizedLinear))
    return found if len(found) == len(linears) else None


def _of_packing(name: str, linear: _Packed) -> dict[str, Any]:
    packing = linear.panels.packing if isinstance(linear, PackedQuantizedLinear) else None
    return {
        f"{name}_offset": 0 if packing is None else OFFSETS.index(packing.offset),
        f"{name}_reads_bytes": packing is not None and packing.has_int8_activations,
    }


def _operands(linear: _Packed) -> tuple[jax.Array, ...]:
    """Returns weights or codes, their scales and offsets, and biases."""
    if isinstance(linear, PackedLinear):
        weights, bias = linear.operands
        return weights, value_or_empty(None), value_or_empty(None), bias
    panels = linear.panels
    return panels.codes[...], panels.scales[...], value_or_empty(panels.offsets), value_or_empty(panels.bias)


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
        return [_by_place(module.taps), None if bias is None else nnx.Param(bias[...].astype(jnp.float32))]
    exponents, dt_bias = -jnp.exp(module.a_log[...]), module.dt_bias[...].astype(jnp.float32)
    taps = [_by_place(taps) for taps in (module.q_taps, module.k_taps, module.v_taps)]
    return [*taps, nnx.Param(exponents), nnx.Param(dt_bias), _factors_of(module.norm)]


def _by_place(taps: nnx.Param[jax.Array]) -> nnx.Param[jax.Array]:  # [channels, 1, num_taps] -> [num_taps, channels]
    return nnx.Param(taps[...].astype(jnp.float32)[:, 0].T)


def _given(factors: Iterable[nnx.Param[jax.Array] | None]) -> tuple[jax.Array, ...]:
    return tuple(map(value_or_empty, factors))


def _of_heads(config: AttentionConfig) -> dict[str, Any]:
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
