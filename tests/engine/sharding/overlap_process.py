"""Run by test_overlap.py in a process with eight host devices; prints one JSON object.

Runs steps of small stacked models, with all-reduces in parts and whole.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.engine.loading.checkpoint import random_model
from penstock.engine.models import QKV, AttentionOptions, Decoder, GroupCache, MLPConfig, ModelConfig, NormConfig
from penstock.engine.models.hf.blocks import sliding
from penstock.engine.sharding.overlapped_sums import overlap
from penstock.engine.sharding.placement import Placement, place, split_model
from tests.engine.engines import TINY
from tests.engine.sharding.devices import keep_as_told

DENSE = replace(TINY.blocks[0].with_attention(num_heads=8, head_dim=16), mlp=MLPConfig(192))
PLAIN = replace(TINY, blocks=(DENSE,) * 3, hidden_size=256)
BIASED = replace(DENSE, mlp=MLPConfig(192, bias=True), residual_scale=0.22)
BIASED = BIASED.with_attention(qkv_bias=True, out_bias=True)
NORMED = DENSE.with_attention(qk_norm=NormConfig(1e-6))
MODELS = {
    "plain": PLAIN,
    "biased and scaled": replace(PLAIN, blocks=(BIASED,) * 3),
    "windows and norms of heads": replace(PLAIN, blocks=tuple(sliding(NORMED, [4, None, 4, None, 4]))),
    "unit offset": replace(PLAIN, blocks=(replace(DENSE, norm=NormConfig(1e-5, unit_offset=True)),) * 2),
}

NUM_TOKENS = 3


def main() -> None:
    keep_as_told()
    found: dict[str, Any] = {}
    for name, config in MODELS.items():
        found[name] = differences(replace(config, dtype="float32"), 8 if name == "biased and scaled" else 2)
    found["bfloat16"] = differences(replace(PLAIN, dtype="bfloat16"), 8)
    json.dump(found, sys.stdout)


def differences(config: ModelConfig, tensor: int) -> dict[str, float]:
    """Compares a step in two parts with a step of a model that knows no parts.

    Also returns the share of the first layer's keys that differ from those of a step in one part, and from that
    model's.
    """
    placement = place(jax.devices()[:tensor], tensor)
    model = filled(random_model(split_model(config, tensor), 0, placement=placement, stacked=True))
    expected, written = run(model, placement)
    overlap(model, placement, pays=lambda num_tokens: num_tokens != NUM_TOKENS)
    assert not model.overlaps(NUM_TOKENS)
    _, pages_of_one = run(model, placement)
    overlap(model, placement, pays=lambda num_tokens: num_tokens == NUM_TOKENS)
    assert model.overlaps(NUM_TOKENS)
    hidden, pages = run(model, placement)
    return {
        "hidden": float(np.abs(hidden - expected).max() / np.abs(expected).max()),
        "pages": float(np.abs(pages - written).max() / np.abs(written).max()),
        "first keys": float(np.mean(pages[0] != pages_of_one[0])),
        "first keys of the whole": float(np.mean(pages[0] != written[0])),
    }


def filled(model: Decoder) -> Decoder:
    """Fills norms and biases with values other than ones and zeros."""
    rng = np.random.default_rng(4)

    def changed(path: Any, leaf: jax.Array) -> jax.Array:
        if path[-1].key not in ("scale", "bias"):
            return leaf
        values = rng.normal(size=leaf.shape) * 0.3 + leaf
        placed: jax.Array = jax.device_put(values.astype(leaf.dtype), leaf.sharding)
        return placed

    graph, state = nnx.split(model)
    pure = jax.tree_util.tree_map_with_path(changed, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, pure)
    made: Decoder = nnx.merge(graph, state)
    return made


def run(model: Decoder, placement: Placement) -> tuple[np.ndarray, np.ndarray]:
    """Returns hidden states of three tokens, and the new pages. A stand-in for attention is as in
    test_stacked_decoder.py.
    """

    def attend(
        qkv: QKV,
        cache: GroupCache,
        *,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
        kv_scales: Any = None,
    ) -> tuple[jax.Array, GroupCache]:
        assert sinks is kv_scales is None
        assert qkv.v is not None
        held: Any = cache.pages
        place = held.first_page + cache.group
        values = jnp.repeat(held.pages[place] + qkv.v, qkv.q.shape[1] // qkv.v.shape[1], axis=1)
        pages = held.pages.at[place].set(qkv.k)
        return qkv.q * (options.sliding_window or 1) + values, cache._replace(pages=replace(held, pages=pages))

    config = model.config
    shape = (len(config.blocks), 3, config.attentions[0].num_kv_heads, config.attentions[0].head_dim)
    pages = jax.random.normal(jax.random.key(1), shape, config.dtype)
    graph, params = nnx.split(model)
    step = jax.jit(lambda params, ids, places, caches: nnx.merge(graph, params)(ids, places, caches, attend))
    whole = placement.sharding()
    inputs = jax.device_put((jnp.array([5, 6, 7]), jnp.arange(3), (pages,)), whole)
    hidden, caches = step(params, *inputs)
    return np.asarray(hidden, np.float32), np.asarray(caches[0], np.float32)


main()
