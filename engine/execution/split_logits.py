"""Logits of which each device has those of its part of the vocabulary: greedy rows need no more of them than maxima."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from penstock.engine.execution.sampling import Survey, survey
from penstock.engine.sharding import REPLICA, Placement


def split_survey(logits: jax.Array, placement: Placement, vocab_size: int) -> Survey:
    """As `survey`, of f32 `[num_rows, vocab_rows]` split over the devices, of which `vocab_size` are tokens."""
    axes = tuple(name for name in REPLICA if name in placement.mesh.shape)
    split, whole = placement.spec((None, "vocab")), PartitionSpec()  # type: ignore[no-untyped-call]
    run: Any = jax.shard_map(
        partial(_of_part, axes=axes, vocab_size=vocab_size),
        mesh=placement.mesh,
        in_specs=(split,),
        out_specs=whole,
        check_vma=False,
    )
    found: Survey = run(logits)
    return found


def _of_part(part: jax.Array, *, axes: tuple[str, ...], vocab_size: int) -> Survey:
    first = jax.lax.axis_index(axes) * part.shape[1]
    is_token = first + jnp.arange(part.shape[1]) < vocab_size
    found = survey(jnp.where(is_token, part, -jnp.inf))
    words = jnp.stack([_as_words(found.top), first + found.greedy, found.is_sound.astype(jnp.int32)])
    tops, tokens, are_sound = jnp.moveaxis(jax.lax.all_gather(words, axes), 1, 0)  # each [parts, num_rows]
    tops = jax.lax.bitcast_convert_type(tops, jnp.float32)
    best = jnp.argmax(tops, axis=0)[None]  # of equal ones that of the first part, whose tokens come first
    greedy, top = (jnp.take_along_axis(of_parts, best, axis=0)[0] for of_parts in (tokens, tops))
    return Survey(greedy, top, jnp.all(are_sound != 0, axis=0))


def _as_words(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
