"""The sizes that the kernels are built for, chosen from the shapes of their arguments. Triton wants powers of two."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

STAGES = 3  # of the loops over keys: one block is in use while the next is being fetched
_DECODE_BUFFERS = STAGES - 1  # blocks that Triton then keeps in shared memory
_PREFILL_BUFFERS = STAGES  # one more for Hopper's asynchronous matmuls, which take 64 rows or more

# Shared memory, out of the 227 KiB that a Hopper SM has for programs. Decoding waits for memory: at least two programs
# share an SM, three in half precision, so that about 64 KiB are in flight to each SM at any time; a third of that
# would hide the memory's latency. A program that prefills fills the registers of an SM and has it to itself.
_DECODE_BYTES = 96 * 2**10
_PREFILL_BYTES = 200 * 2**10

_MAX_KEYS = 64
_MIN_ROWS = 16  # for a matmul on a tensor core
_MAX_ROWS = 128  # two warp groups of 64 rows each
_MAX_WIDE_ROWS = 16  # for f32, which is multiplied without tensor cores: more would not stay in registers
_MAX_VALUES = 128 * 128  # f32 sums of a block of queries, which stay in registers: 64 in each of 256 threads

NUM_PROGRAMS = 264
"""The number of programs that keep a GPU busy: two for each of the 132 SMs of an H100."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of query and KV heads, and the width of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """The head_dim, padded to a valid tile size."""
        return max(16, power_of_two(self.head_dim))


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    rows: int  # query heads of a KV head, padded
    keys: int  # of a block
    max_splits: int  # parts that one sequence's blocks are split into, at most; a power of two
    num_programs: int  # programs that are wanted
    num_shares: int  # shares that a step of this shape can have at most, for each KV head
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    rows: int  # queries times the query heads of a KV head, padded
    queries: int
    keys: int  # of a block
    num_blocks: int  # blocks of queries that a step of this shape can have at most
    num_warps: int


def decode_tiles(heads: Heads, dtype: str, num_programs: int, max_seqs: int, max_len: int) -> DecodeTiles:
    """Returns the tiles for decoding. `max_len` is the most tokens that the pages of a sequence can hold."""
    keys = _keys(heads, dtype, _DECODE_BYTES // _DECODE_BUFFERS)
    extra = -(-num_programs // heads.num_kv_heads)  # shares beyond one for each sequence, as in `split_work`
    return DecodeTiles(
        rows=max(_MIN_ROWS, power_of_two(heads.group)),
        keys=keys,
        max_splits=power_of_two(min(extra + 1, -(-max_len // keys))),
        num_programs=num_programs,
        num_shares=max_seqs + extra,
    )


def prefill_tiles(heads: Heads, dtype: str, num_tokens: int, max_seqs: int) -> PrefillTiles:
    itemsize = jnp.dtype(dtype).itemsize
    most = _MAX_WIDE_ROWS if itemsize == 4 else max(64, min(_MAX_ROWS, _MAX_VALUES // heads.width))
    rows = max(_MIN_ROWS, power_of_two(heads.group), min(most, power_of_two(num_tokens * heads.group)))
    queries = rows // heads.group
    q_bytes = rows * heads.width * itemsize
    # Blocks do not span sequences; a sequence that prefills has at least two tokens.
    num_blocks = num_tokens // queries + min(max_seqs, num_tokens // 2)
    return PrefillTiles(
        rows=rows,
        queries=queries,
        keys=_keys(heads, dtype, (_PREFILL_BYTES - q_bytes) // _PREFILL_BUFFERS),
        num_blocks=max(1, num_blocks),
        num_warps=8 if rows >= _MAX_ROWS else 4,
    )


def power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


def _keys(heads: Heads, dtype: str, budget: int) -> int:
    """Returns the number of keys in a block, such that they and their values fit into `budget` bytes."""
    token_bytes = 2 * heads.width * jnp.dtype(dtype).itemsize
    keys = _MAX_KEYS
    while keys > _MIN_ROWS and keys * token_bytes > budget:
        keys //= 2
    return keys
