"""The sizes that the kernel is built for, chosen from the shapes of its arguments."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

LANES = 128
_SLOT_BYTES = 2 * 2**20  # for one of the two buffers of keys and values
_MAX_KEYS_AT_ONCE = 256
_MAX_ROWS = 512  # query rows per KV head in a block


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The layout of K and V of one token and head, side by side on the lanes of a page.

    A head_dim of up to 64 shares 128 lanes. The query is zero on V's lanes, so the dot product over all lanes is the
    score, and the result is taken from V's lanes. A larger head_dim has lanes of its own, padded to a multiple of 128.
    """

    head_dim: int

    @property
    def is_packed(self) -> bool:
        return 2 * self.head_dim <= LANES

    @property
    def half(self) -> int:
        """The first lane of V."""
        return LANES // 2 if self.is_packed else -(-self.head_dim // LANES) * LANES

    @property
    def width(self) -> int:
        """Number of lanes of K and V together."""
        return 2 * self.half

    @property
    def query_width(self) -> int:
        """Number of lanes of a query, and of a result."""
        return self.width if self.is_packed else self.half

    @property
    def result_start(self) -> int:
        return self.half if self.is_packed else 0


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of what the kernel holds in VMEM at a time."""

    num_queries: int  # tokens in a block; a step is a whole number of blocks
    decode_rows: int  # query heads of a KV head, padded to whole tiles
    pages: int  # per block of keys
    keys: int
    keys_at_once: int  # keys of a block that prefill attends to at once; compile time grows with it
    heads_at_once: int  # KV heads that decode at once
    tile_rows: int  # rows of the smallest part of a page that is moved


def blocks_for(
    *,
    num_tokens: int,
    group: int,
    num_kv_heads: int,
    page_size: int,
    pages_per_seq: int,
    kv_dtype: str,
    width: int,
    max_keys: int,
    max_queries: int,
) -> BlockSizes:
    pages = pages_per_block(
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        pages_per_seq=pages_per_seq,
        kv_dtype=kv_dtype,
        width=width,
        max_keys=max_keys,
    )
    most = max(page_size, _MAX_KEYS_AT_ONCE)
    num_queries = max_queries
    while num_queries > 16 and (num_queries * group > _MAX_ROWS or num_tokens % num_queries):
        num_queries //= 2
    return BlockSizes(
        num_queries=num_queries,
        decode_rows=-(-group // 16) * 16,
        pages=pages,
        keys=pages * page_size,
        keys_at_once=page_size * max(n for n in range(1, pages + 1) if pages % n == 0 and n * page_size <= most),
        heads_at_once=max(n for n in range(1, 9) if num_kv_heads % n == 0),
        tile_rows=tile_rows(kv_dtype),
    )


def pages_per_block(
    *, num_kv_heads: int, page_size: int, pages_per_seq: int, kv_dtype: str, width: int, max_keys: int
) -> int:
    """Returns the number of pages in a block of keys: as many as one of the two buffers holds."""
    keys = min(max_keys, _SLOT_BYTES // (num_kv_heads * width * jnp.dtype(kv_dtype).itemsize))
    return max(1, min(keys // page_size, pages_per_seq))


def tile_rows(dtype: str) -> int:
    """Returns the number of rows in a TPU tile: 8 for 32-bit types."""
    return 8 * 4 // jnp.dtype(dtype).itemsize
