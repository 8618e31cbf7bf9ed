"""Matmuls with quantized weights by TPU kernels: each device multiplies by its share, which it reads as it is held."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from penstock.engine.kernels import KernelForm, quantized_matmul
from penstock.engine.models import Decoder, ParamPath
from penstock.engine.models.axes import Axes, logical_axes
from penstock.engine.models.layers import Linear
from penstock.engine.models.quantized import QuantizedLinear
from penstock.engine.sharding import Placement

Held = dict[str, jax.Array]


def use_kernels(model: Decoder, placement: Placement | None, *, interpret: bool = False) -> Decoder:
    """`model`, laid out over `placement` already, with the kernel for each quantized matmul that it serves.

    Others stay, and XLA unpacks them: in models of other types than bfloat16, of packings that have no kernel, and
    where devices would have parts of groups. `interpret` is for tests, on a CPU.
    """
    if model.config.dtype != "bfloat16":
        return model
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(model))
    for path, linear in modules:
        if type(linear) is QuantizedLinear and _is_served(linear, path, placement):
            holder: Any = model
            for name in path[:-1]:
                holder = holder[name] if isinstance(name, int) else getattr(holder, name)
            setattr(holder, str(path[-1]), KernelLinear(linear, path, placement, interpret=interpret))
    return model


def _is_served(linear: QuantizedLinear, path: ParamPath, placement: Placement | None) -> bool:
    """Whether there is a kernel, and each device has whole groups of whole blocks of rows."""
    packing = linear.packing
    if not KernelForm.serves(packing) or placement is None:
        return KernelForm.serves(packing)
    ways = [placement.ways(axis) for axis in _axes(path, "codes", 2)]
    sizes = (max(packing.rows, 1), packing.group or 1)
    return all(n == 1 or num % (n * size) == 0 for n, num, size in zip(ways, linear.shape, sizes, strict=True))


def _axes(path: ParamPath, leaf: str, num_dims: int) -> Axes:
    """As KernelForm holds it."""
    *lead, num_out, num_in = logical_axes((*path, leaf), num_dims)
    return (*lead, num_out, num_in) if leaf == "codes" else (*lead, num_in, num_out)


class KernelLinear(Linear):
    """As the QuantizedLinear that it takes the weight of. In a stacked decoder it has the weights of all layers."""

    is_read_in_stack = True

    def __init__(
        self, linear: QuantizedLinear, path: ParamPath, placement: Placement | None, *, interpret: bool
    ) -> None:
        self.form, self.bias = KernelForm(linear.packing), linear.bias
        self.path, self.placement, self.interpret = path, placement, interpret
        for name in self.form.leaves:
            leaf = getattr(linear, name).get_value()
            setattr(self, name, nnx.Param(self._as_held(name, leaf, linear.shape[0])))

    def wide(self, x: jax.Array) -> jax.Array:
        """In f32, as it was summed."""
        held = {name: getattr(self, name)[...] for name in self.form.leaves}
        layer = self.layer
        if layer is None:
            held, layer = {name: array[None] for name, array in held.items()}, jnp.int32(0)
        y = self._of_devices(x, held, layer)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)

    def _of_devices(self, x: jax.Array, held: Held, layer: jax.Array) -> jax.Array:
        if self.placement is None:
            return self._of_device(x, held, layer, ())
        placement, (num_out, num_in) = self.placement, _axes(self.path, "codes", 2)
        run = jax.shard_map(
            partial(self._of_device, over=placement.replica if placement.ways(num_in) > 1 else ()),
            mesh=placement.mesh,
            in_specs=(
                placement.spec((None, num_in)),
                {name: placement.spec(_axes(self.path, name, 3)) for name in held},
                PartitionSpec(),  # type: ignore[no-untyped-call]
            ),
            out_specs=placement.spec((None, num_out)),
            check_vma=False,
        )
        y: jax.Array = run(x, held, layer)
        return y

    def _of_device(self, x: jax.Array, held: Held, layer: jax.Array, over: tuple[str, ...]) -> jax.Array:
        y = quantized_matmul(self.form, x, held, layer, interpret=self.interpret)
        return jax.lax.psum(y, over) if over else y  # type: ignore[no-untyped-call]

    def _as_held(self, name: str, leaf: Any, num_out: int) -> Any:
        """Of an array, or of the shape of one."""
        held = partial(self.form.held, name, num_out=num_out)
        sharding = None if self.placement is None else self.placement.sharding(_axes(self.path, name, leaf.ndim))
        if name == "codes":
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            shape = jax.eval_shape(held, leaf)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)  # type: ignore[no-untyped-call]
        return jax.jit(held, out_shardings=sharding)(leaf)
