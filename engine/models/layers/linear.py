"""Matmuls with weights, however these are held. All of them work on a flat axis of rows, `[num_rows, in]`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

F32 = jnp.float32
Arrays: TypeAlias = Mapping[str, jax.Array]


class RowGroups(NamedTuple):
    """Rows sorted by their experts."""

    sizes: jax.Array  # i32 [num_experts]: rows of each; rows after them are undefined
    layer: jax.Array | None = None  # i32 []: the layer, if all layers' experts are held

    def sizes_of_all_layers(self, num_layers: int) -> jax.Array:
        """Returns the group sizes for the experts of all layers: those of other layers have no rows."""
        sizes = jnp.zeros((num_layers, *self.sizes.shape), jnp.int32)
        placed: jax.Array = jax.lax.dynamic_update_index_in_dim(sizes, self.sizes, self.layer, 0)
        return placed.reshape(-1)


class Held(ABC):
    """How a weight is held: which arrays a module has for it, and how to multiply by them.

    There are five: `Plain`, `Quantized`, `Panels` and `QuantizedPanels` for the CPU's kernels, and `TPUKernel`. Each is
    a value that compares by its fields, and leaves the arrays to the module.
    """

    is_native: ClassVar[bool] = False
    """Whether the CPU's kernels compute it."""
    is_read_in_stack: ClassVar[bool] = False
    """Whether a stacked decoder passes it the weights of all layers, and the layer."""

    @abstractmethod
    def multiply(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, layer: jax.Array | None
    ) -> jax.Array:
        """Returns `x @ weight + bias`, summed in f32 and rounded once to `dtype`."""

    def multiply_first(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, num_rows: jax.Array
    ) -> jax.Array:
        """Multiplies the first `num_rows` rows, i32 `[1]`. The results of all other rows are undefined."""
        return self.multiply(x, arrays, bias, dtype, None)

    @abstractmethod
    def multiply_groups(
        self, rows: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, groups: RowGroups
    ) -> jax.Array:
        """Multiplies each row by its expert's weight, as in `multiply`."""

    @abstractmethod
    def columns(self, numbers: jax.Array, arrays: Arrays) -> jax.Array:
        """Returns columns of a weight `[in, out]`, `[len(numbers), in]`."""

    def split(self, y: jax.Array) -> list[jax.Array]:
        """Splits a result into those of the matmuls that the weight joins."""
        return [y]


@dataclass(frozen=True)
class Plain(Held):
    """The weight as one array, `kernel`: `[in, out]`, or `[experts, in, out]`. A stacked decoder may pass the experts
    of all layers, `[layers, experts, in, out]`.
    """

    def multiply(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, layer: jax.Array | None
    ) -> jax.Array:
        # The explicit accumulation type also keeps XLA on CPU in its fast bfloat16 path.
        return rounded(jnp.dot(x, arrays["kernel"], preferred_element_type=F32), bias, dtype)

    def multiply_groups(
        self, rows: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, groups: RowGroups
    ) -> jax.Array:
        return rounded(grouped_dot(rows, arrays["kernel"], groups), by_row(bias, rows, groups), dtype)

    def columns(self, numbers: jax.Array, arrays: Arrays) -> jax.Array:
        return arrays["kernel"][:, numbers].T


def rounded(y: jax.Array, bias: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Adds the bias to a sum in f32, and rounds the result."""
    return (y if bias is None else y + bias.astype(F32)).astype(dtype)


def by_row(bias: jax.Array | None, rows: jax.Array, groups: RowGroups) -> jax.Array | None:
    """Returns the bias of each row's expert, f32 `[num_rows, out]`."""
    if bias is None:
        return None
    return jnp.repeat(bias.astype(F32), groups.sizes, axis=0, total_repeat_length=rows.shape[0])


def grouped_dot(rows: jax.Array, kernels: jax.Array, groups: RowGroups) -> jax.Array:
    """Multiplies each row by its expert's kernel. A grouped matmul reads the ones that have rows in place; anything cut
    out of a stack of layers for it is copied first, used or not.
    """
    sizes = groups.sizes
    if kernels.ndim == 4:
        kernels, sizes = kernels.reshape(-1, *kernels.shape[2:]), groups.sizes_of_all_layers(kernels.shape[0])
    return jax.lax.ragged_dot(rows, kernels, sizes, preferred_element_type=F32)


class Weight(nnx.Module):
    """A weight, held in one of the ways of `Held`, and its bias. Parameters have the names that the way gives them."""

    kernel: nnx.Param[jax.Array]
    """Set only if the weight is held `Plain`."""

    def __init__(self, held: Held, arrays: Mapping[str, Any], bias: Any = None) -> None:
        self.held, self.names = held, tuple(arrays)
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))
        self.bias = None if bias is None else nnx.Param(bias)

    @classmethod
    def plain(cls, *shape: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> Self:
        """Makes a random weight of `shape`, `[in, out]` or `[experts, in, out]`, and a bias of zeros."""
        kernel = nnx.initializers.normal(0.02)(rngs.params(), shape, dtype)
        return cls(Plain(), {"kernel": kernel}, jnp.zeros((*shape[:-2], shape[-1]), dtype) if bias else None)

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The arrays that hold the weight, by name."""
        return {name: getattr(self, name)[...] for name in self.names}

    @property
    def bias_value(self) -> jax.Array | None:
        return None if self.bias is None else self.bias[...]


class Linear(Weight):
    """Computes `x @ weight + bias`, summed in f32 whatever the type of `x`.

    Every such result passes through `__call__`, except those that a kernel of the CPU fuses with what is around them
    (`models/cpu/block.py`), and those in parts (`models/residual_stream.py`).

    It may join several matmuls of one input, side by side: the module's first has them all, and the others are None.
    """

    layer: jax.Array | None = None  # i32 []: the layer, if it has the weights of all layers; None: only its own

    def __call__(self, x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:  # [num_rows, in] -> [num_rows, out]
        """Returns the result in `dtype`; None: in that of `x`."""
        return self.held.multiply(x, self.arrays, self.bias_value, x.dtype if dtype is None else dtype, self.layer)

    def wide(self, x: jax.Array) -> jax.Array:
        """Returns the result in f32, as it was summed."""
        return self(x, F32)

    def wide_first(self, x: jax.Array, num_rows: jax.Array) -> jax.Array:
        """Returns the results of the first `num_rows` rows, i32 `[1]`, in f32. The others are undefined."""
        return self.held.multiply_first(x, self.arrays, self.bias_value, F32, num_rows)

    def columns(self, numbers: jax.Array) -> jax.Array:
        """Returns columns of the weight, `[len(numbers), in]`."""
        return self.held.columns(numbers, self.arrays)


class GroupedLinear(Weight):
    """A matrix per expert; each row is multiplied by its expert's."""

    def __call__(
        self,
        rows: jax.Array,  # [num_rows, in], in the order of their experts
        groups: RowGroups,
        dtype: DTypeLike = F32,
    ) -> jax.Array:
        """Returns the result in `dtype`, by default as it was summed."""
        return self.held.multiply_groups(rows, self.arrays, self.bias_value, dtype, groups)


AnyLinear = TypeVar("AnyLinear", Linear, GroupedLinear)


def present(*linears: AnyLinear | None) -> tuple[AnyLinear, ...]:
    """Returns the matmuls that a module has."""
    return tuple(linear for linear in linears if linear is not None)


def project(x: jax.Array, linears: Iterable[Linear], dtype: DTypeLike | None = None) -> list[jax.Array]:
    """Returns the results of matmuls of one input, in order, wherever they are joined."""
    return [part for linear in linears for part in linear.held.split(linear(x, dtype))]
