"""TPU kernels of unusual geometries, compiled for real topologies by libtpu, without a TPU."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.engine.attention import AttentionBackend, KVCacheSpec, RaggedBatch
from penstock.engine.attention.fused import FusedAttention
from penstock.engine.attention.quantization import is_quantized
from penstock.engine.attention.ragged import RaggedKernelAttention
from penstock.engine.models import QKV, AttentionOptions, StackedCache
from penstock.engine.models.attention_interface import KV_SCALES_DTYPE, KVScales
from penstock.tools.plan.device.topology import devices_of
from tests.support.needs import needs_libtpu
from tests.support.patience import slow

pytestmark = [
    pytest.mark.versions,
    needs_libtpu,
    pytest.mark.usefixtures("as_shipped_elsewhere"),
]


def compiled(
    attention: AttentionBackend,
    topology: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: str = "bfloat16",
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    has_kv_scales: bool = False,
) -> tuple[Any, int]:
    """Compiles one layer's attention on each device of a slice; also returns the bytes of its pages."""
    mesh = Mesh(np.array(devices_of(topology)), ("all",))
    whole = NamedSharding(mesh, PartitionSpec())
    spec = KVCacheSpec(2, 64, 128 if is_quantized(kv_dtype) else 64, num_kv_heads, head_dim, kv_dtype)
    arrays = attention.cache_arrays(spec)[0]

    def shape(*dims: int, dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=whole)

    q, k = (shape(64, heads, head_dim, dtype="bfloat16") for heads in (num_heads, num_kv_heads))
    cache = StackedCache(jax.tree.map(lambda array: shape(*array.shape, dtype=array.dtype), arrays), shape())
    batch = RaggedBatch(shape(64), shape(64), shape(64, 32), shape(65), shape(1))
    options = AttentionOptions(sliding_window, soft_cap=soft_cap)
    sinks = shape(num_heads, dtype="bfloat16") if has_sinks else None
    kv_scales = KVScales(*[shape(num_kv_heads, dtype="float32")] * 2) if has_kv_scales else None
    attend = jax.shard_map(
        lambda qkv, cache, batch, sinks, kv_scales: attention(
            qkv, cache, attention.prepare(batch, spec.page_size), options=options, sinks=sinks, kv_scales=kv_scales
        ),
        mesh=mesh,
        in_specs=(PartitionSpec(),) * 5,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    step = jax.jit(attend, donate_argnums=1).lower(QKV(q, k, k), cache, batch, sinks, kv_scales).compile()
    return step, sum(array.num_bytes for array in jax.tree.leaves(arrays))


@pytest.mark.parametrize(
    ("topology", "num_heads", "num_kv_heads", "head_dim"),
    [("v5e:4x4", 4, 1, 64), ("v6e:2x4", 6, 3, 96), ("v5e:2x2", 2, 1, 256), ("v6e:2x2", 40, 8, 128)],
)
def test_our_kernel_takes_any_heads_and_updates_the_pages_in_place(
    topology: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    step, page_bytes = compiled(
        FusedAttention(), topology, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    assert step.memory_analysis().alias_size_in_bytes >= page_bytes
    assert step.memory_analysis().temp_size_in_bytes < page_bytes


@pytest.mark.parametrize(
    ("topology", "num_heads", "num_kv_heads", "head_dim"), [("v5e:2x2", 64, 8, 64), ("v6e:2x2", 6, 3, 96)]
)
def test_our_kernel_takes_sinks_and_windows(topology: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    step, page_bytes = compiled(
        FusedAttention(),
        topology,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sliding_window=128,
        has_sinks=True,
    )
    assert step.memory_analysis().alias_size_in_bytes >= page_bytes


@pytest.mark.parametrize(
    ("kv_dtype", "topology", "num_heads", "num_kv_heads", "head_dim"),
    [
        ("float8_e4m3fn", "v5e:2x2", 8, 2, 128),
        slow("float8_e4m3fn", "v6e:2x2", 6, 3, 96),
        ("float8_e4m3fn", "v6e:2x2", 4, 1, 64),
        slow("int8", "v5e:2x2", 8, 2, 128),
        ("int8", "v5e:4x4", 4, 1, 64),
        ("int8", "v6e:2x2", 6, 3, 96),
        ("int8", "v6e:2x2", 40, 8, 128),
        ("int8", "v6e:1x1", 32, 32, 128),
    ],
)
def test_our_kernel_takes_quantised_pages_windows_caps_and_sinks(
    kv_dtype: str, topology: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    step, page_bytes = compiled(
        FusedAttention(kv_dtype=kv_dtype),
        topology,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=kv_dtype,
        sliding_window=100,
        soft_cap=30.0,
        has_sinks=True,
        has_kv_scales=kv_dtype == KV_SCALES_DTYPE and num_kv_heads > 1,
    )
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes >= page_bytes
    assert memory.argument_size_in_bytes < 1.2 * page_bytes  # nothing of what it holds is padded
    assert memory.temp_size_in_bytes < page_bytes


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "kv_dtype"),
    [(4, 1, 64, "bfloat16"), (6, 3, 96, "float32"), (40, 8, 128, "bfloat16")],
)
def test_the_kernel_of_jax_is_padded_to_what_it_takes(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: str
) -> None:
    step, page_bytes = compiled(
        RaggedKernelAttention(),
        "v6e:2x2",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=kv_dtype,
    )
    assert step.memory_analysis().alias_size_in_bytes >= page_bytes
