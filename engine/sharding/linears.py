"""Matmuls with quantized weights by TPU kernels: each device multiplies by its own share, read in packed form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from penstock.engine.kernels.tpu import LANES, KernelForm, grouped_quantized_matmul, quantized_matmul
from penstock.engine.models import Decoder, ParamPath
from penstock.engine.models.axes import logical_axes
from penstock.engine.models.layers.basic import Linear
from penstock.engine.models.layers.delta_net import DeltaNet
from penstock.engine.models.layers.experts import Experts, GroupedLinear, RowGroups
from penstock.engine.models.layers.quantized import QuantizedGroupedLinear, QuantizedLinear
from penstock.engine.models.runs import layer_runs
from penstock.engine.sharding.overlapped_sums import overlap
from penstock.engine.sharding.placement import Placement
from penstock.engine.sharding.states import KernelDeltaNet, has_kernel

Held = dict[str, jax.Array]


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
    for path, linear in modules:
        made = _KERNELS.get(type(linear))
        if made is not None and _is_served(linear, path, placement):
            _replace(model, path, made(linear, path, placement, interpret=interpret))
        elif isinstance(linear, DeltaNet) and has_kernel(linear.config, placement) and _are_in_loops(model):
            _replace(model, path, KernelDeltaNet(linear, placement, interpret=interpret))
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


def _is_served(linear: QuantizedLinear | QuantizedGroupedLinear, path: ParamPath, placement: Placement | None) -> bool:
    """Whether there is a kernel, and each device has whole groups and whole blocks of rows."""
    packing = linear.packing
    if not KernelForm.serves(packing) or placement is None:
        return KernelForm.serves(packing)
    num_dims = 2 if isinstance(linear, QuantizedLinear) else 3
    ways = [placement.ways(axis) for axis in logical_axes((*path, "codes"), num_dims)[-2:]]
    sizes = (max(packing.rows, 1), packing.group or 1)
    return all(n == 1 or num % (n * size) == 0 for n, num, size in zip(ways, linear.shape, sizes, strict=True))


class KernelLinear(Linear):
    """A `QuantizedLinear` that multiplies by a kernel. In a stacked decoder it has the weights of all layers."""

    is_read_in_stack = True

    def __init__(
        self, linear: QuantizedLinear, path: ParamPath, placement: Placement | None, *, interpret: bool
    ) -> None:
        self.form, self.bias = KernelForm(linear.packing), linear.bias
        self.path, self.placement, self.interpret = path, placement, interpret
        _take_over(self, linear, path, placement)

    def wide(self, x: jax.Array) -> jax.Array:
        """Returns the result in f32, as it was summed."""
        held = {name: getattr(self, name)[...] for name in self.form.names}
        layer = self.layer
        if layer is None:
            held, layer = {name: array[None] for name, array in held.items()}, jnp.int32(0)
        y = self._of_devices(x, held, layer)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)

    def _of_devices(self, x: jax.Array, held: Held, layer: jax.Array) -> jax.Array:
        if self.placement is None:
            return self._of_device(x, held, layer, ())
        placement, (num_out, num_in) = self.placement, logical_axes((*self.path, "codes"), 2)
        run = jax.shard_map(
            partial(self._of_device, over=placement.replica if placement.ways(num_in) > 1 else ()),
            mesh=placement.mesh,
            in_specs=(
                placement.spec((None, num_in)),
                {name: placement.spec(logical_axes((*self.path, name), 3)) for name in held},
                PartitionSpec(),
            ),
            out_specs=placement.spec((None, num_out)),
            check_vma=False,
        )
        y: jax.Array = run(x, held, layer)
        return y

    def _of_device(self, x: jax.Array, held: Held, layer: jax.Array, over: tuple[str, ...]) -> jax.Array:
        y = quantized_matmul(self.form, x, held, layer, interpret=self.interpret)
        return jax.lax.psum(y, over) if over else y


class KernelGroupedLinear(GroupedLinear):
    """A `QuantizedGroupedLinear` that multiplies by a kernel, on a device with its own experts.

    In a stacked decoder it has the weights of all layers.
    """

    is_read_in_stack = True

    def __init__(
        self, linear: QuantizedGroupedLinear, path: ParamPath, placement: Placement | None, *, interpret: bool
    ) -> None:
        self.form, self.bias, self.interpret = KernelForm(linear.packing), linear.bias, interpret
        _take_over(self, linear, path, placement)

    def product(self, rows: jax.Array, groups: RowGroups) -> jax.Array:
        held = {name: getattr(self, name)[...] for name in self.form.names}
        layer = groups.layer
        if layer is None:
            held, layer = {name: array[None] for name, array in held.items()}, jnp.int32(0)
        return grouped_quantized_matmul(self.form, rows, groups.sizes, held, layer, interpret=self.interpret)


_KERNELS: dict[type, type[KernelLinear] | type[KernelGroupedLinear]] = {
    QuantizedLinear: KernelLinear,
    QuantizedGroupedLinear: KernelGroupedLinear,
}


def _take_over(
    kernel: KernelLinear | KernelGroupedLinear,
    linear: QuantizedLinear | QuantizedGroupedLinear,
    path: ParamPath,
    placement: Placement | None,
) -> None:
    """Gives `kernel` the arrays of `linear`, or their shapes, in the layout of the kernels."""
    for leaf, name in zip(kernel.form.leaves, kernel.form.names, strict=True):
        value: Any = getattr(linear, leaf).get_value()
        of_out, of_in = (
            1 if placement is None else placement.ways(axis) for axis in logical_axes((*path, "codes"), value.ndim)[-2:]
        )
        if kernel.form.changes(leaf, value, of_in):
            held = partial(kernel.form.held, leaf, num_out=linear.shape[0], shares=(of_out, of_in))
            value = _changed(held, value, (*path, name), placement)
        setattr(kernel, name, nnx.Param(value))


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
            if type(linear) is not GroupedLinear:
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


def _changed(change: Callable[[jax.Array], jax.Array], value: Any, path: ParamPath, placement: Placement | None) -> Any:
    """Returns an array, or its shape, as it will be at `path`."""
    sharding = None if placement is None else placement.sharding(logical_axes(path, value.ndim))
    if not isinstance(value, jax.ShapeDtypeStruct):
        return jax.jit(change, out_shardings=sharding)(value)
    shape = jax.eval_shape(change, value)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
