"""Each half of a block as one call of the CPU kernel, compared with the block as XLA computes it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.attention import GroupedBatch, KVCacheSpec, attend_in_groups, attention_for
from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.cpu import NativeLibrary, load_library
from penstock.engine.models import AttentionConfig, BlockConfig, ExpertsConfig, LayerCache, MLPConfig, NormConfig
from penstock.engine.models.attention_interface import GroupCache
from penstock.engine.models.block import Block
from penstock.engine.models.config import QueryScale, RopeConfig
from penstock.engine.models.cpu.block import PackedBlock
from penstock.engine.models.cpu.panels import pack_halves
from penstock.engine.models.layers.attention import LayerInputs
from penstock.engine.models.layers.rope import rotary_tables
from tests.engine.engines import SMALL, drive, write_model
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
BUILD_DIR = Path.home() / ".cache" / "penstock" / "native"
HIDDEN, PAGE_SIZE, NUM_PAGES = 48, 8, 12
RMS, LAYER = NormConfig(1e-5), NormConfig(1e-5, kind="layer")
PLAIN = BlockConfig(AttentionConfig(4, 2, 16, RopeConfig(16)), MLPConfig(70), RMS)


def quantized(packing: Packing) -> BlockConfig:
    names = [("attention", name) for name in ("q", "k", "v", "out")] + [
        ("mlp", name) for name in ("gate", "up", "down")
    ]
    return replace(PLAIN, mlp=MLPConfig(64), packed=tuple((name, packing) for name in names))


BLOCKS = {
    "plain": PLAIN,
    "biases, sinks, no positions, relu": BlockConfig(
        AttentionConfig(4, 2, 16, None, qkv_bias=True, out_bias=True, sinks=True), MLPConfig(64, "relu", bias=True), RMS
    ),
    "parallel, layer norm, neighbours rotate": BlockConfig(
        AttentionConfig(4, 4, 16, RopeConfig(16, interleaved=True)), MLPConfig(70), LAYER, parallel=True
    ),
    "norms around, window, caps": BlockConfig(
        AttentionConfig(6, 2, 16, RopeConfig(16), qk_norm=RMS, sliding_window=9, scale=0.2, soft_cap=20.0),
        MLPConfig(70, "gelu_pytorch_tanh"),
        NormConfig(1e-6, unit_offset=True, scales_in_f32=True),
        norm_placement="around",
    ),
    "norms after, of whole projections": BlockConfig(
        AttentionConfig(4, 2, 16, RopeConfig(16), qk_projection_norm=RMS),
        MLPConfig(70, "gelu"),
        RMS,
        norm_placement="after",
    ),
    "part of a head rotates, all is scaled": BlockConfig(
        AttentionConfig(4, 1, 16, RopeConfig(8), query_scale=QueryScale(0.1, 4), qk_norm=LAYER),
        MLPConfig(70),
        RMS,
        residual_scale=0.22,
    ),
    "experts": replace(PLAIN, mlp=ExpertsConfig(4, 2, 24)),
    "int8 by int8": quantized(Packing("int8", 0, scale="bfloat16", has_int8_activations=True)),
    "int8": quantized(Packing("int8", 16)),
    "int4 with minimums": quantized(Packing("int4", 16, scale="float16", offset="minimums")),
    "int4 by int8": quantized(Packing("int4", 16, offset="minimums", has_int8_activations=True)),
}  # fmt: skip
# (tokens of this step, tokens in all) of each sequence
FIRST, SECOND = [(7, 7), (13, 13), (1, 1)], [(1, 8), (5, 18), (1, 2)]
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}
LEFT_TO_SLOW_RUNS = {(name, "float16") for name in BLOCKS.keys() - {"plain", "int8", "int8 by int8"}}


@cache
def library() -> Any:
    return load_library(BUILD_DIR)


def random_block(config: BlockConfig, dtype: str, *, packed: bool) -> Block:
    block = Block(config, HIDDEN, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    nnx.update(block, jax.tree.map(lambda leaf: random_like(leaf, next(keys)), nnx.state(block)))
    if not packed:
        return block
    pack_halves(block, library())
    return PackedBlock(block)


def random_like(leaf: jax.Array, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jax.lax.bitcast_convert_type(jax.random.bits(key, leaf.shape, jnp.uint8), leaf.dtype)
    size = 0.3 if jnp.any(leaf) or leaf.ndim < 2 else 0.01  # those of codes are 0 until they are loaded
    return leaf + size * jax.random.normal(key, leaf.shape, leaf.dtype)


def step_of(lengths: list[tuple[int, int]], num_tokens: int, config: BlockConfig) -> LayerInputs:
    """Makes a step; sequence i has the pages from 1 + 3 * i on, and tokens behind the sequences' are padding."""
    parts = {"slots": np.zeros(num_tokens, np.int32), "positions": np.zeros(num_tokens, np.int32)}
    ends = np.cumsum([count for count, _ in lengths])
    for i, (count, total) in enumerate(lengths):
        places = np.arange(total - count, total)
        parts["positions"][ends[i] - count : ends[i]] = places
        parts["slots"][ends[i] - count : ends[i]] = (1 + 3 * i) * PAGE_SIZE + places
    pages = np.arange(1, 1 + 3 * len(lengths), dtype=np.int32).reshape(len(lengths), 3)
    batch = GroupedBatch(
        (jnp.asarray(parts["slots"]),),
        jnp.asarray([total for _, total in lengths], jnp.int32),
        (jnp.asarray(pages),),
        jnp.asarray([0, *ends], jnp.int32),
        jnp.asarray([len(lengths)], jnp.int32),
    )
    attention = attention_for("native", "cpu", "float32", NativeLibrary(BUILD_DIR))
    positions = jnp.asarray(parts["positions"])
    rope = config.attention.rope
    rotary = {} if rope is None else {rope: rotary_tables(positions, rope)}
    return LayerInputs(positions, rotary, attend_in_groups(attention, batch, PAGE_SIZE))


def empty_cache(config: BlockConfig, dtype: str) -> LayerCache:
    attention = attention_for("native", "cpu", dtype, NativeLibrary(BUILD_DIR))
    held_as = attention.cache_dtype(dtype)
    spec = KVCacheSpec(1, NUM_PAGES, PAGE_SIZE, config.attention.num_kv_heads, config.attention.head_dim, held_as)
    return attention.init_cache(spec)[0]


def two_steps(block: Block, config: BlockConfig, dtype: str, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns real tokens after a first step, and after a second one that sees the keys and values of the first."""
    graph, state = nnx.split(block)

    def compute(state: nnx.State[Any, Any], pages: LayerCache) -> tuple[list[jax.Array], LayerCache]:
        results = []
        for seed, lengths in enumerate((FIRST, SECOND)):
            x = jax.random.normal(jax.random.key(seed), (64, HIDDEN), dtype)[:num_tokens]
            step = step_of(lengths, num_tokens, config)
            y, (pages, _) = nnx.merge(graph, state)(x, step, GroupCache(pages, 0))
            results.append(y[: sum(count for count, _ in lengths)].astype(jnp.float32))
        return results, pages

    (first, second), _ = jax.jit(compute, donate_argnums=1)(state, empty_cache(config, dtype))
    return np.asarray(first), np.asarray(second)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(
            config, dtype, id=f"{name}-{dtype}", marks=[pytest.mark.slow] if (name, dtype) in LEFT_TO_SLOW_RUNS else []
        )
        for name, config in BLOCKS.items()
        for dtype in TOLERANCE
    ],
)
def test_a_packed_block_computes_what_a_block_does(config: BlockConfig, dtype: str) -> None:
    packed = random_block(config, dtype, packed=True)
    text = lowered(packed, config, dtype)
    assert text.count("@penstock_halves") == (1 if isinstance(config.mlp, ExpertsConfig) else 2)
    expected = two_steps(random_block(config, dtype, packed=False), config, dtype, 32)
    most = TOLERANCE[dtype]
    reads_bytes = any(packing.has_int8_activations for _, packing in config.packed)
    # XLA rounds each weight too, or a row's value between two codes otherwise.
    if (config.packed and dtype == "bfloat16") or (reads_bytes and dtype == "float16"):
        most = 0.2
    elif reads_bytes or (config.packed and dtype == "float16"):
        most = 4e-2
    for got, wanted in zip(two_steps(packed, config, dtype, 32), expected, strict=True):
        assert np.abs(got - wanted).max() <= most * np.abs(wanted).max()


def lowered(block: Block, config: BlockConfig, dtype: str) -> str:
    graph, state = nnx.split(block)
    step = step_of(FIRST, 32, config)
    x = jnp.zeros((32, HIDDEN), dtype)

    def compute(state: nnx.State[Any, Any], pages: LayerCache) -> jax.Array:
        return nnx.merge(graph, state)(x, step, GroupCache(pages, 0))[0]

    text: str = jax.jit(compute).lower(state, empty_cache(config, dtype)).as_text()
    return text


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_does_not_depend_on_padding_or_on_who_helps(dtype: str) -> None:
    """Steps run on several threads at once: helpers of the pool come late, or to another step."""
    block = random_block(PLAIN, dtype, packed=True)
    expected = two_steps(block, PLAIN, dtype, 21)
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda n: two_steps(block, PLAIN, dtype, 21 + n), range(12)):
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("family", "calls"),
    [
        pytest.param("qwen3", 2, id="all layers but the last feed-forward"),
        pytest.param("gemma2", 4, id="layers share pages"),
        pytest.param("cohere2", 4, id="halves side by side"),
        pytest.param("qwen3_moe", 2, id="attention alone"),
        pytest.param("lfm2", 2, id="convolutions, as all layers"),
        pytest.param("qwen3_5_text", 2, id="delta nets and gated attention, as all layers"),
        pytest.param("qwen3_next", 2, id="delta nets and gated attention, each alone"),
    ],
)
def test_what_one_call_is_given(family: str, calls: int, tmp_path: Path) -> None:
    """Models have two layers; their tokens are those of XLA's matmuls."""
    write_model(tmp_path, family, **({"sliding_window": 8} if family == "gemma2" else {}))
    engines = [Engine.from_checkpoint(tmp_path, replace(SMALL, matmul=matmul)) for matmul in ("native", "xla")]
    runner = engines[0]._runner
    text = runner._steps.backbone(16, runner._cache).lower().as_text()
    assert text.count("@penstock_halves") == calls
    request = Request("a", (5, 6, 7, 8), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    native, plain = (drive(engine, [request])["a", 0].token_ids for engine in engines)
    assert native == plain
