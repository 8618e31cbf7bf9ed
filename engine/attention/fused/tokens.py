"""Queries, new keys and values, and results of the step's tokens: their transfers between HBM and VMEM.

Outside the kernel they have the layout of matmuls: a row per token with its heads along the lanes, in tiles of 8 or 16
tokens. So they move in blocks of consecutive tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.fused.softmax import Int, aligned
from penstock.engine.kernels.pallas import Ref


@dataclass(frozen=True, slots=True)
class Operands:
    """The kernel's arrays in HBM, or wherever XLA has put them."""

    q: Ref  # [num_tokens, num_heads * query width]
    new: tuple[Ref, ...]  # parts of a token's row in a page, each [num_tokens, num_kv_heads * lanes]
    out: Ref  # as q
    scales: Ref | None  # f32 [num_tokens, lanes]: `scale_rows`, only for 8-bit codes


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """A block of tokens in VMEM. The queries of a KV head are ordered by query head, then by token."""

    operands: Operands
    q: Ref  # [num_kv_heads, group * num_queries, query width]
    new: Ref  # [num_kv_heads, num_queries, width]
    out: Ref  # as q
    scales: Ref | None  # f32 [num_queries, lanes]
    moved: Ref  # semaphores: in, out
    group: int  # query heads of a KV head

    @property
    def num_queries(self) -> int:
        return int(self.new.shape[1])

    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
        return int(self.new.shape[0])

    def switch(self, j: Int, loaded: Int, *, keeps: Int) -> None:
        """Loads block `j` unless it is `loaded`. First stores the results of the loaded block, if it is not -1.

        With `keeps`, the results that block `j` already has are loaded too.
        """

        @pl.when((j != loaded) & (loaded >= 0))
        def _() -> None:
            self.store(loaded)

        @pl.when(j != loaded)
        def _() -> None:
            self.load(j)

            @pl.when(keeps)
            def _() -> None:
                self._all([self._head(self.operands.out, self.out, j, i) for i in range(self._num_query_heads)])

    def load(self, j: Int) -> None:
        """Loads a block's queries, and new keys and values."""
        self._all(self._arrivals(j))

    def store(self, j: Int) -> None:
        """Writes the results of a block."""
        self._all([self._head(self.operands.out, self.out, j, i, out=True) for i in range(self._num_query_heads)])

    @property
    def _num_query_heads(self) -> int:
        return self.num_heads * self.group

    def _arrivals(self, j: Int) -> list[Any]:
        copies = [self._head(self.operands.q, self.q, j, i) for i in range(self._num_query_heads)]
        first = 0
        for part in self.operands.new:
            lanes = part.shape[1] // self.num_heads
            for head in range(self.num_heads):
                source = part.at[self._tokens(j), pl.ds(head * lanes, lanes)]
                copies.append(self._copy(source, self.new.at[head, :, pl.ds(first, lanes)], 0))
            first += lanes
        if self.operands.scales is not None:
            copies.append(self._copy(self.operands.scales.at[self._tokens(j), :], self.scales, 0))
        return copies

    def _head(self, whole: Ref, block: Ref, j: Int, i: int, *, out: bool = False) -> Any:
        """Returns the copy of a query head's rows from `whole` to `block`, or with `out` the other way."""
        lanes = block.shape[2]
        far = whole.at[self._tokens(j), pl.ds(i * lanes, lanes)]
        near = block.at[i // self.group, pl.ds(i % self.group * self.num_queries, self.num_queries), :]
        return self._copy(near, far, 1) if out else self._copy(far, near, 0)

    def _tokens(self, j: Int) -> Any:
        return pl.ds(aligned(j * self.num_queries, self.num_queries), self.num_queries)

    def _copy(self, source: Ref, target: Ref, semaphore: int) -> Any:
        return pltpu.make_async_copy(source, target, self.moved.at[semaphore])

    @staticmethod
    def _all(copies: list[Any]) -> None:
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()
