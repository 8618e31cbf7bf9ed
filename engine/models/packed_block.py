"""A decoder's blocks in calls of a CPU kernel, `engine/native/block.cc`: all of them in one where that is possible."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.engine.formats.packing import OFFSETS
from penstock.engine.models.attend import AttentionOptions, GroupCache, LayerCache, NativeAttend
from penstock.engine.models.attention import Attention, StepInputs
from penstock.engine.models.block import Block, Cache
from penstock.engine.models.config import AttentionConfig
from penstock.engine.models.decoder import Decoder, Wanted, of_wanted
from penstock.engine.models.experts import Experts
from penstock.engine.models.layer_groups import layer_groups
from penstock.engine.models.layers import GatedMLP, LayerNorm, Linear, RMSNorm
from penstock.engine.models.packed import PackedAttention, PackedLinear, PackedMLP, pack_halves
from penstock.engine.models.packed_quantized import PackedQuantizedLinear
from penstock.engine.models.recurrence import StateCache
from penstock.engine.models.rope import query_scales
from penstock.engine.native import HALVES, panel_width, value_or_empty

Packed = PackedLinear | PackedQuantizedLinear
Linears = tuple[Packed, Packed]
"""What a half multiplies by, first and last."""


def pack_blocks(model: Decoder, library: ctypes.CDLL) -> Decoder:
    """The same model, which is not stacked, with packed blocks. They take the places of the others one at a time: only
    one is ever in memory twice.

    Queries, keys and values become one matmul; gate and up another, with the activation in it.
    """
    width = panel_width(library)
    for number, block in enumerate(model.blocks):
        pack_halves(block, width)
        model.blocks[number] = PackedBlock(block)
    return PackedDecoder(model)


class PackedDecoder(Decoder):
    """A decoder that computes all its layers in one call, if the kernel has all of them, and else one by one."""

    def __init__(self, model: Decoder) -> None:
        _take_over(self, model)

    def _layers(
        self, x: jax.Array, step: StepInputs, caches: tuple[LayerCache, ...], wanted: Wanted | None
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        halves = self._halves(x, step, caches)
        if halves is None:
            return super()._layers(x, step, caches, wanted)
        x, pages = _run(x, halves[:-1])
        if wanted is not None:  # the last feed-forward is computed for these tokens alone
            x, step = x[wanted.tokens], of_wanted(step, wanted)
        written = dict(zip([place.array for place in layer_groups(self.config).pages], pages, strict=True))
        return self.blocks[-1].feed_forward(x, x, step), tuple(written[array] for array in range(len(caches)))

    def _halves(self, x: jax.Array, step: StepInputs, caches: tuple[LayerCache, ...]) -> list[Half] | None:
        """Of all layers in order; None where one has none, or has pages in an array that another one has changed."""
        places = layer_groups(self.config).pages
        if self.config.has_states or len({place.array for place in places}) < len(places):
            return None
        halves: list[Half | None] = []
        for block, (group, array) in zip(cast("list[PackedBlock]", self.blocks), places, strict=True):
            halves.append(block.attention_half(step, GroupCache(caches[array], group)))
            halves.append(None if block.is_parallel else block.feed_forward_half(x, step))
        return None if None in halves else cast("list[Half]", halves)


class Half(NamedTuple):
    """Of a block, as the kernel takes it."""

    operands: tuple[jax.Array, ...]
    num_pages: int  # of `operands`, from the first: they are changed where they are
    numbers: _Numbers


class _Numbers(NamedTuple):
    """`Integers` and `Floats` of block.cc, in their order."""

    is_attention: bool
    is_layer_norm: bool
    columns: int
    gate: int
    first_offset: int
    first_reads_bytes: bool
    last_offset: int
    last_reads_bytes: bool
    num_heads: int
    head_dim: int
    is_qk_layer_norm: bool
    is_interleaved: bool
    window: int
    eps: float
    residual_scale: float
    qk_eps: float
    scale: float
    soft_cap: float


_NUM_INTEGERS = _Numbers._fields.index("eps")


def _run(x: jax.Array, halves: Sequence[Half]) -> tuple[jax.Array, list[LayerCache]]:
    """What the residual stream `x` becomes, and the pages of the halves that have any."""
    operands, results, aliases = [x], [jax.typeof(x)], {0: 0}
    for half in halves:
        for place, array in enumerate(half.operands[: half.num_pages], len(operands)):
            aliases[place] = len(results)
            results.append(jax.typeof(array))
        operands += half.operands
    call = jax.ffi.ffi_call(HALVES, results, input_output_aliases=aliases)
    x, *changed = call(
        *operands,
        integers=np.array([half.numbers[:_NUM_INTEGERS] for half in halves], np.int64).ravel(),
        floats=np.array([half.numbers[_NUM_INTEGERS:] for half in halves], np.float32).ravel(),
    )
    pages = iter(changed)
    return x, [tuple(islice(pages, half.num_pages)) for half in halves if half.num_pages]


class PackedBlock(Block):
    """A block that computes each half in one call, if the kernel has all of it, and else as any block does."""

    def __init__(self, block: Block) -> None:
        _take_over(self, block)
        self.attention_factors = nnx.List([_factors_of(block.attention_norm), _factors_of(block.attention_out_norm)])
        read_norm = block.attention_norm if block.is_parallel else block.mlp_norm
        self.mlp_factors = nnx.List([_factors_of(read_norm), _factors_of(block.mlp_out_norm)])
        has_attention = block.config.has_attention
        self.head_factors = nnx.List(_head_factors(block.attention) if has_attention else [])
        sinks = block.attention.sinks if has_attention else None
        self.sinks = None if sinks is None else nnx.Param(sinks[...].astype(jnp.float32))

    def attend(
        self, x: jax.Array, step: StepInputs, cache: Cache, squares: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        half = self.attention_half(step, cache) if isinstance(cache, GroupCache) else None
        if half is None or isinstance(cache, StateCache):
            return super().attend(x, step, cache, squares)
        x, (pages,) = _run(x, [half])
        return x, cache._replace(pages=pages)

    def feed_forward(self, x: jax.Array, before: jax.Array, step: StepInputs) -> jax.Array:
        half = self.feed_forward_half(before, step)
        return super().feed_forward(x, before, step) if half is None else _run(x, [half])[0]

    def attention_half(self, step: StepInputs, cache: GroupCache) -> Half | None:
        """None where the kernel does not have all of it."""
        linears = _of_attention(self.attention)
        if linears is None or not isinstance(step.attend, NativeAttend):
            return None
        config, batch = self.config.attention, step.attend.batch_of(cache.group)
        none = value_or_empty(None)
        scales = () if len(cache.pages) == 4 else (none, none)  # int8 alone has them
        cos, sin = (none, none) if config.rope is None else step.rotary[config.rope]
        operands = (
            *cache.pages, *scales, batch.slots, batch.kv_lens, batch.page_indices, batch.cu_q_lens, batch.num_seqs,
            *_given(self.attention_factors), *_operands(linears[0]), *_operands(linears[1]),
            *_given(self.head_factors), cos, sin,
            none if config.query_scale is None else query_scales(step.positions, config.query_scale),
            value_or_empty(self.sinks),
        )  # fmt: skip
        columns = (config.num_heads + 2 * cache.pages[0].shape[1]) * config.head_dim
        return Half(operands, len(cache.pages), self._numbers(linears, columns, 0, config))

    def feed_forward_half(self, before: jax.Array, step: StepInputs) -> Half | None:
        """None where the kernel does not have all of it."""
        linears = _of_mlp(self.mlp)
        if linears is None or not isinstance(step.attend, NativeAttend):
            return None
        num_rows = step.attend.num_tokens if step.num_rows is None else step.num_rows
        source = before if self.is_parallel else jnp.zeros((0,), before.dtype)
        operands = (source, num_rows, *_given(self.mlp_factors), *_operands(linears[0]), *_operands(linears[1]))
        return Half(operands, 0, self._numbers(linears, linears[0].num_columns, linears[0].gate, None))

    def _numbers(self, linears: Linears, columns: int, gate: int, config: AttentionConfig | None) -> _Numbers:
        numbers: dict[str, Any] = dict.fromkeys(_Numbers._fields, 0) if config is None else _of_heads(config)
        for name, linear in zip(("first", "last"), linears, strict=True):
            packing = linear.panels.packing if isinstance(linear, PackedQuantizedLinear) else None
            numbers[f"{name}_offset"] = 0 if packing is None else OFFSETS.index(packing.offset)
            numbers[f"{name}_reads_bytes"] = packing is not None and packing.has_int8_activations
        own = {
            "is_attention": config is not None,
            "is_layer_norm": self.config.norm.kind == "layer",
            "columns": columns,
            "gate": gate,
            "eps": self.config.norm.eps,
            "residual_scale": self.residual_scale,
        }
        return _Numbers(**(numbers | own))


def _take_over(module: nnx.Module, other: nnx.Module) -> None:
    """Gives it all that the other one has."""
    for name, value in vars(other).items():
        if not name.startswith("_"):
            setattr(module, name, value)


def _of_attention(attention: Attention) -> Linears | None:
    """What the kernel multiplies by, if it has all else that this attention does."""
    has_one_norm = attention.config.qk_norm is None or attention.config.qk_projection_norm is None
    if not (isinstance(attention, PackedAttention) and has_one_norm) or attention.config.has_gate:
        return None
    return _packed(attention.qkv, attention.out)


def _of_mlp(mlp: GatedMLP | Experts) -> Linears | None:
    return _packed(mlp.gate_up, mlp.down) if isinstance(mlp, PackedMLP) else None


def _packed(first: Linear, last: Linear) -> Linears | None:
    """None where one of them has no kernel."""
    if isinstance(first, PackedLinear | PackedQuantizedLinear) and isinstance(
        last, PackedLinear | PackedQuantizedLinear
    ):
        return first, last
    return None


def _operands(linear: Packed) -> tuple[jax.Array, ...]:
    """Weights or codes, their scales and offsets, and biases."""
    if isinstance(linear, PackedLinear):
        weights, bias = linear.operands
        return weights, value_or_empty(None), value_or_empty(None), bias
    panels = linear.panels
    return panels.codes[...], panels.scales[...], value_or_empty(panels.offsets), value_or_empty(panels.bias)


def _head_factors(attention: Attention) -> list[nnx.Param[jax.Array] | None]:
    """Of queries and keys: as many as are normed together, a head's or all."""
    if attention.q_norm is not None:
        return [_factors_of(attention.q_norm), _factors_of(attention.k_norm)]
    return [_factors_of(attention.q_projection_norm), _factors_of(attention.k_projection_norm)]


def _factors_of(norm: RMSNorm | LayerNorm | None) -> nnx.Param[jax.Array] | None:
    """What the kernel multiplies by, in f32."""
    if norm is None:
        return None
    factors = norm.scale[...].astype(jnp.float32)
    has_offset = isinstance(norm, RMSNorm) and norm.config.unit_offset
    return nnx.Param(factors + 1 if has_offset else factors)


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
        "qk_eps": 0.0 if qk_norm is None else qk_norm.eps,
        "scale": options.scale_for(config.head_dim),
        "soft_cap": options.soft_cap or 0.0,
    }
