"""GPU kernels lowered by Pallas' Triton backend, and steps compiled for an H100, on a machine without one."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.engine.attention import KVCacheSpec, RaggedBatch, ShardedAttention
from penstock.engine.attention.triton import TritonAttention
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.cache_sizes import with_pages
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.steps import Steps, _compute_hidden
from penstock.engine.loading.checkpoint import abstract_model
from penstock.engine.models import QKV, AttentionOptions, ModelConfig
from penstock.engine.sharding.placement import DATA, TENSOR, Placement, place
from penstock.tools.plan import preset
from tests.engine.attention import h100

pytestmark = pytest.mark.versions

needs_plugin = pytest.mark.skipif(not h100.devices(), reason="JAX's plugin for CUDA is not at hand (docs/gpu.md)")

GEOMETRIES = [(32, 8, 128, 64), (4, 1, 64, 16), (6, 3, 96, 48), (40, 8, 128, 64), (7, 1, 256, 64)]
"""Heads, KV heads, head_dim and page size."""

WINDOW_AND_CAP = AttentionOptions(sliding_window=100, soft_cap=30.0)


def llama(num_layers: int) -> ModelConfig:
    """Returns Llama-3.1-8B's geometry with fewer layers."""
    model = preset("Llama-3.1-8B")
    assert model is not None
    return model.first_layers(num_layers)


def arguments(
    num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str, sharding: NamedSharding | None = None
) -> tuple[Any, ...]:
    """Returns the abstract arguments of one layer."""

    def shape(*dims: int, dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    spec = KVCacheSpec(1, 64, page_size, num_kv_heads, head_dim, dtype)
    cache = tuple(shape(*array.shape, dtype=dtype) for array in TritonAttention().cache_arrays(spec)[0])
    q, k = (shape(64, heads, head_dim, dtype=dtype) for heads in (num_heads, num_kv_heads))
    return QKV(q, k, k), cache, RaggedBatch(shape(64), shape(32), shape(32, 20), shape(33), shape(1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_triton_takes_any_heads_types_windows_and_caps(geometry: tuple[int, int, int, int], dtype: str) -> None:
    attend = jax.jit(partial(TritonAttention(), options=WINDOW_AND_CAP), donate_argnums=1)
    with jax.sharding.use_abstract_mesh(h100.abstract_mesh("all")):
        lowered = attend.trace(*arguments(*geometry, dtype)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("xla.gpu.triton") == 4


def test_a_whole_step_of_llama_lowers_for_cuda() -> None:
    model = llama(num_layers=2)
    placement = place(jax.devices()[:1], 1)
    attention = ShardedAttention(TritonAttention(), placement)
    geometry = Geometry(64, 512, 4096, 64, model.vocab_size)
    steps = Steps(abstract_model(model, placement, stacked=False), attention, geometry, placement)
    heads = model.attentions[0]
    cache = attention.abstract_cache(KVCacheSpec(2, 100, 64, heads.num_kv_heads, heads.head_dim, "bfloat16"))
    on_h100 = ShardedAttention(TritonAttention(), Placement(h100.abstract_mesh(DATA, TENSOR)))  # type: ignore[arg-type]
    step = partial(_compute_hidden, steps._rebuild, on_h100, geometry, 16)
    flat = jax.ShapeDtypeStruct((geometry.step_layout(16).size,), "int32", sharding=placement.sharding())
    last = jax.ShapeDtypeStruct((geometry.max_rows,), "int32", sharding=placement.sharding())
    lowered = jax.jit(step).trace(steps.params, cache, last, flat).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("xla.gpu.triton") == 4 * 2


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_triton_takes_sinks(geometry: tuple[int, int, int, int]) -> None:
    attend = jax.jit(partial(TritonAttention(), options=WINDOW_AND_CAP), donate_argnums=1)
    sinks = jax.ShapeDtypeStruct((geometry[0],), "bfloat16")
    with jax.sharding.use_abstract_mesh(h100.abstract_mesh("all")):
        traced = attend.trace(*arguments(*geometry, "bfloat16"), sinks=sinks)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("xla.gpu.triton") == 4


@needs_plugin
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_kernels_compile_and_update_the_pages_in_place(geometry: tuple[int, int, int, int]) -> None:
    mesh = Mesh(np.array(h100.devices()), ("all",))
    given = arguments(*geometry, "bfloat16", NamedSharding(mesh, PartitionSpec()))
    attend = jax.shard_map(
        partial(TritonAttention(), options=WINDOW_AND_CAP),
        mesh=mesh,
        in_specs=(PartitionSpec(),) * 3,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    compiled: Any = jax.jit(attend, donate_argnums=1).lower(*given).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * given[1][0].size * 2
    assert not copies_of(compiled.as_text(), given[1][0].shape)


@needs_plugin
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("num_tokens", [16, 512])
def test_a_step_copies_no_pages_and_leaves_the_device_never(tensor: int, num_tokens: int) -> None:
    config = EngineConfig(max_num_seqs=64, max_model_len=8192, num_pages=1000, tensor_parallel=tensor)
    deployment = deploy(config, llama(num_layers=2), h100.devices(tensor))
    assert deployment.attention.name == "triton"
    assert deployment.page_size == 64
    (spec,) = with_pages(deployment, 0).kinds
    steps, cache = abstract_steps(config, deployment)
    compiled: Any = steps.backbone(num_tokens, cache).lower().compile()
    text = compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes >= spec.num_pages * deployment.page_bytes
    assert not copies_of(text, (spec.num_pages, spec.num_kv_heads // tensor, spec.page_size, spec.head_dim))
    # A branch or a loop of XLA's own would wait for the host, which reads what it depends on.
    assert not re.findall(r" (?:while|conditional|infeed|outfeed|send|recv)\(", text)
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == (0 if tensor == 1 else 2 * 2 + 1)


@needs_plugin
@pytest.mark.parametrize("part", ["backbone", "head", "head, all options"])
def test_a_step_is_one_graph_for_each_of_its_parts(part: str, tmp_path: Path) -> None:
    config = EngineConfig(max_num_seqs=64, max_model_len=8192, num_pages=1000)
    steps, cache = abstract_steps(config, deploy(config, llama(num_layers=2), h100.devices()))
    step = steps.backbone(512, cache) if part == "backbone" else steps.head(16, is_extended=part != "head")
    step.lower().compile({"xla_dump_to": str(tmp_path)})
    (thunks,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    launches = thunks.read_text().splitlines()
    assert [line.split()[1] for line in launches if not line.startswith(" ")] == ["kCommandBuffer"]
    assert not any("kWhile" in line for line in launches)
    if part != "backbone":
        return
    assert sum("ragged_paged_attention" in line for line in launches) == 4 * 2
    kernels = {name: text for text in map(Path.read_text, tmp_path.glob("*.ptx")) for name in kernel_names(text)}
    for name in ("decode", "prefill"):
        assert "cp.async.wait_group \t2;" in kernels[name], "the next block's keys and values are not on their way"
    assert "mma.sync" in kernels["decode"]
    assert "wgmma.mma_async" in kernels["prefill"]


def abstract_steps(config: EngineConfig, deployment: Deployment) -> tuple[Steps, Any]:
    """Returns the steps of a deployment on devices that are absent, and its cache."""
    assert deployment.placement is not None
    assert isinstance(deployment.attention, ShardedAttention)
    steps = Steps(
        abstract_model(deployment.model, deployment.placement, stacked=False),
        deployment.attention,
        deployment.geometry(deployment.max_model_len),
        deployment.placement,
    )
    (spec,) = with_pages(deployment, 0).kinds
    return steps, deployment.attention.abstract_cache(spec)


def kernel_names(ptx: str) -> list[str]:
    return re.findall(r"entry ragged_paged_attention_(\w+)", ptx)


def copies_of(text: str, shape: tuple[int, ...]) -> list[str]:
    """Returns the HLO instructions that copy an array of this shape."""
    dims = ",".join(map(str, shape))
    return re.findall(rf"^.*= \w+\[{dims}\]\S* (?:copy|transpose|copy-start)\(.*$", text, re.MULTILINE)
