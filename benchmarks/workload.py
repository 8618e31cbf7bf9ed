"""The workload that engines are compared on: random prompts and answer lengths, the same for everybody."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Item:
    prompt_token_ids: tuple[int, ...]
    num_output: int


def shared_workload(vocab_size: int, count: int = 64, seed: int = 0) -> list[Item]:
    """Prompt lengths log-uniform 16..512, answer lengths uniform 16..128.

    Token ids keep away from both ends of the vocabulary, where special tokens are.
    """
    rng = np.random.default_rng(seed)
    prompts = np.exp(rng.uniform(np.log(16), np.log(512), count)).round().astype(int).clip(16, 512)
    outputs = rng.integers(16, 129, count)
    low, high = min(300, vocab_size // 4), min(vocab_size, 8192) - min(64, vocab_size // 8)
    return [
        Item(tuple(rng.integers(low, high, length).tolist()), int(output))
        for length, output in zip(prompts, outputs, strict=True)
    ]
