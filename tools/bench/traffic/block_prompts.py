"""Prompts made from a few names: prompts whose names begin alike begin with the same tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt of `length` token ids: those of `blocks` in order, cut to `num_shared`, then ids of its own.

    A block's ids depend only on its name and on what all prompts of a load share: `seed`, `vocab_size` and
    `block_size`.
    """

    blocks: tuple[str, ...]
    block_size: int
    num_shared: int
    length: int
    own: str  # names what follows the blocks
    vocab_size: int
    seed: str

    def __len__(self) -> int:
        return self.length

    def token_ids(self) -> tuple[int, ...]:
        """Generates the ids again each time."""
        shared = [self._ids(f"block {name}", self.block_size) for name in self.blocks]
        ids = np.concatenate([*shared, np.zeros(0, np.int64)])[: self.num_shared]
        return tuple(np.concatenate([ids, self._ids(f"own {self.own}", self.length - len(ids))]).tolist())

    def _ids(self, name: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return np.random.default_rng(list(digest[:16])).integers(*bounds(self.vocab_size), count)


def bounds(vocab_size: int) -> tuple[int, int]:
    """Returns the range of random token ids, upper end excluded; it avoids both ends, where special tokens are."""
    return min(300, vocab_size // 4), min(vocab_size, 8192) - min(64, vocab_size // 8)
