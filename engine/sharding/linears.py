"""Matmuls with quantized weights by TPU kernels: each device multiplies by its own share, read in packed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from penstock.engine.kernels.tpu import LANES, KernelForm, grouped_quantized_matmul, quantized_matmul
from penstock.engine.models import Decoder, ParamPath
from penstock.engine.models.axes import logical_axes
from penstock.engine.models.decoder import is_matmul
from penstock.engine.models.layer_scans import layer_runs
from penstock.engine.models.layers.delta_net import DeltaNet
from penstock.engine.models.layers.experts import Experts
from penstock.engine.models.layers.linear import (
    Arrays,
    GroupedLinear,
    Held,
    Linear,
    Plain,
    RowGroups,
    Weight,
    by_row,
    rounded,
)
from penstock.engine.models.layers.quantized import Quantized, quantized_rows
from penstock.engine.sharding.overlapped_sums import overlap
from penstock.engine.sharding.placement import Placement
from penstock.engine.sharding.states import KernelDeltaNet, has_kernel


def prepare_for_tpu(model: Decoder, placement: Placement | None, *, interpret: bool = False) -> Decoder:
    """Gives each quantized matmul and each delta net of `model`, already laid out over `placement`, its kernel.

    The others stay, and XLA unpacks them or loops over tokens: in models of other types than bfloat16, for packings and
    heads that have no kernel, and where a device would have parts of groups. `interpret` is for tests on a CPU.
    """
    _pad_embedding(model, placement)
    _pad_experts(model, placement)
    if placement is not None and placement.sums_beside:
        overlap(model, placement)
    if model.config.dtype != "bfloat16":
        return model
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(model))
    for path, module in modules:
        if is_matmul(path, module) and _is_served(module, path, placement):
            _replace(model, path, _with_kernel(module, path, placement, interpret=interpret))
        elif isinstance(module, DeltaNet) and has_kernel(module.config, placement) and _are_in_loops(model):
            _replace(model, path, KernelDeltaNet(module, placement, interpret=interpret))
    return model


def _are_in_loops(model: Decoder) -> bool:
    """Whether all layers with states are computed in loops, which hold the arrays of states."""
    runs = layer_runs(model.config)
    return model.is_stacked and all(
        run.repeats > 1 for run in runs if not all(block.has_attention for block in run.pattern)
    )


def _replace(model: Decoder, path: ParamPath, module: nnx.Module) -> None:
    holder: Any = model
    for name in path[:-1]:
        holder = holder[name] if isinstance(name, int) else getattr(holder, name)
    setattr(holder, str(path[-1]), module)


def _is_served(weight: Weight, path: ParamPath, placement: Placement | None) -> bool:
    """Whether there is a kernel, and each device has whole groups and whole blocks of rows."""
    held = weight.held
    if not isinstance(held, Quantized):
        return False
    packing, num_dims = held.packing, 2 if isinstance(weight, Linear) else 3
    has_kernel = KernelForm.serves(packing, of_experts=isinstance(weight, GroupedLinear))
    if not has_kernel or placement is None:
        return has_kernel
    ways = [placement.ways(axis) for axis in logical_axes((*path, "codes"), num_dims)[-2:]]
    sizes = (max(packing.rows, 1), packing.group or 1)
    return all(n == 1 or num % (n * size) == 0 for n, num, size in zip(ways, held.shape, sizes, strict=True))


@dataclass(frozen=True)
class TPUKernel(Held):
    """A quantized weight in the layout of the kernel that multiplies by it; each device has its own share."""

    form: KernelForm
    path: ParamPath
    placement: Placement | None
    interpret: bool
    num_out: int  # on each device
    input_axis: str | None = None  # as in Quantized

    is_read_in_stack = True

    def multiply(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, layer: jax.Array | None
    ) -> jax.Array:
        stack, layer = _stacked(arrays, layer)
        if self.form.packing.has_int8_activations:
            codes, scales = quantized_rows(x)
            y = self._multiply_on_devices(codes.astype(x.dtype), stack, layer) * scales
        else:
            y = self._multiply_on_devices(x, stack, layer)
        return rounded(y, bias, dtype)

    def multiply_groups(
        self, rows: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, groups: RowGroups
    ) -> jax.Array:
        stack, layer = _stacked(arrays, groups.layer)
        multiply = partial(grouped_quantized_matmul, self.form, num_out=self.num_out, interpret=self.interpret)
        if self.form.packing.has_int8_activations:
            codes, scales = quantized_rows(rows, self.input_axis)
            y = multiply(codes.astype(rows.dtype), groups.sizes, stack, layer) * scales
        else:
            y = multiply(rows, groups.sizes, stack, layer)
        return rounded(y, by_row(bias, rows, groups), dtype)

    def columns(self, numbers: jax.Array, arrays: Arrays) -> jax.Array:
        raise TypeError("a TPU holds an embedding beside a quantized head")

    def _multiply_on_devices(self, x: jax.Array, stack: Arrays, layer: jax.Array) -> jax.Array:
        if self.placement is None:
            return self._multiply_on_device(x, stack, layer, ())
        placement, (num_out, num_in) = self.placement, logical_axes((*self.path, "codes"), 2)
        run = jax.shard_map(
            partial(self._multiply_on_device, over=placement.replica if placement.ways(num_in) > 1 else ()),
            mesh=placement.mesh,
            in_specs=(
                placement.spec((None, num_in)),
                {name: placement.spec(logical_axes((*self.path, name), 3)) for name in stack},
                PartitionSpec(),
            ),
            out_specs=placement.spec((None, num_out)),
            check_vma=False,
        )
        y: jax.Array = run(x, stack, layer)
        return y

    def _multiply_on_device(self, x: jax.Array, stack: Arrays, layer: jax.Array, over: tuple[str, ...]) -> jax.Array:
        y = quantized_matmul(self.form, x, stack, layer, num_out=self.num_out, interpret=self.interpret)
        return jax.lax.psum(y, over) if over else y


def _stacked(arrays: Arrays, layer: jax.Array | None) -> tuple[Arrays, jax.Array]:
    """Returns the weights of all layers, and the layer; one layer's weights are a stack of their own."""
    if layer is None:
        return {name: array[None] for name, array in arrays.items()}, jnp.int32(0)
    return arrays, layer


def _with_kernel(weight: Weight, path: ParamPath, placement: Placement | None, *, interpret: bool) -> Weight:
    """Returns `weight`, whose arrays may be shapes, in the layout of its kernel."""
    quantized = cast("Quantized", weight.held)
    num_out, axes = quantized.shape[0], logical_axes((*path, "codes"), 2 if isinstance(weight, Linear) else 3)[-2:]
    shares = (1, 1) if placement is None else (placement.ways(axes[0]), placement.ways(axes[1]))
    device = jax.devices()[0] if placement is None else placement.mesh.devices.flat[0]
    form, arrays = KernelForm.of_chip(quantized.packing, device.device_kind), {}
    leaves = {leaf: getattr(weight, leaf).get_value() for leaf in form.leaves}
    for leaf, name in zip(form.leaves, form.names, strict=True):
        held = partial(form.held, leaf, num_out=num_out, shares=shares)
        arrays[name] = _changed(held, leaves, (*path, name), placement)
    bias = None if weight.bias is None else weight.bias.get_value()
    kernel = TPUKernel(form, path, placement, interpret, num_out // shares[0], quantized.input_axis)
    return type(weight)(kernel, arrays, bias)


def _pad_embedding(model: Decoder, placement: Placement | None) -> None:
    """Pads the embedding's features to whole tiles of lanes.

    Otherwise XLA would lay its tokens along the lanes, and transpose it in each step to look some up.
    """
    if model.head is None or not isinstance(model.embedding, nnx.Param):
        return
    table: Any = model.embedding.get_value()
    padding = ((0, 0), (0, -table.shape[1] % LANES))
    if padding[1][1]:
        model.embedding = nnx.Param(_changed(partial(jnp.pad, pad_width=padding), table, ("embedding",), placement))


def _pad_experts(model: Decoder, placement: Placement | None) -> None:
    """Pads experts' inner features to whole tiles, or each step would copy all experts for a grouped matmul.

    The padding is 0 after the activation, and multiplied by 0.
    """
    for number, block in enumerate(model.blocks):
        if not isinstance(block.mlp, Experts):
            continue
        for name in ("gate", "up", "down"):
            linear, path = getattr(block.mlp.experts, name), ("blocks", number, "mlp", "experts", name)
            if not isinstance(linear.held, Plain):
                continue
            _pad_inside(linear, "kernel", path, placement)
            if linear.bias is not None and name != "down":
                _pad_inside(linear, "bias", path, placement)


def _pad_inside(linear: GroupedLinear, leaf: str, path: ParamPath, placement: Placement | None) -> None:
    """Pads to whole tiles on each device."""
    value: Any = getattr(linear, leaf).get_value()
    axis = logical_axes((*path, leaf), value.ndim).index("expert_mlp")
    tile = LANES * (1 if placement is None else placement.ways("expert_mlp"))
    padding = [(0, -size % tile if place == axis else 0) for place, size in enumerate(value.shape)]
    if padding[axis][1]:
        made = _changed(partial(jnp.pad, pad_width=padding), value, (*path, leaf), placement)
        setattr(linear, leaf, nnx.Param(made))


def _changed(change: Callable[[Any], jax.Array], value: Any, path: ParamPath, placement: Placement | None) -> Any:
    """Applies `change` to an array or to several; lays the result out as at `path`. For shapes, returns its shape."""
    shape = jax.eval_shape(change, value)
    sharding = None if placement is None else placement.sharding(logical_axes(path, len(shape.shape)))
    if not isinstance(jax.tree.leaves(value)[0], jax.ShapeDtypeStruct):
        return jax.jit(change, out_shardings=sharding)(value)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
