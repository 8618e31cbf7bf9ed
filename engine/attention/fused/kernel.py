"""The kernel: a loop over blocks of keys of the sequences that decode, and one over blocks of queries that prefill.

Both compute online softmax over blocks of pages, and the next blocks are fetched from HBM while some are computed. A
block that gets new tokens is updated in VMEM, where its keys are about to be read, and the changed part is written
back. So new keys and values are never read from HBM in the step that brings them. If there are none, because the pages
already hold the step's, blocks are read to their end and nothing is changed.

Two transfers must not overlap. Sequences that decode write to pages of their own, so only the reuse of the buffer waits
for their writes. Blocks of prefill may belong to one sequence: each waits for its writes before the next block of pages
is fetched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.fused.decode import NUM_SETS, Decode, Items
from penstock.engine.attention.fused.decode_softmax import DecodeSoftmax
from penstock.engine.attention.fused.elements import PageElements
from penstock.engine.attention.fused.layout import LANES, SUBLANES, BlockSizes, HeadLayout, KeyBlockSizes
from penstock.engine.attention.fused.pages import Buffers, HeldPages, PageBuffers, Tables
from penstock.engine.attention.fused.prefill import Prefill
from penstock.engine.attention.fused.prefill_softmax import Part, PrefillSoftmax
from penstock.engine.attention.fused.scales import scale_lanes
from penstock.engine.attention.fused.softmax import HeadSinks, ScoreFunction
from penstock.engine.attention.fused.token_rows import TokenRows
from penstock.engine.attention.fused.tokens import Operands, TokenBlock
from penstock.engine.attention.quantization import is_quantized

NUM_TABLES = 7


class Scratch(NamedTuple):
    """The kernel's scratch memory; tuples have the order of the fields that they become."""

    tokens: tuple[Any, Any, Any, Any, Any]
    rows: tuple[Any, ...]
    items: Items
    decode: Buffers
    decode_sums: tuple[Any, ...]
    prefill: Buffers
    prefill_parts: tuple[tuple[Any, ...], tuple[Any, ...]]
    prefill_sums: tuple[Any, Any, Any]


def attend_kernel(
    *refs: Any,
    blocks: BlockSizes,
    layout: HeadLayout,
    scores: ScoreFunction,
    group: int,
    pages_per_seq: int,
    window: int | None,
    num_parts: int,
    elements: PageElements,
) -> None:
    """Runs both loops. `refs` are tables, inputs, outputs and scratch, in the order of `FusedAttention`."""
    *arrays, scratch = refs
    has_scales = is_quantized(elements.dtype)
    tables, num_out = Tables(*arrays[:NUM_TABLES]), 2 + has_scales
    q, *others = arrays[NUM_TABLES:-num_out]
    out, codes, *scales = arrays[-num_out:]
    parts, rest = others[:num_parts], others[num_parts:]
    reads_only = not parts
    new_scales, *rest = (None, *rest) if reads_only or not has_scales else rest
    sinks = [HeadSinks(rows, blocks.decode_tiles) for rows in rest[1 + has_scales :]]  # after the input pages
    pages = HeldPages(codes, scales[0] if scales else None, pages_per_seq)
    q_block, new_block, out_block, scale_block, moved = scratch.tokens
    operands = Operands(q, tuple(parts), out, new_scales)
    tokens = TokenBlock(operands, q_block, new_block, out_block, scale_block, moved, group)
    rows = TokenRows(tokens, blocks.decode_tiles, elements, *scratch.rows)

    def buffers(sizes: KeyBlockSizes, held: Buffers) -> PageBuffers:
        return PageBuffers(sizes, blocks.tile_rows, tables, pages, held, elements, window is not None)

    function = (layout, scores, sinks[0] if sinks else None)
    kv = buffers(blocks.decode, scratch.decode)
    decode = DecodeSoftmax(*function, blocks.decode_tiles, blocks.tiles_at_once, kv, rows, *scratch.decode_sums)
    Decode(tables, kv, decode, rows, scratch.items, blocks.decode_at_once, window or 0, reads_only).run()
    kv = buffers(blocks.prefill, scratch.prefill)
    even, odd = (Part(*part) for part in scratch.prefill_parts)
    sizes = blocks.num_queries, blocks.prefill_heads
    prefill = PrefillSoftmax(*function, *sizes, kv, q_block, (even, odd), *scratch.prefill_sums)
    Prefill(tables, kv, prefill, tokens, blocks.pieces_at_once, window, reads_only).run()


def scratch(blocks: BlockSizes, layout: HeadLayout, q_dtype: str, elements: PageElements) -> Scratch:
    """Returns the shapes of the kernel's scratch memory."""
    tiles = blocks.decode_tiles
    num_heads, rows = tiles.num_heads, blocks.num_queries * tiles.group
    has_scales, dma = is_quantized(elements.dtype), pltpu.SemaphoreType.DMA

    def vmem(*shape: int, dtype: str = "float32") -> Any:
        return pltpu.VMEM(shape, jnp.dtype(dtype))

    def buffers(num: int, sizes: KeyBlockSizes) -> Buffers:
        codes = vmem(num, sizes.pieces, num_heads, sizes.rows, layout.width, dtype=elements.dtype)
        scales = vmem(num, sizes.pieces, num_heads, 2, sizes.rows) if has_scales else None
        return Buffers(codes, scales, dma((num,)), dma((num,)))

    num_slots, num_tokens = NUM_SETS * blocks.decode_at_once, blocks.num_queries + SUBLANES  # a few are nobody's
    row, keys_at_once = vmem(num_heads, 1, rows), blocks.pieces_at_once * blocks.prefill.rows
    part = (
        vmem(num_heads, keys_at_once, rows),
        row,
        row,
        vmem(num_heads, layout.query_width, keys_at_once, dtype=q_dtype),
        vmem(num_heads, 1, keys_at_once) if has_scales else None,
    )
    token_rows = vmem(tiles.num, layout.query_width // LANES, num_tokens * tiles.rows, LANES)
    return Scratch(
        tokens=(
            vmem(num_heads, rows, layout.query_width, dtype=q_dtype),
            vmem(num_heads, blocks.num_queries, layout.width, dtype=elements.new_dtype),
            vmem(num_heads, rows, layout.query_width, dtype=q_dtype),
            vmem(blocks.num_queries, scale_lanes(num_heads)) if has_scales else None,
            dma((2,)),
        ),
        rows=(
            token_rows,
            token_rows,
            vmem(num_heads, num_tokens, layout.width, dtype="int32"),
            vmem(num_heads, 2 * num_tokens, LANES) if has_scales else None,
        ),
        items=Items(*[pltpu.SMEM((num_slots,), jnp.int32)] * len(Items._fields)),
        decode=buffers(num_slots, blocks.decode),
        decode_sums=tuple(vmem(tiles.num, tiles.rows, lanes) for lanes in (LANES, LANES, layout.query_width)),
        prefill=buffers(2, blocks.prefill),
        prefill_parts=(part, part),
        prefill_sums=(row, row, vmem(num_heads, layout.query_width, rows)),
    )
