"""Sampling from logits whose vocabulary is split over several devices.

Greedy rows exchange a maximum and its index. For other rows, an all-to-all gives each device some of the rows whole. An
all-gather would write every logit to every device, and each would then do the work of all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from penstock.engine.execution.sampling.sampling import Form, Survey, greedy_tokens, sample, survey
from penstock.engine.execution.sampling_rows import SamplingRows
from penstock.engine.sharding.placement import Placement

_Found = TypeVar("_Found")
_Work = Callable[[jax.Array, Any, Any], _Found]
"""Called with logits `[num_shares, num_rows, share]` in the form that `sampling.sample` takes, the inputs of their
rows, and the common inputs.
"""

_WHOLE: Any = PartitionSpec()


def sample_shares(
    logits: jax.Array, rows: SamplingRows, placement: Placement | None, vocab_size: int, form: Form
) -> jax.Array:
    """Samples like `sampling.sample` from logits `[num_rows, vocab_rows]` whose vocabulary `placement` splits."""
    if placement is None:
        return sample(logits[None], rows, vocab_size, form)

    def draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
        work = partial(_sample, vocab_size=vocab_size, form=form)
        return apply_by_rows(work, logits, rows, None, placement)

    if placement.num_shares == 1:
        return draw(logits, rows)

    def greedily(logits: jax.Array, _: SamplingRows) -> jax.Array:
        return _greedily(logits, placement, vocab_size, form)

    token_ids: jax.Array = lax.cond(jnp.any(rows.temperature > 0), draw, greedily, logits, rows)
    return token_ids


def _sample(shares: jax.Array, rows: SamplingRows, _: None, *, vocab_size: int, form: Form) -> jax.Array:
    return sample(shares, rows, vocab_size, form)


def apply_by_rows(
    work: _Work[_Found], logits: jax.Array, of_rows: Any, common: Any, placement: Placement | None
) -> _Found:
    """Applies `work` to all rows; each device has some of them whole.

    `logits` are `[num_rows, vocab_rows]`. The arrays of `of_rows`, and of what `work` returns, have a leading axis of
    rows. All devices have `common`.
    """
    if placement is None:
        return work(logits[None], of_rows, common)
    axes, num_shares, num_rows = placement.replica, placement.num_shares, logits.shape[0]
    per_device = -(-num_rows // num_shares)

    def padded(array: jax.Array) -> jax.Array:
        rest = per_device * num_shares - num_rows
        return jnp.pad(array, ((0, rest), *[(0, 0)] * (array.ndim - 1))) if rest else array

    def on_device(logits: jax.Array, of_rows: Any, common: Any) -> _Found:
        logits = lax.all_to_all(logits, axes, split_axis=0, concat_axis=0, tiled=True)
        first = lax.axis_index(axes) * per_device
        own = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, per_device), of_rows)
        found = work(logits.reshape(num_shares, per_device, -1), own, common)
        gathered: _Found = jax.tree.map(lambda array: lax.all_gather(array, axes, axis=0, tiled=True), found)
        return gathered

    run = jax.shard_map(
        on_device,
        mesh=placement.mesh,
        in_specs=(placement.spec((None, "vocab")), _WHOLE, _WHOLE),
        out_specs=_WHOLE,
        check_vma=False,
    )
    found = run(padded(logits), jax.tree.map(padded, of_rows), common)
    cut: _Found = jax.tree.map(lambda array: array[:num_rows], found)
    return cut


def _greedily(logits: jax.Array, placement: Placement, vocab_size: int, form: Form) -> jax.Array:
    def on_device(logits: jax.Array) -> jax.Array:
        share = logits.shape[1]
        first = lax.axis_index(placement.replica) * share
        logits = jnp.where(first + jnp.arange(share) < vocab_size, logits, -jnp.inf)
        found, top = survey(logits, form), jnp.max(logits, axis=-1)
        tops, places, sound = (
            lax.all_gather(array, placement.replica) for array in (top, first + found.greedy, found.is_sound)
        )
        best = jnp.argmax(tops, axis=0)  # ties go to the first, which has the lower indices
        greedy = jnp.take_along_axis(places, best[None], axis=0)[0]
        return greedy_tokens(jnp.max(tops, axis=0), Survey(greedy, jnp.all(sound, axis=0)))

    run = jax.shard_map(
        on_device,
        mesh=placement.mesh,
        in_specs=placement.spec((None, "vocab")),
        out_specs=_WHOLE,
        check_vma=False,
    )
    token_ids: jax.Array = run(logits)
    return token_ids
