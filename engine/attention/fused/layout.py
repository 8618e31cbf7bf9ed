"""The sizes that the kernel is built for, chosen from the shapes of its arguments."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

LANES = 128
SUBLANES = 8
_SLOT_BYTES = 2 * 2**20  # for a buffer of keys and values of prefill; decode's are at most twice as large
_MAX_KEYS_AT_ONCE = 256
_MAX_DECODE_KEYS = 1024  # in all blocks that decode attends to at once
_MAX_ROWS = 512  # query rows per KV head in a block
_MAX_ROWS_AT_ONCE = 2048  # of all KV heads that prefill computes at once; each counts as at least half of _MAX_ROWS
_MAX_HEADS_AT_ONCE = 16  # KV heads that decode attends to in one go, counted again for each block of keys


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
    def value_start(self) -> int:
        """The first lane of what weights are multiplied with. If K and V are packed, that includes K."""
        return 0 if self.is_packed else self.half

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
class KeyBlockSizes:
    """Sizes of a block of keys, which a buffer in VMEM holds."""

    pieces: int
    rows: int  # tokens of a piece: of a page, or of an equal part of one
    pieces_per_page: int

    @property
    def keys(self) -> int:
        return self.pieces * self.rows


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """How decode stacks query heads on sublanes: as many KV heads together as fit a tile of 8 rows."""

    heads: int  # KV heads in a tile
    group: int  # query heads of a KV head
    num: int  # tiles

    @property
    def rows(self) -> int:
        return -(-self.heads * self.group // SUBLANES) * SUBLANES

    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
        return self.num * self.heads


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of what the kernel holds in VMEM at a time."""

    num_queries: int  # tokens in a block; a step is a whole number of blocks
    tile_rows: int  # rows of the smallest part of a page that is moved
    decode: KeyBlockSizes
    decode_at_once: int  # blocks of keys, of any sequences, that decode attends to at once
    decode_tiles: HeadTiles
    tiles_at_once: int
    prefill: KeyBlockSizes
    pieces_at_once: int  # pieces in a part: what prefill attends to at once; compile time grows with it
    prefill_heads: int  # KV heads that prefill attends to at once


def blocks_for(
    *,
    num_tokens: int,
    group: int,
    num_kv_heads: int,
    page_size: int,
    pages_per_seq: int,
    kv_dtype: str,
    is_scaled: bool,
    width: int,
    max_keys: int,
    max_blocks: int,
    max_queries: int,
) -> BlockSizes:
    """Chooses the sizes. Blocks of decode have the same number of keys for any `num_kv_heads`, if VMEM allows it.
    So sums are taken in the same order on any number of devices.
    """
    tile, key_bytes = tile_rows(kv_dtype), num_kv_heads * width * jnp.dtype(kv_dtype).itemsize
    granule = LANES if is_scaled else tile

    def keys_in(most: int, slot_bytes: int) -> KeyBlockSizes:
        most = min(most, max_keys, slot_bytes // key_bytes)
        parts = page_size // granule
        rows = granule * max(n for n in range(1, parts + 1) if parts % n == 0 and (n * granule <= most or n == 1))
        return KeyBlockSizes(max(1, min(most, pages_per_seq * page_size) // rows), rows, page_size // rows)

    prefill = keys_in(max_keys, _SLOT_BYTES)
    at_once = max(_MAX_KEYS_AT_ONCE, prefill.rows)
    num_queries = max_queries
    while num_queries > 16 and (num_queries * group > _MAX_ROWS or num_tokens % num_queries):
        num_queries //= 2
    heads = max(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and (n == 1 or n * group <= SUBLANES))
    tiles = HeadTiles(heads, group, num_kv_heads // heads)
    # A block of 256 keys of 8 bits has too few bytes for what a block costs besides.
    decode = keys_in(_MAX_KEYS_AT_ONCE * (2 if is_scaled else 1), 2 * _SLOT_BYTES)
    blocks = max(1, min(max_blocks, _MAX_HEADS_AT_ONCE // num_kv_heads, _MAX_DECODE_KEYS // decode.keys))
    most_rows = _MAX_ROWS_AT_ONCE // (2 if is_scaled else 1)  # with 8-bit codes more rows spill, and gain little
    return BlockSizes(
        num_queries=num_queries,
        tile_rows=tile,
        decode=decode,
        decode_at_once=blocks,
        decode_tiles=tiles,
        tiles_at_once=max(
            n
            for n in range(1, tiles.num + 1)
            if tiles.num % n == 0 and n * heads * blocks <= max(heads * blocks, _MAX_HEADS_AT_ONCE)
        ),
        prefill=prefill,
        pieces_at_once=max(
            n for n in range(1, prefill.pieces + 1) if prefill.pieces % n == 0 and n * prefill.rows <= at_once
        ),
        prefill_heads=max(
            n
            for n in range(1, num_kv_heads + 1)
            if num_kv_heads % n == 0 and (n == 1 or n * max(group * num_queries, _MAX_ROWS // 2) <= most_rows)
        ),
    )


def tile_rows(dtype: str) -> int:
    """Returns the number of rows in a TPU tile: 8 for 32-bit types."""
    return 8 * 4 // jnp.dtype(dtype).itemsize
