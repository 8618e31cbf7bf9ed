"""How an array of a packed weight, or a part of it, is made from a stored tensor, or a part of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

import numpy as np

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.packing import Packing

Index = tuple[slice, ...]
FLOAT_KINDS: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class TensorHeader(Protocol):
    """A file's description of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """The elements' type, as safetensors names it."""


def as_stored(values: np.ndarray) -> np.ndarray:
    return values


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array whose blocks each come from a block of one stored tensor.

    Axes of both shapes are matched from the last one of the blocks. Extra axes at the end of a stored tensor are read
    whole. So are the axes before those of the blocks, which are the same in both.
    """

    tensor: str  # suffix of the module's name
    stored_shape: tuple[int, ...]
    kinds: tuple[str, ...]
    block: tuple[int, ...] = (1, 1)  # (): the tensor is read whole
    stored_block: tuple[int, ...] = (1, 1)
    convert: Callable[[np.ndarray], np.ndarray] = as_stored
    is_transposed: bool = False  # the stored tensor has the input first

    def transposed(self) -> Self:
        """Returns the leaf for a tensor that is stored the other way round."""
        return replace(self, stored_shape=self.stored_shape[::-1], is_transposed=not self.is_transposed)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Checks whether a stored tensor has the right shape. If it is read whole, axes of 1 do not matter."""
        return shape == self.stored_shape or (not self.block and math.prod(shape) == math.prod(self.stored_shape))

    def read(self, tensor: Callable[[Index], np.ndarray], shape: tuple[int, ...], index: Index) -> np.ndarray:
        """Reads what `index` selects of the array of `shape`; `tensor` reads a part of the stored one.

        Raises:
            CheckpointError: a stored value is not valid.
        """
        if not self.block:
            return self.convert(tensor(())).reshape(shape)[index]
        num_lead = len(shape) - len(self.block)
        parts = [
            _Part.of(at, size, *blocks)
            for at, size, *blocks in zip(index[num_lead:], shape[num_lead:], self.block, self.stored_block, strict=True)
        ]
        sizes = self.stored_shape[: len(parts)]
        ends = reversed(sizes) if self.is_transposed else sizes
        stored = [slice(part.stored.start, min(part.stored.stop, end)) for part, end in zip(parts, ends, strict=True)]
        values = tensor((*index[:num_lead], *(reversed(stored) if self.is_transposed else stored)))
        values = self.convert(values.swapaxes(-1, -2) if self.is_transposed else values)
        cut: tuple[Any, ...] = (..., *(part.cut for part in parts))
        return np.asarray(values[cut])


@dataclass(frozen=True, slots=True)
class _Part:
    """The whole blocks that are read along one axis, and the requested part of them."""

    stored: slice
    cut: slice

    @classmethod
    def of(cls, index: slice, size: int, block: int, stored_block: int) -> Self:
        start, stop, _ = index.indices(size)
        first, end = start // block, -(-stop // block)
        cut = slice(start - first * block, stop - first * block)
        return cls(slice(first * stored_block, end * stored_block), cut)


class QuantizedFormat(Protocol):
    """A format of quantized checkpoints, as its `quantization_config` describes it."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Name suffixes of a quantized module's tensors that are ignored: they quantize activations, which is not done
        here.
        """

    def packing(self, module: str, stored: Mapping[str, TensorHeader]) -> Packing | None:
        """Returns the form of the weight of `module`; None: it is not quantized.

        Raises:
            CheckpointError: it is stored in a way that the format does not allow.
        """

    def leaves(
        self, module: str, stored: Mapping[str, TensorHeader], packing: Packing, num_out: int, num_in: int
    ) -> Mapping[str, Leaf]:
        """Returns where each array is stored, by the names of `leaf_shapes`."""

    def checks(self, packing: Packing, num_out: int, num_in: int) -> tuple[Leaf, ...]:
        """Returns redundant tensors, whose contents are checked by reading them; some may be missing."""


class ConfiguredFormat(QuantizedFormat, Protocol):
    """A format that a config.json describes, or a setting."""

    def expected(self, module: str, num_in: int, dtype: str) -> Packing | None:
        """Returns the most likely form of the weight of `module` without a file, for `num_in` input features and a
        model of `dtype`. Types of scales are those that the format's programs write.
        """


def float_scales(tensor: str, shape: tuple[int, ...], scale: str, *, is_transposed: bool = False) -> Leaf:
    """Returns the leaf of scales that are stored as they are held, in the type `scale`; without a shape, one for the
    whole weight.
    """
    block = (1, 1) if shape else ()
    kinds = tuple(kind for kind, name in FLOAT_KINDS.items() if name == scale)
    return Leaf(tensor, shape, kinds, block, block, finite, is_transposed)


def block_scales(tensor: str, rows: int, packing: Packing, num_out: int, num_in: int) -> Leaf:
    """Returns the leaf of scales that are each stored for `rows` output features. They are held for as many rows, or
    repeated for each.
    """
    groups = packing.num_groups(num_in)
    if rows == packing.rows:
        return float_scales(tensor, (packing.num_row_groups(num_out), groups) if rows else (), packing.scale)
    kinds = float_scales(tensor, (), packing.scale).kinds
    return Leaf(tensor, (-(-num_out // rows), groups), kinds, (rows, 1), (1, 1), partial(_repeated, rows=rows))


def _repeated(scales: np.ndarray, *, rows: int) -> np.ndarray:
    return np.repeat(finite(scales), rows, axis=0)


def finite(values: np.ndarray) -> np.ndarray:
    """Returns the scales unchanged.

    Raises:
        CheckpointError: one of them is infinite or not a number.
    """
    wrong = ~np.isfinite(values.astype(np.float32))
    if wrong.any():
        raise CheckpointError(f"has {int(wrong.sum())} of {wrong.size} scales that are not finite")
    return values


def fp8_bytes(codes: np.ndarray) -> np.ndarray:
    """Returns float8_e4m3fn codes as u8.

    Raises:
        CheckpointError: one of them is not a number.
    """
    held = codes.view(np.uint8)
    wrong = (held & 0x7F) == 0x7F
    if wrong.any():
        raise CheckpointError(f"has {int(wrong.sum())} of {wrong.size} weights that are not numbers")
    return held


def required(name: str, stored: Mapping[str, TensorHeader]) -> TensorHeader:
    """Returns the header of `name`. Raises CheckpointError if it is missing."""
    if name not in stored:
        raise CheckpointError(f"the checkpoint lacks {name}, which goes with other tensors of that weight")
    return stored[name]


def scale_type(name: str, header: TensorHeader) -> str:
    """Returns the type in which these scales are held.

    Raises:
        CheckpointError: they are not floats.
    """
    if header.kind not in FLOAT_KINDS:
        raise CheckpointError(f"tensor {name} is of type {header.kind}, expected one of {', '.join(FLOAT_KINDS)}")
    return FLOAT_KINDS[header.kind]


def order(tensor: str, num_in: int, num_groups: int) -> Leaf:
    """Returns the leaf of each input feature's group."""
    return Leaf(tensor, (num_in,), ("I32",), (1,), (1,), partial(_groups, num_groups=num_groups))


def _groups(numbers: np.ndarray, *, num_groups: int) -> np.ndarray:
    wrong = numbers[(numbers < 0) | (numbers >= num_groups)]
    if wrong.size:
        raise CheckpointError(f"names group {int(wrong[0])} of {num_groups}")
    return numbers
