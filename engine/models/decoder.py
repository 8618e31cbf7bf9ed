"""The decoder that all families are: embed, blocks of attention and feed-forward, final norm, language-model head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.layers import GatedMLP, Linear, RMSNorm
from penstock.engine.models.rope import rotary_tables, rotate

LayerCache = Any
"""One layer's share of the KV cache: a pytree that only the attention implementation looks into."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StackedCache:
    """The LayerCache of a stacked decoder: the pages of all layers in one array, which no layer's turn may copy."""

    pages: jax.Array  # [num_layers * num_pages, ...]
    first_page: jax.Array  # i32: where the pages of the layer begin whose turn it is


class Attend(Protocol):
    """Attention of this step's tokens over everything their sequences hold, themselves included.

    Writes `k` and `v` into `cache` and returns the attended values with the new cache. `q` is `[num_tokens, num_heads,
    head_dim]`, `k` and `v` are `[num_tokens, num_kv_heads, head_dim]`, the result has the shape of `q`.

    Scores are scaled by `head_dim ** -0.5`. With `sliding_window = w` a token sees itself and the w - 1 before it, that
    is the keys for which `query position - key position < w`; None lets it see everything before.
    """

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, *, sliding_window: int | None
    ) -> tuple[jax.Array, LayerCache]: ...


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245), with query and key norms where a family has them."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear(config.hidden_size, q_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.k = Linear(config.hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.v = Linear(config.hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(q_size, config.hidden_size, bias=config.out_bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.head_dim = config.head_dim

    def __call__(
        self,
        x: jax.Array,  # [num_tokens, hidden]
        rotary: tuple[jax.Array, jax.Array],
        attend: Attend,
        cache: LayerCache,
        sliding_window: int | None,
    ) -> tuple[jax.Array, LayerCache]:
        num_tokens = x.shape[0]
        q, k, v = (part.reshape(num_tokens, -1, self.head_dim) for part in self.project(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        attended, cache = attend(q, k, v, cache, sliding_window=sliding_window)
        return self.out(attended.reshape(num_tokens, -1)), cache

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """Queries, keys and values, each `[num_tokens, heads * head_dim]`."""
        return self.q(x), self.k(x), self.v(x)


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        x: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        attend: Attend,
        cache: LayerCache,
        sliding_window: int | None,
    ) -> tuple[jax.Array, LayerCache]:
        attended, cache = self.attention(self.attention_norm(x), rotary, attend, cache, sliding_window)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive layers that are alike, so that one traced block can serve them all."""

    first: int
    count: int
    sliding_window: int | None


def layer_runs(config: ModelConfig) -> tuple[LayerRun, ...]:
    """The layers of a stacked decoder: one run for each stretch with the same sliding window."""
    windows = config.sliding_windows
    starts = [i for i in range(len(windows)) if i == 0 or windows[i] != windows[i - 1]]
    ends = [*starts[1:], len(windows)]
    return tuple(LayerRun(start, end - start, windows[start]) for start, end in zip(starts, ends, strict=True))


class Decoder(nnx.Module):
    """A causal language model. Calling it gives hidden states; `logits` turns chosen rows of them into logits.

    Its blocks are one per layer, each traced and compiled for itself; or, `stacked`, one per LayerRun, with a leading
    axis of layers on each parameter, and traced once per run: what it takes to compile then does not grow with depth.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, stacked: bool = False) -> None:
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.is_stacked = stacked
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), dtype))
        blocks = [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        if stacked:
            blocks = [_stack(blocks[run.first : run.first + run.count]) for run in layer_runs(config)]
        self.blocks = nnx.List(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        token_ids: jax.Array,  # i32 [num_tokens]
        positions: jax.Array,  # i32 [num_tokens]
        caches: tuple[LayerCache, ...],  # one per layer; stacked, one array of the pages of all
        attend: Attend,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Returns the final hidden states `[num_tokens, hidden]` and the caches with this step's keys and values."""
        x = self.embedding[...][token_ids]
        rotary = rotary_tables(positions, self.config.rope, self.config.head_dim)
        if self.is_stacked:
            x, pages = self._scan(x, rotary, caches[0], attend)
            return self.norm(x), (pages,)
        written = []
        for block, cache, window in zip(self.blocks, caches, self.config.sliding_windows, strict=True):
            x, new_cache = block(x, rotary, attend, cache, window)
            written.append(new_cache)
        return self.norm(x), tuple(written)

    def _scan(
        self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], pages: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """All layers: one loop per run, which carries the pages, so that they are updated where they are."""
        pages_per_layer = pages.shape[0] // self.config.num_layers
        for block, run in zip(self.blocks, layer_runs(self.config), strict=True):
            graph, stack = nnx.split(block)

            def layer(
                carry: tuple[jax.Array, jax.Array],
                inputs: tuple[Any, jax.Array],
                graph: nnx.GraphDef[Block] = graph,
                window: int | None = run.sliding_window,
            ) -> tuple[tuple[jax.Array, jax.Array], None]:
                params, number = inputs
                cache = StackedCache(carry[1], number * pages_per_layer)
                x, cache = nnx.merge(graph, params)(carry[0], rotary, attend, cache, window)
                return (x, cache.pages), None

            numbers = jnp.arange(run.first, run.first + run.count, dtype=jnp.int32)
            (x, pages), _ = jax.lax.scan(layer, (x, pages), (stack, numbers))
        return x, pages

    def logits(self, hidden: jax.Array) -> jax.Array:  # [num_rows, hidden] -> f32 [num_rows, vocab]
        if self.head is None:
            return jnp.einsum("rh,vh->rv", hidden, self.embedding[...], preferred_element_type=jnp.float32)
        return self.head.wide(hidden)


def num_parameters(config: ModelConfig) -> int:
    """Of a checkpoint of this geometry: each KV head counts once, however often devices hold it."""
    embedding_and_head = _count(config, 0)
    return embedding_and_head + config.num_layers * (_count(config, 1) - embedding_and_head)


def _count(config: ModelConfig, num_layers: int) -> int:
    first = replace(
        config,
        num_layers=num_layers,
        sliding_windows=config.sliding_windows[:num_layers],
        num_kv_heads=config.num_kv_heads // config.kv_copies,
    )
    shapes: Any = nnx.state(nnx.eval_shape(lambda: Decoder(first, rngs=nnx.Rngs(0))))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _stack(blocks: Sequence[Block]) -> Block:
    """One block whose parameters are those of `blocks` behind each other."""
    states = [nnx.state(block) for block in blocks]
    block: Block = nnx.merge(nnx.graphdef(blocks[0]), jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    return block
