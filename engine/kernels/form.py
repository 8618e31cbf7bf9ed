"""How the kernels hold a quantized weight: the arrays of its Packing, with scales and offsets along the lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from penstock.engine.formats.packing import BY_GROUP, FLOATS, PLANES, Packing

LANES, SUBLANES = 128, 8  # of a tile of memory
ROWS = 128  # of a weight, that are unpacked at once: the lanes of a result
LANES_AT_ONCE = 1024  # of codes, likewise: whole groups of each size that is served
SCALES = (*FLOATS, "e8m0")


@dataclass(frozen=True, slots=True)
class KernelForm:
    """Codes stay as they are, `[..., out, in * bits / 8]`. Scales, and zeros or minimums, become `[..., groups, out]`;
    those of blocks of rows `[..., groups, blocks]`; one for all rows, or for the whole input, is repeated for those
    that have a share of them. A float16, for which the compiler has no load, is held as the int16 of its bits.

    What each device has of them is padded to whole tiles: lanes of codes, and groups and lanes of scales. An array of
    others the compiler may lay out in another order, with less padding, and turn around in each step for a kernel.
    """

    packing: Packing

    @staticmethod
    def serves(packing: Packing) -> bool:
        """Whether there is a kernel. XLA keeps int8 with one scale for a row: it reads that as it is."""
        group_lanes = packing.group // (8 // PLANES[packing.code][0])
        return (
            packing.code in ("int8", "int4", "fp8", "fp4")
            and packing.scale in SCALES
            and (packing.rows <= 1 or (packing.rows % ROWS == 0 and packing.group > 0))
            and not packing.has_order
            and not packing.has_int8_activations
            and (packing.group == 0 or LANES_AT_ONCE % group_lanes == 0)
            and (packing.code, packing.group, packing.offset) != ("int8", 0, "none")
        )

    @property
    def num_planes(self) -> int:
        """Codes in a byte."""
        return 8 // PLANES[self.packing.code][0]

    @property
    def offset(self) -> str | None:
        """The name of what is subtracted, of which there is as much as of scales."""
        return None if self.packing.offset == "none" else self.packing.offset

    @property
    def leaves(self) -> tuple[str, ...]:
        """By the names of `leaf_shapes`, in the order in which the kernels take them."""
        return ("codes", "scales") if self.offset is None else ("codes", "scales", self.offset)

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is held of each."""
        return tuple(BY_GROUP.get(leaf, leaf) for leaf in self.leaves)

    def changes(self, name: str, leaf: jax.Array, shares: int = 1) -> bool:
        """Whether `held` is another array than what it is given."""
        return name in BY_GROUP or leaf.shape[-1] % (shares * LANES) > 0

    def held(self, name: str, leaf: jax.Array, num_out: int, shares: tuple[int, int] = (1, 1)) -> jax.Array:
        """Of what `leaf_shapes` calls so, with any leading axes; of output and input devices have so many `shares`."""
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
        """Of what one device holds, by `names`, of `leaves` that are its own share."""
        num_out = leaves["codes"].shape[-2]
        pairs = zip(self.leaves, self.names, strict=True)
        return {name: jax.eval_shape(partial(self.held, leaf, num_out=num_out), leaves[leaf]) for leaf, name in pairs}

    def planes(self, x: jax.Array, num_lanes: int) -> jax.Array:
        """`[num_rows, in]` as `[codes in a byte, num_rows, num_lanes]`: that for the first codes, then others."""
        num_rows, num_in = x.shape
        planes = x.reshape(num_rows, num_in // self.num_planes, self.num_planes).transpose(2, 0, 1)
        return jnp.pad(planes, ((0, 0), (0, 0), (0, num_lanes - planes.shape[2])))

    def num_bytes(self, held: Mapping[str, jax.Array]) -> int:
        """Of one layer of a stack."""
        return sum(held[name].size // held[name].shape[0] * held[name].dtype.itemsize for name in self.names)


def _padded(array: jax.Array, axis: int, shares: int, size: int) -> jax.Array:
    """With zeros, so that each of so many shares of an axis is a multiple of `size`. Axes are counted from behind."""
    place = array.ndim + axis
    before, num, behind = array.shape[:place], array.shape[place], array.shape[place + 1 :]
    padding = [(0, 0)] * (array.ndim + 1)
    padding[place + 1] = (0, -(num // shares) % size)
    return jnp.pad(array.reshape(*before, shares, num // shares, *behind), padding).reshape(*before, -1, *behind)
