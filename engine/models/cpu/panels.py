"""A decoder's modules with the CPU kernel's matmuls (`penstock.engine.kernels.cpu`); weights are packed for it once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from penstock.engine.kernels.cpu import GROUP_ROWS, GROUPED_MATMUL, MATMUL, ROUTE, SUM_ROWS, panel_width, value_or_empty
from penstock.engine.kernels.cpu.layout import GATE_NAMES
from penstock.engine.models.block import Block, PerLayer
from penstock.engine.models.config import ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.cpu.quantized import (
    PackedQuantizedEmbedding,
    PackedQuantizedGroups,
    PackedQuantizedLinear,
    has_kernel,
)
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.basic import GatedMLP, Linear
from penstock.engine.models.layers.delta_net import DeltaNet
from penstock.engine.models.layers.experts import Experts, GroupedLinear, GroupedMLP, RowGroups
from penstock.engine.models.layers.quantized import QuantizedEmbedding, QuantizedGroupedLinear, QuantizedLinear
from penstock.engine.models.layers.short_conv import ShortConv

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu",
    "relu": "relu",
}  # fmt: skip
GATES = {name: GATE_NAMES.index(gate) for name, gate in _ACTIVATIONS.items()}
"""The activations that the kernel has built in, by its numbers for them."""

NOT_GATED = GATE_NAMES.index("none")


def pack_head(model: Decoder, library: ctypes.CDLL) -> None:
    """Packs the head. Beside quantized layers, an embedding that is also the head is held only as the head."""
    width = panel_width(library)
    if model.head is not None:
        model.head = _packed(model.head, width)
    elif not isinstance(model.embedding, QuantizedEmbedding):
        model.head = nnx.data(PackedLinear.tied(model.embedding[...], width))  # nnx treated None as a constant
        if model.config.is_packed:
            model.embedding = None
    elif has_kernel(model.embedding):
        model.embedding = PackedQuantizedEmbedding(model.embedding, width)


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


class PackedLinear(Linear):
    """Computes `x @ kernel + bias` like Linear, for one or several kernels side by side.

    With a `gate` and two kernels of the same shape it returns `activation(x @ first) * (x @ second)`.
    """

    is_native = True

    def __init__(
        self,
        parts: Sequence[tuple[jax.Array, jax.Array | None]],  # kernels [in, out] and biases [out]
        width: int,
        *,
        gate: int = NOT_GATED,
        transposed: bool = False,
    ) -> None:
        kernels = [kernel for kernel, _ in parts]
        self.splits = tuple(kernel.shape[0 if transposed else 1] for kernel in kernels)
        self.gate, gated = gate, gate != NOT_GATED
        self.weights = nnx.Param(_panels(kernels, width, gated=gated, transposed=transposed))
        biases = [jnp.zeros(size) if bias is None else bias for size, (_, bias) in zip(self.splits, parts, strict=True)]
        row = _columns([bias.astype(jnp.float32)[None] for bias in biases], width, gated=gated)[0]
        self.bias = nnx.Param(row) if any(bias is not None for _, bias in parts) else None

    @classmethod
    def of(cls, width: int, *layers: Linear, gate: int = NOT_GATED) -> PackedLinear:
        parts = [(layer.kernel[...], None if layer.bias is None else layer.bias[...]) for layer in layers]
        return cls(parts, width, gate=gate)

    @classmethod
    def tied(cls, embedding: jax.Array, width: int) -> PackedLinear:  # [out, in]
        return cls([(embedding, None)], width, transposed=True)

    def columns(self, numbers: jax.Array) -> jax.Array:
        """Returns columns of the kernel, `[len(numbers), in]`."""
        width = self.weights.shape[2]
        found = self.weights[...][numbers // width, :, numbers % width]  # bf16 has an axis for pairs
        return found.reshape(len(numbers), -1)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._multiply(x, x.dtype)

    def wide(self, x: jax.Array) -> jax.Array:
        """Returns the result in f32, as it was summed."""
        return self._multiply(x, jnp.dtype(jnp.float32))

    def _multiply(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        result = _result((x.shape[0], self.num_columns), dtype)
        weights, bias = self.operands
        return MATMUL({"x": x, "weights": weights, "bias": bias}, {"y": result}, gate=self.gate)[0]

    @property
    def num_columns(self) -> int:
        return sum(self.splits) if self.gate == NOT_GATED else self.splits[0]

    @property
    def operands(self) -> tuple[jax.Array, jax.Array]:
        """Weights and bias, as kernels take them."""
        return self.weights[...], value_or_empty(self.bias)


class PackedAttention(Attention):
    """Attention with one matmul for queries, keys and values, and the gate if there is one."""

    def __init__(self, attention: Attention, width: int) -> None:
        self.qkv = _joined(width, *attention.inputs)
        self.out = _packed(attention.out, width)
        self.q_norm, self.k_norm, self.v_norm = attention.q_norm, attention.k_norm, attention.v_norm
        self.config = attention.config
        self.sinks = attention.sinks
        self.k_scale, self.v_scale = attention.k_scale, attention.v_scale
        self.q_projection_norm, self.k_projection_norm = attention.q_projection_norm, attention.k_projection_norm

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        return _split(self.qkv(x), self.qkv.splits)


class PackedShortConv(ShortConv):
    """A short convolution with one matmul for its input and both gates."""

    def __init__(self, conv: ShortConv, width: int) -> None:
        self.joined = _joined(width, conv.before, conv.behind, conv.input)
        self.out = _packed(conv.out, width)
        self.taps, self.taps_bias, self.config = conv.taps, conv.taps_bias, conv.config

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        return jnp.split(self.joined(x), 3, axis=1)


class PackedDeltaNet(DeltaNet):
    """A delta net with one matmul for queries, keys, values and gate, and one for its rates."""

    def __init__(self, net: DeltaNet, width: int) -> None:
        self.joined = _joined(width, net.q, net.k, net.v, net.gate)
        self.joined_rates = _joined(width, net.beta, net.decay)
        self.out = _packed(net.out, width)
        self.q_taps, self.k_taps, self.v_taps = net.q_taps, net.k_taps, net.v_taps
        self.a_log, self.dt_bias, self.norm, self.config = net.a_log, net.dt_bias, net.norm, net.config

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        return _split(self.joined(x), self.joined.splits)

    def rates(self, x: jax.Array) -> Sequence[jax.Array]:
        return _split(self.joined_rates.wide(x), self.joined_rates.splits)


class PackedMLP(GatedMLP):
    """Computes `down(activation(gate(x)) * up(x))` in two matmuls."""

    def __init__(self, mlp: GatedMLP, width: int) -> None:
        self.gate_up = _joined(width, mlp.gate, mlp.up, gate=GATES[mlp.activation])
        self.down = _packed(mlp.down, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.gate_up(x))


class PackedExperts(GroupedMLP):
    """The feed-forwards of all experts in two matmuls, which only read the weights of experts with rows."""

    def __init__(self, experts: GroupedMLP, width: int) -> None:
        self.num_experts, self.activation, self.clamped = experts.num_experts, experts.activation, experts.clamped
        gate = NOT_GATED if experts.clamped else GATES.get(experts.activation, NOT_GATED)
        self.gate_up = _joined_groups(width, experts.gate, experts.up, gate=gate)
        self.down = _joined_groups(width, experts.down)

    def __call__(self, rows: jax.Array, groups: RowGroups) -> jax.Array:
        inner = self.gate_up.multiply(rows, groups.sizes, rows.dtype)
        if self.gate_up.gate == NOT_GATED:
            inner = self.gated(*jnp.split(inner, 2, axis=1))
        return self.down(inner, groups)

    def route(
        self, logits: jax.Array, correction: jax.Array | None, config: ExpertsConfig
    ) -> tuple[jax.Array, jax.Array]:
        shape = (logits.shape[0], config.num_chosen)
        chosen, weights = ROUTE(
            {"logits": logits, "correction": value_or_empty(correction)},
            {"chosen": _result(shape, jnp.int32), "weights": _result(shape, jnp.float32)},
            is_sigmoid=config.scores == "sigmoid",
            is_normalized=config.normalized,
            scale=config.scale,
            groups=config.num_groups,
            groups_chosen=config.groups_chosen,
        )
        return chosen, weights

    def mix(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        results = {
            "rows": _result((chosen.size, x.shape[1]), x.dtype),
            "places": _result(chosen.shape, jnp.int32),
            "group_sizes": _result((self.num_experts,), jnp.int32),
        }
        grouped, places, group_sizes = GROUP_ROWS({"x": x, "chosen": chosen}, results)
        rows = self(grouped, RowGroups(group_sizes, layer))
        return SUM_ROWS({"rows": rows, "places": places, "weights": weights}, {"y": _result(x.shape, jnp.float32)})[0]


class PackedGroups(GroupedLinear):
    """A matrix per expert, from one GroupedLinear or several side by side; `gate` is as for PackedLinear."""

    is_native = True

    def __init__(self, linears: Sequence[GroupedLinear], width: int, *, gate: int = NOT_GATED) -> None:
        self.gate, gated = gate, gate != NOT_GATED
        self.num_columns = linears[0].kernel.shape[-1] * (1 if gated else len(linears))
        # [experts, in, out] of each -> [experts, panels, in, width], with pairs of rows interleaved for bf16
        kernels = zip(*(linear.kernel[...] for linear in linears), strict=True)
        self.weights = nnx.Param(jnp.stack([_pack(_columns(parts, width, gated=gated), width) for parts in kernels]))
        biases = [linear.bias[...].astype(jnp.float32) for linear in linears if linear.bias is not None]
        self.bias = nnx.Param(_columns(biases, width, gated=gated)) if biases else None

    def __call__(self, rows: jax.Array, groups: RowGroups) -> jax.Array:
        return self.multiply(rows, groups.sizes, jnp.dtype(jnp.float32))

    def multiply(self, rows: jax.Array, group_sizes: jax.Array, dtype: jnp.dtype) -> jax.Array:
        result = _result((rows.shape[0], self.num_columns), dtype)
        bias = value_or_empty(self.bias)
        operands = {"x": rows, "weights": self.weights[...], "bias": bias, "group_sizes": group_sizes}
        return GROUPED_MATMUL(operands, {"y": result}, gate=self.gate)[0]


def _result(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def pack_halves(block: Block, width: int) -> None:
    """Packs the matmuls of attention, or of the recurrence in its place, and of the feed-forward. Quantized layers that
    no kernel supports are left as they are.
    """
    if block.recurrence is None:
        _pack_attention(block, width)
    else:
        block.recurrence = _packed_recurrence(block.recurrence, width)
    if isinstance(block.mlp, Experts):
        _pack_experts(block.mlp, width)
    else:
        block.mlp = _packed_mlp(block.mlp, width)
    if block.per_layer is not None:
        _pack_each(block.per_layer, ("gate", "projection"), width)


def _pack_attention(block: Block, width: int) -> None:
    attention = block.attention
    if _can_join(*attention.inputs):
        block.attention = PackedAttention(attention, width)
    else:
        names = [name for name in ("q", "k", "v", "gate") if getattr(attention, name) is not None]
        _pack_each(attention, (*names, "out"), width)


def _packed_recurrence(module: ShortConv | DeltaNet, width: int) -> ShortConv | DeltaNet:
    if isinstance(module, ShortConv):
        if _can_join(module.before, module.behind, module.input):
            return PackedShortConv(module, width)
        _pack_each(module, ("before", "behind", "input", "out"), width)
    elif _can_join(module.q, module.k, module.v, module.gate) and _can_join(module.beta, module.decay):
        return PackedDeltaNet(module, width)
    else:
        _pack_each(module, ("q", "k", "v", "gate", "beta", "decay", "out"), width)
    return module


def _split(joined: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Splits the result of joined matmuls into the columns of each."""
    return jnp.split(joined, np.cumsum(sizes[:-1]).tolist(), axis=1)


def _packed_mlp(mlp: GatedMLP, width: int) -> GatedMLP:
    if mlp.activation in GATES and _can_join(mlp.gate, mlp.up):
        return PackedMLP(mlp, width)
    _pack_each(mlp, ("gate", "up", "down"), width)
    return mlp


def _pack_each(
    module: Attention | GatedMLP | ShortConv | DeltaNet | PerLayer, names: Sequence[str], width: int
) -> None:
    for name in names:
        setattr(module, name, _packed(getattr(module, name), width))


def _packed(linear: Linear, width: int) -> Linear:
    return _joined(width, linear) if _can_join(linear) else linear


def _joined(width: int, *layers: Linear, gate: int = NOT_GATED) -> PackedLinear | PackedQuantizedLinear:
    """Joins several matmuls into one."""
    if _are_plain(*layers):
        return PackedLinear.of(width, *layers, gate=gate)
    return PackedQuantizedLinear(width, *cast("tuple[QuantizedLinear, ...]", layers), gate=gate)


def _joined_groups(width: int, *linears: GroupedLinear, gate: int = NOT_GATED) -> PackedGroups | PackedQuantizedGroups:
    """Joins like `_joined`, for a matrix per expert."""
    if _are_plain(*linears):
        return PackedGroups(linears, width, gate=gate)
    return PackedQuantizedGroups(cast("tuple[QuantizedGroupedLinear, ...]", linears), width, gate=gate)


def _can_join(*layers: Linear | GroupedLinear) -> bool:
    return _are_plain(*layers) or has_kernel(*layers)


def _are_plain(*layers: Linear | GroupedLinear) -> bool:
    return not any(isinstance(layer, QuantizedLinear | QuantizedGroupedLinear) for layer in layers)


def _pack_experts(experts: Experts, width: int) -> None:
    experts.router = _packed(experts.router, width)
    grouped = experts.experts
    if _can_join(grouped.gate, grouped.up) and _can_join(grouped.down):
        experts.experts = PackedExperts(grouped, width)
    if experts.shared is not None:
        experts.shared = _packed_mlp(experts.shared, width)
    if experts.shared_gate is not None:
        experts.shared_gate = _packed(experts.shared_gate, width)


@partial(jax.jit, static_argnames=("width", "gated", "transposed"))
def _panels(kernels: Sequence[jax.Array], width: int, *, gated: bool, transposed: bool) -> jax.Array:
    """Packs kernels into panels. Compiled, so that no intermediate arrays are in memory."""
    parts = [kernel.T for kernel in kernels] if transposed else kernels
    return _pack(_columns(parts, width, gated=gated), width)


def _columns(parts: Sequence[jax.Array], width: int, *, gated: bool) -> jax.Array:
    """Returns the columns of all parts, one part after the other; if gated, half a panel of each part in turn."""
    if not gated:
        return _padded(jnp.concatenate(parts, axis=1), width)
    halves = [_padded(part, width // 2) for part in parts]
    depth = halves[0].shape[0]
    return jnp.stack([half.reshape(depth, -1, width // 2) for half in halves], axis=2).reshape(depth, -1)


def _padded(columns: jax.Array, width: int) -> jax.Array:
    return jnp.pad(columns, ((0, 0), (0, -columns.shape[1] % width)))


def _pack(kernel: jax.Array, width: int) -> jax.Array:
    """Packs [in, out] to [panels, in, width]; bf16, with pairs of rows interleaved, to [panels, in / 2, width, 2]."""
    depth = kernel.shape[0]
    panels = kernel.reshape(depth, -1, width).transpose(1, 0, 2)
    if kernel.dtype != jnp.bfloat16:
        return panels
    return panels.reshape(panels.shape[0], depth // 2, 2, width).swapaxes(2, 3)
