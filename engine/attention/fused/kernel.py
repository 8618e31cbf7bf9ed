"""The kernel: a loop over sequences that decode, and one over blocks of queries that prefill.

Both walk over blocks of pages with online softmax, and the next block is fetched from HBM while one is computed. A
block that gets new tokens is updated in VMEM, where its keys are about to be read, and the changed part is written
back. So new keys and values are never read from HBM in the step that brings them. If there are none, because the pages
already hold the step's, blocks are read to their end and nothing is changed.

Two transfers must not overlap. Sequences that decode write to pages of their own, so only the reuse of the buffer waits
for their writes. Blocks of prefill may belong to one sequence: each waits for its writes before the next block of pages
is fetched.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.fused.decode import Decode
from penstock.engine.attention.fused.layout import LANES, BlockSizes, HeadLayout
from penstock.engine.attention.fused.pages import PageBuffers, ScaleBlocks, Tables
from penstock.engine.attention.fused.prefill import Prefill
from penstock.engine.attention.fused.scales import scale_lanes
from penstock.engine.attention.fused.softmax import ScoreFunction, Softmax
from penstock.engine.attention.fused.tokens import Operands, TokenBlock
from penstock.engine.attention.quantization import is_quantized
from penstock.engine.kernels.pallas import Ref

NUM_TABLES = 7
_NUM_OWN = 2 + 15  # outputs and scratch, without those for scales


def attend_kernel(
    *refs: Ref,
    blocks: BlockSizes,
    layout: HeadLayout,
    scores: ScoreFunction,
    group: int,
    pages_per_seq: int,
    window: int,
    num_parts: int,
    has_scales: bool,
) -> None:
    """Runs both loops. `refs` are tables, inputs, outputs and scratch, in the order of `FusedAttention`."""
    tables = Tables(*refs[:NUM_TABLES])
    num_own = _NUM_OWN + 3 * has_scales
    q, *others = refs[NUM_TABLES:-num_own]
    parts, rest = others[:num_parts], others[num_parts:]
    reads_only = not parts
    new_scales, *rest = (None, *rest) if reads_only or not has_scales else rest
    sinks = rest[1 + has_scales :]  # after the input pages and their scales
    out, pages, *own = refs[-num_own:]
    scales, *own = own if has_scales else (None, *own)
    buffer, arrived, written, pending, *held = own
    row, q_block, new_block, out_block, moved = held[6:11]
    scale_buffer, scale_block = held[11:] or (None, None)
    scale_blocks = ScaleBlocks(scales, scale_buffer) if has_scales else None
    (head_sinks,) = sinks or (None,)
    kv = PageBuffers(blocks, tables, pages, buffer, arrived, written, pages_per_seq, scale_blocks)
    operands = Operands(q, tuple(parts), out, new_scales)
    tokens = TokenBlock(operands, q_block, new_block, out_block, scale_block, moved, group)
    buffer[...] = jnp.zeros_like(buffer)  # rows that no page fills are multiplied by a weight of 0
    if kv.scales is not None:
        kv.scales.buffer[...] = jnp.zeros_like(kv.scales.buffer)
    out_block[...] = jnp.zeros_like(out_block)
    state = Softmax(layout, scores, head_sinks, None, *held[:3])
    Decode(tables, kv, state, tokens, row, pending, window, reads_only).run()
    state = Softmax(layout, scores, head_sinks, blocks.num_queries, *held[3:6])
    Prefill(tables, kv, state, tokens, window, reads_only).run()


def scratch(
    blocks: BlockSizes, layout: HeadLayout, num_kv_heads: int, group: int, q_dtype: str, new_dtype: str, kv_dtype: str
) -> list[Any]:
    """Returns the kernel's scratch memory."""
    rows = blocks.num_queries * group

    def vmem(*shape: int, dtype: str = "float32") -> Any:
        return pltpu.VMEM(shape, jnp.dtype(dtype))

    def softmax(num_rows: int) -> list[Any]:
        return [vmem(num_kv_heads, num_rows, lanes) for lanes in (LANES, LANES, layout.query_width)]

    scales = [vmem(2, num_kv_heads, 2, blocks.keys), vmem(blocks.num_queries, scale_lanes(num_kv_heads))]
    return [
        vmem(2, num_kv_heads, blocks.keys, layout.width, dtype=kv_dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((2,), jnp.int32),
        *softmax(blocks.decode_rows),
        *softmax(rows),
        vmem(num_kv_heads, blocks.decode_rows, layout.query_width, dtype=q_dtype),
        vmem(num_kv_heads, rows, layout.query_width, dtype=q_dtype),
        vmem(num_kv_heads, blocks.num_queries, layout.width, dtype=new_dtype),
        vmem(num_kv_heads, rows, layout.query_width, dtype=q_dtype),
        pltpu.SemaphoreType.DMA((2,)),
        *(scales if is_quantized(kv_dtype) else ()),
    ]
