"""A decoder's blocks whose halves are each one call of a CPU kernel, `engine/native/block.cc`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.engine.formats.packing import OFFSETS
from penstock.engine.models.attend import AttentionOptions, GroupCache, NativeAttend
from penstock.engine.models.attention import Attention, StepInputs
from penstock.engine.models.block import Block
from penstock.engine.models.config import AttentionConfig, NormConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.experts import Experts
from penstock.engine.models.layers import GatedMLP, LayerNorm, Linear, RMSNorm
from penstock.engine.models.packed import PackedAttention, PackedLinear, PackedMLP, pack_halves
from penstock.engine.models.packed_quantized import PackedQuantizedLinear
from penstock.engine.models.rope import query_scales
from penstock.engine.native import ATTENTION_HALF, FEED_FORWARD, panel_width, value_or_empty

Packed = PackedLinear | PackedQuantizedLinear
Linears = tuple[Packed, Packed]
"""What a half multiplies by, first and last."""


def pack_blocks(model: Decoder, library: ctypes.CDLL) -> None:
    """Replaces the blocks of `model`, which is not stacked. One at a time: only one is ever in memory twice.

    Queries, keys and values become one matmul; gate and up another, with the activation in it.
    """
    width = panel_width(library)
    for number, block in enumerate(model.blocks):
        pack_halves(block, width)
        model.blocks[number] = PackedBlock(block)


class PackedBlock(Block):
    """A block that computes each half in one call, if the kernel has all of it, and else as any block does."""

    def __init__(self, block: Block) -> None:
        for name, value in vars(block).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        self.attention_factors = nnx.List([_factors_of(block.attention_norm), _factors_of(block.attention_out_norm)])
        read_norm = block.attention_norm if block.is_parallel else block.mlp_norm
        self.mlp_factors = nnx.List([_factors_of(read_norm), _factors_of(block.mlp_out_norm)])
        self.head_factors = nnx.List(_head_factors(block.attention))
        sinks = block.attention.sinks
        self.sinks = None if sinks is None else nnx.Param(sinks[...].astype(jnp.float32))

    def attend(self, x: jax.Array, step: StepInputs, cache: GroupCache) -> tuple[jax.Array, GroupCache]:
        linears = _of_attention(self.attention)
        if linears is None or not isinstance(step.attend, NativeAttend):
            return super().attend(x, step, cache)
        config, batch = self.config.attention, step.attend.batch_of(cache.group)
        none = value_or_empty(None)
        pages = cache.pages if len(cache.pages) == 4 else (*cache.pages, none, none)  # int8 alone has scales
        cos, sin = (none, none) if config.rope is None else step.rotary[config.rope]
        scales = none if config.query_scale is None else query_scales(step.positions, config.query_scale)
        results = [jax.typeof(array) for array in (x, *pages)]
        call = jax.ffi.ffi_call(ATTENTION_HALF, results, input_output_aliases={i: i for i in range(len(results))})
        x, *written = call(
            x, *pages, batch.slots, batch.kv_lens, batch.page_indices, batch.cu_q_lens, batch.num_seqs,
            *_given(self.attention_factors), *_operands(linears[0]), *_operands(linears[1]),
            *_given(self.head_factors), cos, sin, scales, value_or_empty(self.sinks),
            **self._shared(linears), **_attention_attributes(config),
        )  # fmt: skip
        return x, cache._replace(pages=tuple(written[: len(cache.pages)]))

    def feed_forward(self, x: jax.Array, before: jax.Array, step: StepInputs) -> jax.Array:
        linears = _of_mlp(self.mlp)
        if linears is None or not isinstance(step.attend, NativeAttend):
            return super().feed_forward(x, before, step)
        gate_up, down = linears
        num_rows = step.attend.num_tokens if step.num_rows is None else step.num_rows
        source = before if self.is_parallel else jnp.zeros((0,), x.dtype)
        call = jax.ffi.ffi_call(FEED_FORWARD, [jax.typeof(x)], input_output_aliases={0: 0})
        (y,) = call(
            x, source, num_rows, *_given(self.mlp_factors), *_operands(gate_up), *_operands(down),
            **self._shared(linears), intermediate=np.int64(gate_up.num_columns), gate=np.int64(gate_up.gate),
        )  # fmt: skip
        return y

    def _shared(self, linears: Linears) -> dict[str, Any]:
        """Of either half."""
        attributes = {**_norm_attributes(self.config.norm), "residual_scale": np.float32(self.residual_scale)}
        for name, linear in zip(("first", "last"), linears, strict=True):
            packing = linear.panels.packing if isinstance(linear, PackedQuantizedLinear) else None
            attributes[f"{name}_offset"] = np.int64(0 if packing is None else OFFSETS.index(packing.offset))
            attributes[f"{name}_reads_bytes"] = packing is not None and packing.has_int8_activations
        return attributes


def _of_attention(attention: Attention) -> Linears | None:
    """What the kernel multiplies by, if it has all else that this attention does."""
    has_one_norm = attention.config.qk_norm is None or attention.config.qk_projection_norm is None
    if not (isinstance(attention, PackedAttention) and has_one_norm):
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


def _norm_attributes(norm: NormConfig) -> dict[str, Any]:
    return {"eps": np.float32(norm.eps), "is_layer_norm": norm.kind == "layer"}


def _attention_attributes(config: AttentionConfig) -> dict[str, Any]:
    options = AttentionOptions(config.sliding_window, config.scale, config.soft_cap)
    qk_norm = config.qk_norm or config.qk_projection_norm
    return {
        "num_heads": np.int64(config.num_heads),
        "head_dim": np.int64(config.head_dim),
        "qk_eps": np.float32(0 if qk_norm is None else qk_norm.eps),
        "is_qk_layer_norm": qk_norm is not None and qk_norm.kind == "layer",
        "is_interleaved": config.rope is not None and config.rope.interleaved,
        "scale": np.float32(options.scale_for(config.head_dim)),
        "window": np.int64(options.sliding_window or 0),
        "soft_cap": np.float32(options.soft_cap or 0),
    }
