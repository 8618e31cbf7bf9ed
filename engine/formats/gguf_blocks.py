"""The blocks that GGUF tensors are made of (ggml-common.h in github.com/ggml-org/llama.cpp).

A row `[in]` of a weight is a row of blocks, each with its scales beside its codes; all integers and floats are
little-endian. A leaf extracts one array of a packed weight from the bytes `[out, blocks * bytes]` of such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from penstock.engine.formats.bits import pack
from penstock.engine.formats.mxfp4 import exponents
from penstock.engine.formats.packing import Packing, leaf_shapes
from penstock.engine.formats.tensor_mapping import Leaf, finite

_Blocks = np.ndarray  # u8 [out, blocks, bytes]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantization type of ggml."""

    features: int  # of a block
    num_bytes: int
    packing: Packing
    parts: Mapping[str, Callable[[_Blocks], np.ndarray]]  # keyed by the names of `leaf_shapes`

    def leaves(self, name: str, num_out: int, num_in: int) -> Mapping[str, Leaf]:
        """Returns the leaves of a weight whose rows are one tensor of bytes."""
        num_blocks = num_in // self.features
        shapes = leaf_shapes(self.packing, num_out, num_in)
        return {
            leaf: Leaf(
                ".weight",
                (num_out, num_blocks * self.num_bytes),
                (name,),
                (1, shape[-1] // num_blocks),
                (1, self.num_bytes),
                self._reader(leaf),
            )
            for leaf, (shape, _) in shapes.items()
        }

    def _reader(self, leaf: str) -> Callable[[np.ndarray], np.ndarray]:
        part = self.parts[leaf]

        def read(rows: np.ndarray) -> np.ndarray:
            blocks = np.ascontiguousarray(rows).reshape(rows.shape[0], -1, self.num_bytes)
            return part(blocks).reshape(rows.shape[0], -1)

        return read


def _bytes(first: int, stop: int) -> Callable[[_Blocks], np.ndarray]:
    return lambda blocks: blocks[..., first:stop]


def _signed(first: int, stop: int) -> Callable[[_Blocks], np.ndarray]:
    return lambda blocks: np.ascontiguousarray(blocks[..., first:stop]).view(np.int8)


def _half(first: int) -> Callable[[_Blocks], np.ndarray]:
    return lambda blocks: finite(np.ascontiguousarray(blocks[..., first : first + 2]).view("<f2"))


def _negated_half(first: int) -> Callable[[_Blocks], np.ndarray]:
    """Reads a value that the format adds, and negates it, because minimums are subtracted."""
    return lambda blocks: -_half(first)(blocks)


def _nibbles(first: int, num_bytes: int, run: int) -> Callable[[_Blocks], np.ndarray]:
    """Reads nibbles stored in runs: the low bits of `run` bytes come first, then their high bits. They are packed as
    neighbours.
    """

    def packed(blocks: _Blocks) -> np.ndarray:
        return pack(_low_and_high(blocks[..., first : first + num_bytes], run), 4)

    return packed


def _low_and_high(codes: np.ndarray, run: int) -> np.ndarray:
    runs = codes.reshape(*codes.shape[:-1], -1, 1, run)
    both = np.concatenate([runs & np.uint8(15), runs >> np.uint8(4)], axis=-2)
    return both.reshape(*codes.shape[:-1], -1)


def _fifth_bits(first: int) -> Callable[[_Blocks], np.ndarray]:
    """Reads the fifth bits of Q5_0 and Q5_1: a bit for each of 32 codes, in order."""
    return _bytes(first, first + 4)


def _fifth_bits_k(blocks: _Blocks) -> np.ndarray:
    """Reads the fifth bits of Q5_K: byte i has one bit for feature i of each of eight groups of 32."""
    held = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    return pack((held & np.uint8(1)).reshape(*blocks.shape[:2], -1), 1)


def _low_bits_6(blocks: _Blocks) -> np.ndarray:
    return pack(_low_and_high(blocks[..., :128], 64), 4)


def _high_bits_6(blocks: _Blocks) -> np.ndarray:
    """Reads the high bits of Q6_K: in each half, byte i has two bits for feature i of each of four groups of 32."""
    held = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return pack((held & np.uint8(3)).reshape(*blocks.shape[:2], -1), 2)


def _scales_k(blocks: _Blocks) -> np.ndarray:
    """Reads the scales of Q4_K and Q5_K: eight of 6 bits; the high bits of the last four are stored with the first
    four.
    """
    low, mixed = blocks[..., 4:8], blocks[..., 12:16]
    return np.concatenate([low & np.uint8(63), (mixed & np.uint8(15)) | (low >> np.uint8(2) & np.uint8(48))], axis=-1)


def _minimums_k(blocks: _Blocks) -> np.ndarray:
    low, mixed = blocks[..., 8:12], blocks[..., 12:16]
    return np.concatenate([low & np.uint8(63), (mixed >> np.uint8(4)) | (low >> np.uint8(2) & np.uint8(48))], axis=-1)


def _exponents(blocks: _Blocks) -> np.ndarray:
    return exponents(blocks[..., :1])


_SCALES_K = {
    "scales": _scales_k,
    "minimums": _minimums_k,
    "super_scales": _half(0),
    "super_minimums": _half(2),
}

BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q8_0": BlockType(32, 34, Packing("int8", 32, scale="float16"), {"codes": _signed(2, 34), "scales": _half(0)}),
        "Q4_0": BlockType(
            32, 18, Packing("int4", 32, scale="float16"), {"codes": _nibbles(2, 16, 16), "scales": _half(0)}
        ),
        "Q4_1": BlockType(
            32,
            20,
            Packing("int4", 32, scale="float16", offset="minimums"),
            {"codes": _nibbles(4, 16, 16), "scales": _half(0), "minimums": _negated_half(2)},
        ),
        "Q5_0": BlockType(
            32,
            22,
            Packing("int5", 32, scale="float16"),
            {"codes": _nibbles(6, 16, 16), "high_bits": _fifth_bits(2), "scales": _half(0)},
        ),
        "Q5_1": BlockType(
            32,
            24,
            Packing("int5", 32, scale="float16", offset="minimums"),
            {
                "codes": _nibbles(8, 16, 16),
                "high_bits": _fifth_bits(4),
                "scales": _half(0),
                "minimums": _negated_half(2),
            },
        ),
        "MXFP4": BlockType(
            32, 17, Packing("fp4", 32, scale="e8m0"), {"codes": _nibbles(1, 16, 16), "scales": _exponents}
        ),
        "Q4_K": BlockType(
            256,
            144,
            Packing("int4", 32, scale="uint8", offset="minimums", super_group=256),
            {"codes": _nibbles(16, 128, 32), **_SCALES_K},
        ),
        "Q5_K": BlockType(
            256,
            176,
            Packing("int5", 32, scale="uint8", offset="minimums", super_group=256),
            {"codes": _nibbles(48, 128, 32), "high_bits": _fifth_bits_k, **_SCALES_K},
        ),
        "Q6_K": BlockType(
            256,
            210,
            Packing("int6", 16, scale="int8", super_group=256),
            {
                "codes": _low_bits_6,
                "high_bits": _high_bits_6,
                "scales": _signed(192, 208),
                "super_scales": _half(208),
            },
        ),
    }
)
