"""The kernel's inputs that do not depend on the layer: made once per step, outside the loop over layers."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from penstock.engine.models.attention_interface import RaggedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepTables:
    """The step's part of the kernel's `Tables`."""

    kv_lens: jax.Array  # i32 [max_seqs]
    cu_q_lens: jax.Array  # i32 [max_seqs + 1]
    pages: jax.Array  # i32 [max_seqs * pages_per_seq]
    decoding: jax.Array  # i32 [max_seqs]
    prefilling: jax.Array  # i32 [max_seqs]
    counts: jax.Array  # i32 [2]

    @property
    def max_seqs(self) -> int:
        return int(self.kv_lens.shape[0])

    @property
    def pages_per_seq(self) -> int:
        return int(self.pages.shape[0]) // self.max_seqs


def step_tables(batch: RaggedBatch, page_size: int) -> StepTables:
    starts = jnp.minimum(batch.cu_q_lens[:-1], batch.slots.shape[0] - 1)
    # The kernel writes wherever a sequence's table points, and pages of an ended one belong to others.
    is_over = batch.slots[starts] < page_size
    page_indices = jnp.where(is_over[:, None], 0, batch.page_indices)
    q_lens, is_real = jnp.diff(batch.cu_q_lens), jnp.arange(batch.kv_lens.shape[0]) < batch.num_seqs[0]
    decoding, prefilling = is_real & (q_lens == 1), is_real & (q_lens > 1)
    counts = jnp.stack([jnp.sum(decoding), jnp.sum(prefilling)]).astype(jnp.int32)
    return StepTables(
        batch.kv_lens,
        batch.cu_q_lens,
        page_indices.reshape(-1),
        _first_those(decoding),
        _first_those(prefilling),
        counts,
    )


def _first_those(is_meant: jax.Array) -> jax.Array:
    """Returns the numbers of the sequences in `is_meant`, in order, before all others."""
    return jnp.argsort(~is_meant, stable=True).astype(jnp.int32)
