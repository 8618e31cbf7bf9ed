"""The form of a quantized weight in the kernels: the arrays of its Packing, with outputs along the lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from penstock.engine.formats.packing import FLOATS, INPUT_FIRST, PLANES, ZERO, Packing

LANES, SUBLANES = 128, 8  # in a tile of memory
CODE_ROWS, BF16_ROWS = 32, 16  # rows of bytes, and of bfloat16, in a tile of memory
# Inputs that share a scale: whole tiles of f32, and whole chunks of `Tile`.
GROUPS = (8, 16, 32, 64, 128, 256, 512, 1024)
SCALES = (*FLOATS, "e8m0")
FP8_OF_CHIPS = {"TPU7x": "float8_e4m3fn"}  # by kind of device
BF16_CHIPS = ("TPU v6 lite", "TPU7x")  # those whose vector units compute with bfloat16, two in a lane
FP8 = "float8_e4m3b11fnuz"  # of all other chips: a code means a sixteenth of what it means on TPU7x; 0x80 is NaN


@dataclass(frozen=True, slots=True)
class KernelForm:
    """The kernels' form of a Packing.

    All arrays are transposed: codes become `[..., in * bits / 8, out]`, and scales, zeros and minimums
    `[..., groups, out]`, so that a group's scales lie like its codes; those of blocks of rows become
    `[..., groups, blocks]`. One for all rows, or for the whole input, is repeated for everything that shares it. A
    float16, which the compiler cannot load, is held as the int16 of its bits.

    Codes of int4 that are scaled in bfloat16 are signed: the constant of ZERO is subtracted from them at loading, and
    from zeros in the kernel. From minimums, that constant times the scale is subtracted, and the result is rounded to
    bfloat16.

    Each device's share is padded to whole tiles. Otherwise the compiler might choose another layout, which needs less
    padding, and would then transpose the array for a kernel in each step.
    """

    packing: Packing
    fp8: str = FP8  # the type that the chip's vector units convert to f32
    has_bf16: bool = False  # whether they compute with bfloat16

    @classmethod
    def of_chip(cls, packing: Packing, device_kind: str) -> KernelForm:
        """Returns the form on a kind of device, as JAX names it."""
        return cls(packing, FP8_OF_CHIPS.get(device_kind, FP8), device_kind in BF16_CHIPS)

    @staticmethod
    def serves(packing: Packing, *, of_experts: bool = False) -> bool:
        """Checks whether a kernel multiplies by weights of this form.

        Weights in int8 with one scale per row are left to XLA, which reads them as they are; but not those of experts,
        of which XLA would unpack all, whether they have rows or not.
        """
        return (
            packing.code in ("int8", "int4", "fp8", "fp4")
            and packing.scale in SCALES
            and (packing.rows <= 1 or (packing.rows % LANES == 0 and packing.group > 0))
            and not packing.has_order
            and packing.group in (0, *GROUPS)
            and (of_experts or (packing.code, packing.group, packing.offset) != ("int8", 0, "none"))
        )

    @property
    def num_planes(self) -> int:
        """Number of codes in a byte."""
        return 8 // PLANES[self.packing.code][0]

    @property
    def is_scaled_in_bf16(self) -> bool:
        """Whether codes and scales are multiplied in bfloat16, which has both exactly, or a scale as the sum of two.

        The weights then have the same bits as if they were computed in f32 and rounded; except perhaps those in int4
        with minimums, or with zeros and float16 scales.
        """
        packing = self.packing
        is_exact = packing.scale in ("bfloat16", "e8m0") and packing.offset != "minimums"
        is_short = packing.code == "int4" and packing.scale in ("bfloat16", "float16")
        return self.has_bf16 and (is_exact or is_short) and packing.group >= BF16_ROWS

    @property
    def is_centred(self) -> bool:
        """Whether codes are held as signed ones."""
        return self.is_scaled_in_bf16 and self.packing.code == "int4"

    @property
    def has_pairs(self) -> bool:
        """Whether a scale is applied as the sum of two bfloat16."""
        return self.is_centred and self.packing.scale == "float16"

    @property
    def unit(self) -> float:
        """What a code of 1 is read as: a power of two."""
        if self.is_centred:
            return 1.0
        smallest_normal = 2.0 ** (-6 if self.fp8 == FP8_OF_CHIPS["TPU7x"] else -10)
        return {"int8": 1.0, "int4": smallest_normal / 8, "fp4": smallest_normal, "fp8": smallest_normal * 2**6}[
            self.packing.code
        ]

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
        return tuple(INPUT_FIRST[leaf] for leaf in self.leaves)

    def held(
        self, name: str, leaves: Mapping[str, jax.Array], num_out: int, shares: tuple[int, int] = (1, 1)
    ) -> jax.Array:
        """Returns the held form of the array `name` of `leaf_shapes`, with any leading axes. `shares` are the numbers
        of devices along output and input.
        """
        of_out, of_in = shares
        across = self._centred(name, leaves).swapaxes(-1, -2)
        if name == "codes":
            return _padded(_padded(self._recoded(across), -2, of_in, CODE_ROWS), -1, of_out, LANES)
        if self.packing.rows == 0:
            across = jnp.broadcast_to(across, (*across.shape[:-1], num_out))
        if self.packing.group == 0:
            across = jnp.broadcast_to(across, (*across.shape[:-2], of_in, across.shape[-1]))
        across = _padded(_padded(across, -2, of_in, SUBLANES), -1, of_out, LANES)
        if across.dtype != jnp.float16:
            return across
        bits: jax.Array = jax.lax.bitcast_convert_type(across, jnp.int16)
        return bits

    def _centred(self, name: str, leaves: Mapping[str, jax.Array]) -> jax.Array:
        leaf = leaves[name]
        if not self.is_centred:
            return leaf
        if name == "codes":
            return leaf ^ (ZERO["int4"] * 0x11)
        if name == "minimums":
            return (leaf.astype(jnp.float32) - ZERO["int4"] * leaves["scales"].astype(jnp.float32)).astype(jnp.bfloat16)
        return leaf

    def _recoded(self, codes: jax.Array) -> jax.Array:
        """Returns codes that mean in `fp8` what they meant: FP8 has neither minus zero nor the standard's NaN."""
        if self.fp8 != FP8 or self.packing.code not in ("fp8", "fp4"):
            return codes
        if self.packing.code == "fp8":
            return jnp.where(codes & 0x7F == 0x7F, jnp.uint8(0x80), jnp.where(codes == 0x80, jnp.uint8(0), codes))
        low = jnp.where(codes & 0x0F == 0x08, codes & 0xF0, codes)
        return jnp.where(low & 0xF0 == 0x80, low & 0x0F, low)

    def shapes(self, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes that one device holds, by `names`, from its own share of `leaves`."""
        num_out = leaves["codes"].shape[-2]
        pairs = zip(self.leaves, self.names, strict=True)
        return {name: jax.eval_shape(partial(self.held, leaf, num_out=num_out), leaves) for leaf, name in pairs}

    def rows_of(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        """Pads the features of `x`, `[num_rows, in]`, to those that there are codes for."""
        return jnp.pad(x, ((0, 0), (0, codes.shape[-2] * self.num_planes - x.shape[1])))

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
