"""Packs a decoder's weights for the CPU's kernels, once, and joins the matmuls of one input into one call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.engine.formats.buffers import device_buffer
from penstock.engine.kernels.cpu import GROUP_ROWS, ROUTE, SUM_ROWS, pack_panels, panel_width, value_or_empty
from penstock.engine.kernels.cpu.layout import GATE_NAMES
from penstock.engine.models.block import Block
from penstock.engine.models.config import ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.cpu.held import NOT_GATED, Panels, result, splits_of
from penstock.engine.models.cpu.quantized import column_order, has_kernel, quantized_panels
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.basic import GatedMLP
from penstock.engine.models.layers.delta_net import DeltaNet
from penstock.engine.models.layers.experts import Experts, GroupedMLP
from penstock.engine.models.layers.linear import AnyLinear, Linear, Plain, RowGroups, Weight, present
from penstock.engine.models.layers.quantized import Quantized
from penstock.engine.models.layers.short_conv import ShortConv

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu",
    "relu": "relu",
}  # fmt: skip
GATES = {name: GATE_NAMES.index(gate) for name, gate in _ACTIVATIONS.items()}
"""The activations that the kernel has built in, by its numbers for them."""

_RECURRENCES = {
    ShortConv: (("before", "behind", "input"), ("out",)),
    DeltaNet: (("q", "k", "v", "gate"), ("beta", "decay"), ("out",)),
}
"""The matmuls of each recurrence, those of one input together."""


def pack_head(model: Decoder, library: ctypes.CDLL) -> None:
    """Packs the head. Beside quantized layers, an embedding that is also the head is held only as the head."""
    if model.head is not None:
        _pack(model, ("head",), library)
    elif isinstance(model.embedding, Linear):
        _pack(model, ("embedding",), library)
    else:
        model.head = nnx.data(tied(model.embedding[...], library))  # nnx treated None as a constant
        if model.config.is_packed:
            model.embedding = None


def can_pack(config: ModelConfig) -> bool:
    """Checks whether the kernel can take the model: f32, f16 and, with an even number of features, bf16."""
    features = {config.hidden_size}
    for block in config.blocks:
        features |= {block.mixer.num_mixed, *_inner_features(block.mlp)}
        features |= set() if block.per_layer is None else {block.per_layer.size}
    return config.dtype != "bfloat16" or all(size % 2 == 0 for size in features)


def _inner_features(mlp: MLPConfig | ExpertsConfig) -> set[int]:
    shared = mlp.shared if isinstance(mlp, ExpertsConfig) else None
    return {mlp.intermediate_size} if shared is None else {mlp.intermediate_size, shared.intermediate_size}


def tied(embedding: jax.Array, library: ctypes.CDLL) -> Linear:  # [out, in]
    """Packs an embedding as a head."""
    weights = _panels([np.asarray(embedding)], library, gated=False)
    return Linear(Panels((embedding.shape[0],), NOT_GATED), {"weights": weights})


def joined(library: ctypes.CDLL, *linears: AnyLinear, gate: int = NOT_GATED) -> AnyLinear:
    """Packs matmuls of one input side by side, as one; `can_join` says whether there is a kernel for them."""
    width = panel_width(library)
    if _are_plain(*linears):
        held, arrays = _plain_panels(linears, library, gate)
    else:
        held, arrays = quantized_panels(linears, width, gate)
    return type(linears[0])(held, arrays, _joined_biases(linears, width, gated=gate != NOT_GATED))


def can_join(*linears: Weight) -> bool:
    return _are_plain(*linears) or has_kernel(*linears)


def _are_plain(*linears: Weight) -> bool:
    return all(isinstance(linear.held, Plain) for linear in linears)


def pack_halves(block: Block, library: ctypes.CDLL) -> None:
    """Packs the matmuls of attention, or of the recurrence in its place, and of the feed-forward. Quantized layers that
    no kernel supports are left as they are.
    """
    recurrence = block.recurrence
    if recurrence is None:
        _pack(block.attention, ("q", "k", "v", "gate"), library)
        _pack(block.attention, ("out",), library)
    else:
        for names in _RECURRENCES[type(recurrence)]:
            _pack(recurrence, names, library)
    if isinstance(block.mlp, Experts):
        _pack_experts(block.mlp, library)
    else:
        pack_mlp(block.mlp, library)
    if block.per_layer is not None:
        _pack(block.per_layer, ("gate",), library)
        _pack(block.per_layer, ("projection",), library)


def _pack(module: Any, names: Sequence[str], library: ctypes.CDLL, gate: int = NOT_GATED) -> None:
    """Joins the module's matmuls of these names in the first of them, or packs each if there is no kernel for all."""
    names = [name for name in names if getattr(module, name) is not None]
    linears = [getattr(module, name) for name in names]
    if can_join(*linears):
        for name, linear in zip(names, [joined(library, *linears, gate=gate), *[None] * (len(names) - 1)], strict=True):
            setattr(module, name, linear)
    elif len(names) > 1:
        for name in names:
            _pack(module, (name,), library)


def pack_mlp(mlp: GatedMLP, library: ctypes.CDLL) -> None:
    if mlp.activation in GATES:
        _pack(mlp, ("gate", "up"), library, GATES[mlp.activation])
    else:
        for name in ("gate", "up"):
            _pack(mlp, (name,), library)
    _pack(mlp, ("down",), library)


def _pack_experts(experts: Experts, library: ctypes.CDLL) -> None:
    _pack(experts, ("router",), library)
    grouped = experts.experts
    if can_join(*present(grouped.gate, grouped.up)) and can_join(grouped.down):
        experts.experts = PackedExperts(grouped, library)
    if experts.shared is not None:
        pack_mlp(experts.shared, library)
    if experts.shared_gate is not None:
        _pack(experts, ("shared_gate",), library)


class PackedExperts(GroupedMLP):
    """The feed-forwards of all experts. The CPU's kernels choose experts, sort rows and sum results, in calls of their
    own, however the weights are held.
    """

    def __init__(self, experts: GroupedMLP, library: ctypes.CDLL) -> None:
        self.num_experts, self.activation, self.clamped = experts.num_experts, experts.activation, experts.clamped
        gate = NOT_GATED if experts.clamped else GATES.get(experts.activation, NOT_GATED)
        self.gate, self.up = joined(library, *present(experts.gate, experts.up), gate=gate), None
        self.down = joined(library, experts.down)

    def route(
        self, logits: jax.Array, correction: jax.Array | None, config: ExpertsConfig
    ) -> tuple[jax.Array, jax.Array]:
        shape = (logits.shape[0], config.num_chosen)
        chosen, weights = ROUTE(
            {"logits": logits, "correction": value_or_empty(correction)},
            {"chosen": result(shape, jnp.int32), "weights": result(shape, jnp.float32)},
            is_sigmoid=config.scores == "sigmoid",
            is_normalized=config.normalized,
            scale=config.scale,
            groups=config.num_groups,
            groups_chosen=config.groups_chosen,
        )
        return chosen, weights

    def mix(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        results = {
            "rows": result((chosen.size, x.shape[1]), x.dtype),
            "places": result(chosen.shape, jnp.int32),
            "group_sizes": result((self.num_experts,), jnp.int32),
        }
        grouped, places, group_sizes = GROUP_ROWS({"x": x, "chosen": chosen}, results)
        rows = self(grouped, RowGroups(group_sizes, layer))
        return SUM_ROWS({"rows": rows, "places": places, "weights": weights}, {"y": result(x.shape, jnp.float32)})[0]


def _plain_panels(linears: Sequence[Weight], library: ctypes.CDLL, gate: int) -> tuple[Panels, dict[str, jax.Array]]:
    columns = [np.asarray(linear.kernel[...]).swapaxes(-1, -2) for linear in linears]
    weights = _panels(columns, library, gated=gate != NOT_GATED)
    return Panels(splits_of([_num_out(linear) for linear in linears], gate), gate), {"weights": weights}


def _panels(parts: Sequence[np.ndarray], library: ctypes.CDLL, *, gated: bool) -> jax.Array:
    """Packs the columns of kernels, `[..., out, in]` each, side by side.

    The result is `[..., panels, in, width]` or, in bf16 with pairs of features interleaved, `[..., panels, in / 2,
    width, 2]`. Contiguous columns, in memory or in a mapped file, are read from where they are, and only once.
    """
    parts = [np.ascontiguousarray(part) for part in parts]
    *leading, _, depth = parts[0].shape
    order = column_order([part.shape[-2] for part in parts], panel_width(library), gated=gated)
    pair = (2,) if parts[0].dtype == jnp.bfloat16 else ()
    depth //= math.prod(pair)
    packed = device_buffer((*leading, order.shape[0], depth, order.shape[1], *pair), parts[0].dtype)
    addresses = np.concatenate([_addresses(part) for part in parts], axis=-1)
    columns = np.where(order < 0, 0, addresses[..., order])
    pack_panels(library, columns.reshape(-1, order.shape[1]), depth, packed)
    placed: jax.Array = jax.device_put(packed)
    return placed


def _addresses(part: np.ndarray) -> np.ndarray:
    """Returns where each column of `[..., out, in]`, which is contiguous, begins in memory: i64 `[..., out]`."""
    *leading, depth = part.shape
    last = part.ctypes.data + math.prod(part.shape) * part.itemsize
    columns: np.ndarray = np.arange(part.ctypes.data, last, depth * part.itemsize)
    return columns.reshape(leading)


def _num_out(linear: Weight) -> int:
    return linear.held.shape[0] if isinstance(linear.held, Quantized) else int(linear.kernel.shape[-1])


def _joined_biases(linears: Sequence[Weight], width: int, *, gated: bool) -> jax.Array | None:
    """Returns biases in the order of columns, f32 `[panels * width]`, or one row of them per expert."""
    found = next((linear.bias_value for linear in linears if linear.bias is not None), None)
    if found is None:
        return None
    leading = found.shape[:-1]
    parts = [
        np.zeros((*leading, _num_out(linear)), np.float32)
        if linear.bias is None
        else np.asarray(linear.bias[...], np.float32)
        for linear in linears
    ]
    order = column_order([part.shape[-1] for part in parts], width, gated=gated)
    rows = np.where(order < 0, 0, np.concatenate(parts, axis=-1)[..., order])
    return jnp.asarray(rows.reshape(*leading, -1))
