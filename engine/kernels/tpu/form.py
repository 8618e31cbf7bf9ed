"""The form of a quantized weight in the kernels: the arrays of its Packing, with scales and offsets along the lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from penstock.engine.formats.packing import BY_GROUP, FLOATS, PLANES, Packing

LANES, SUBLANES = 128, 8  # in a tile of memory
ROWS = 128  # rows of a weight that are unpacked at once: the lanes of a result
LANES_AT_ONCE = 1024  # lanes of codes that are unpacked at once: whole groups of each supported size
SCALES = (*FLOATS, "e8m0")


@dataclass(frozen=True, slots=True)
class KernelForm:
    """The kernels' form of a Packing.

    Codes stay as they are, `[..., out, in * bits / 8]`. Scales, and zeros or minimums, become `[..., groups, out]`;
    those of blocks of rows become `[..., groups, blocks]`. One for all rows, or for the whole input, is repeated for
    everything that shares it. A float16, which the compiler cannot load, is held as the int16 of its bits.

    Each device's share is padded to whole tiles: lanes of codes, and groups and lanes of scales. Without padding, the
    compiler may choose another layout with less of it, and would then transpose the array for a kernel in each step.
    """

    packing: Packing

    @staticmethod
    def serves(packing: Packing, *, of_experts: bool = False) -> bool:
        """Checks whether there is a kernel.

        XLA keeps int8 with one scale per row, which it reads as it is. It would unpack those of all experts, with rows
        or without.
        """
        group_lanes = packing.group // (8 // PLANES[packing.code][0])
        return (
            packing.code in ("int8", "int4", "fp8", "fp4")
            and packing.scale in SCALES
            and (packing.rows <= 1 or (packing.rows % ROWS == 0 and packing.group > 0))
            and not packing.has_order
            and (packing.group == 0 or LANES_AT_ONCE % group_lanes == 0)
            and (of_experts or (packing.code, packing.group, packing.offset) != ("int8", 0, "none"))
        )

    @property
    def num_planes(self) -> int:
        """Number of codes in a byte."""
        return 8 // PLANES[self.packing.code][0]

    @property
    def offset(self) -> str | None:
        """The name of the offsets that are subtracted, which have the shape of scales; None if there are none."""
        return None if self.packing.offset == "none" else self.packing.offset

    @property
    def leaves(self) -> tuple[str, ...]:
        """The arrays of the Packing, by the names of `leaf_shapes`, in the order in which the kernels take them."""
        return ("codes", "scales") if self.offset is None else ("codes", "scales", self.offset)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the held form of each of `leaves`."""
        return tuple(BY_GROUP.get(leaf, leaf) for leaf in self.leaves)

    def changes(self, name: str, leaf: jax.Array, shares: int = 1) -> bool:
        """Checks whether `held` would return another array than `leaf`."""
        return name in BY_GROUP or leaf.shape[-1] % (shares * LANES) > 0

    def held(self, name: str, leaf: jax.Array, num_out: int, shares: tuple[int, int] = (1, 1)) -> jax.Array:
        """Returns the held form of the array `name` of `leaf_shapes`, with any leading axes. `shares` are the numbers
        of devices along output and input.
        """
        of_out, of_in = shares
        if name not in BY_GROUP:
            return _padded(leaf, -1, of_in, LANES)
        across = leaf.swapaxes(-1, -2)
        if self.packing.rows == 0:
            across = jnp.broadcast_to(across, (*across.shape[:-1], num_out))
        if self.packing.group == 0:
            across = jnp.broadcast_to(across, (*across.shape[:-2], of_in, across.shape[-1]))
        across = _padded(_padded(across, -2, of_in, SUBLANES), -1, of_out, LANES)
        if across.dtype != jnp.float16:
            return across
        bits: jax.Array = jax.lax.bitcast_convert_type(across, jnp.int16)
        return bits

    def shapes(self, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes that one device holds, by `names`, from its own share of `leaves`."""
        num_out = leaves["codes"].shape[-2]
        pairs = zip(self.leaves, self.names, strict=True)
        return {name: jax.eval_shape(partial(self.held, leaf, num_out=num_out), leaves[leaf]) for leaf, name in pairs}

    def planes(self, x: jax.Array, num_lanes: int) -> jax.Array:
        """Rearranges `[num_rows, in]` to `[codes in a byte, num_rows, num_lanes]`: a plane of features for each code of
        a byte.
        """
        num_rows, num_in = x.shape
        planes = x.reshape(num_rows, num_in // self.num_planes, self.num_planes).transpose(2, 0, 1)
        return jnp.pad(planes, ((0, 0), (0, 0), (0, num_lanes - planes.shape[2])))

    def num_bytes(self, held: Mapping[str, jax.Array]) -> int:
        """Returns the bytes of one layer of a stack."""
        return sum(held[name].size // held[name].shape[0] * held[name].dtype.itemsize for name in self.names)


def _padded(array: jax.Array, axis: int, shares: int, size: int) -> jax.Array:
    """Pads with zeros, so that each of `shares` parts of an axis is a multiple of `size`. `axis` is counted from the
    end.
    """
    place = array.ndim + axis
    before, num, behind = array.shape[:place], array.shape[place], array.shape[place + 1 :]
    padding = [(0, 0)] * (array.ndim + 1)
    padding[place + 1] = (0, -(num // shares) % size)
    return jnp.pad(array.reshape(*before, shares, num // shares, *behind), padding).reshape(*before, -1, *behind)
