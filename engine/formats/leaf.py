"""How one of the arrays that hold a packed weight is made of a stored tensor, or some of it of some of that."""

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


class Header(Protocol):
    """What a file says of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """The type of its elements, as safetensors names it."""


def as_stored(values: np.ndarray) -> np.ndarray:
    return values


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array whose blocks each come from a block of one stored tensor.

    Both are counted from the last axes on. Axes that a stored tensor has more, at its end, are read whole; so are axes
    before those of the blocks, in both alike.
    """

    tensor: str  # what stands behind the module's name
    stored_shape: tuple[int, ...]
    kinds: tuple[str, ...]
    block: tuple[int, ...] = (1, 1)  # none: the tensor is read whole
    stored_block: tuple[int, ...] = (1, 1)
    convert: Callable[[np.ndarray], np.ndarray] = as_stored
    is_transposed: bool = False  # the stored tensor has the input first

    def transposed(self) -> Self:
        """Of a tensor that is stored the other way round."""
        return replace(self, stored_shape=self.stored_shape[::-1], is_transposed=not self.is_transposed)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor has the right shape. What is read whole may have it with or without axes of 1."""
        return shape == self.stored_shape or (not self.block and math.prod(shape) == math.prod(self.stored_shape))

    def read(self, tensor: Callable[[Index], np.ndarray], shape: tuple[int, ...], index: Index) -> np.ndarray:
        """What `index` selects of the array of `shape`; `tensor` gives some of the stored one.

        Raises:
            CheckpointError: what is stored is no value for that.
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
    """Along one axis, which whole blocks are read, and where in them is what was asked for."""

    stored: slice
    cut: slice

    @classmethod
    def of(cls, index: slice, size: int, block: int, stored_block: int) -> Self:
        start, stop, _ = index.indices(size)
        first, end = start // block, -(-stop // block)
        cut = slice(start - first * block, stop - first * block)
        return cls(slice(first * stored_block, end * stored_block), cut)


class Format(Protocol):
    """A format of quantized checkpoints, as its `quantization_config` describes it."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """What may stand behind the name of a quantized module to say how activations are: they are not, here."""

    def packing(self, module: str, stored: Mapping[str, Header]) -> Packing | None:
        """How the weight of `module` is held; None: as it is, unquantized.

        Raises:
            CheckpointError: it is stored in a way that the format does not have.
        """

    def leaves(
        self, module: str, stored: Mapping[str, Header], packing: Packing, num_out: int, num_in: int
    ) -> Mapping[str, Leaf]:
        """By the names of `leaf_shapes`, where each is stored."""

    def checks(self, packing: Packing, num_out: int, num_in: int) -> tuple[Leaf, ...]:
        """Tensors that hold nothing new, which reading them proves; some may be missing."""


class Declared(Format, Protocol):
    """A format that a config.json describes, or a setting."""

    def expected(self, module: str, num_in: int, dtype: str) -> Packing | None:
        """As `packing`, without a file: how the weight of `module`, with so many input features and of a model of
        `dtype`, is most likely held. Types of scales are those that the format's programs write.
        """


def float_scales(tensor: str, shape: tuple[int, ...], scale: str, *, is_transposed: bool = False) -> Leaf:
    """Scales that are stored as they are held, in the type `scale`; of no shape, one for the whole weight."""
    block = (1, 1) if shape else ()
    kinds = tuple(kind for kind, name in FLOAT_KINDS.items() if name == scale)
    return Leaf(tensor, shape, kinds, block, block, finite, is_transposed)


def block_scales(tensor: str, rows: int, packing: Packing, num_out: int, num_in: int) -> Leaf:
    """Scales each of which is stored for `rows` output features, and held for as many or, repeated, for each."""
    groups = packing.num_groups(num_in)
    if rows == packing.rows:
        return float_scales(tensor, (packing.num_row_groups(num_out), groups) if rows else (), packing.scale)
    kinds = float_scales(tensor, (), packing.scale).kinds
    return Leaf(tensor, (-(-num_out // rows), groups), kinds, (rows, 1), (1, 1), partial(_repeated, rows=rows))


def _repeated(scales: np.ndarray, *, rows: int) -> np.ndarray:
    return np.repeat(finite(scales), rows, axis=0)


def finite(values: np.ndarray) -> np.ndarray:
    """Scales as they are.

    Raises:
        CheckpointError: one of them is infinite or not a number.
    """
    wrong = ~np.isfinite(values.astype(np.float32))
    if wrong.any():
        raise CheckpointError(f"has {int(wrong.sum())} of {wrong.size} scales that are not finite")
    return values


def fp8_bytes(codes: np.ndarray) -> np.ndarray:
    """float8_e4m3fn as u8.

    Raises:
        CheckpointError: one of them is not a number.
    """
    held = codes.view(np.uint8)
    wrong = (held & 0x7F) == 0x7F
    if wrong.any():
        raise CheckpointError(f"has {int(wrong.sum())} of {wrong.size} weights that are not numbers")
    return held


def required(name: str, stored: Mapping[str, Header]) -> Header:
    """Raises CheckpointError if it is missing."""
    if name not in stored:
        raise CheckpointError(f"the checkpoint lacks {name}, which goes with other tensors of that weight")
    return stored[name]


def scale_type(name: str, header: Header) -> str:
    """The type in which scales of these are held.

    Raises:
        CheckpointError: it is no float.
    """
    if header.kind not in FLOAT_KINDS:
        raise CheckpointError(f"tensor {name} is of type {header.kind}, expected one of {', '.join(FLOAT_KINDS)}")
    return FLOAT_KINDS[header.kind]


def order(tensor: str, num_in: int, num_groups: int) -> Leaf:
    """The group of each input feature."""
    return Leaf(tensor, (num_in,), ("I32",), (1,), (1,), partial(_groups, num_groups=num_groups))


def _groups(numbers: np.ndarray, *, num_groups: int) -> np.ndarray:
    wrong = numbers[(numbers < 0) | (numbers >= num_groups)]
    if wrong.size:
        raise CheckpointError(f"names group {int(wrong[0])} of {num_groups}")
    return numbers
