"""Codes of less than a byte, packed and unpacked on the host."""

from __future__ import annotations

import numpy as np


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs u8 `[..., n]`, each below `2**bits`, to u8 `[..., n * bits / 8]`, with the first code in the low bits."""
    per_byte = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per_byte)
    packed = parts[..., 0].copy()
    for place in range(1, per_byte):
        packed |= parts[..., place] << np.uint8(place * bits)
    return packed


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Undoes `pack`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def as_bytes(words: np.ndarray) -> np.ndarray:
    """Views i32 `[..., n]` as u8 `[..., 4 n]`, low bytes first: eight 4-bit codes stay in order."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)


def unpack_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks i32 `[rows, n]`, where each word has a column of codes, low bits first, to u8 `[rows * 32 / bits, n]`."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    codes = (unsigned[:, None, :] >> shifts[:, None]).astype(np.uint8) & np.uint8(2**bits - 1)
    return codes.reshape(-1, words.shape[1])
