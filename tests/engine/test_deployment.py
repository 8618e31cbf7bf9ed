"""Model, settings and devices determine a deployment before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine import ConfigError, EngineConfig
from penstock.engine.attention.fused import FusedAttention
from penstock.engine.deployment.cache_sizes import sized, with_pages
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.formats.packing import Packing
from penstock.engine.models import ModelConfig
from penstock.engine.stats import DeviceMemory
from tests.engine.engines import TINY


def deployed(**settings: Any) -> Deployment:
    return deploy(EngineConfig(**{"max_num_seqs": 4, "attention": "xla", "matmul": "xla", **settings}), TINY)


HELD = {"int8": Packing("int8", 0), "int4": Packing("int4", 32), "fp8": Packing("fp8", 128, rows=128)}


def holding(*codes: str) -> ModelConfig:
    """Returns a model with a matmul of each of these codes in every layer."""
    packed = tuple(((f"matmul{i}",), HELD[code]) for i, code in enumerate(codes))
    return replace(TINY, blocks=tuple(replace(block, packed=packed) for block in TINY.blocks))


def test_activations_are_quantized_where_weights_are_integers() -> None:
    config = EngineConfig(attention="xla", matmul="xla", activations="int8")
    for block in deploy(config, holding("int8", "int4", "fp8")).model.blocks:
        assert [packing.has_int8_activations for _, packing in block.packed] == [True, True, False]
    as_stored = deploy(replace(config, activations="auto"), holding("int8", "int4")).model
    assert not any(packing.has_int8_activations for block in as_stored.blocks for _, packing in block.packed)


@pytest.mark.parametrize(("codes", "held"), [((), "float32"), (("fp8",), "fp8")])
def test_activations_in_int8_need_weights_that_are_integers(codes: tuple[str, ...], held: str) -> None:
    config = EngineConfig(attention="xla", matmul="xla", activations="int8")
    with pytest.raises(
        ConfigError, match=f"activations = int8 is for weights in int8 or int4, and these are in {held}$"
    ):
        deploy(config, holding(*codes))


def test_a_page_has_the_bytes_of_its_tokens_in_all_layers() -> None:
    assert deployed(page_size=8).page_bytes == 8 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, head_dim, f32
    assert deployed(page_size=8, kv_cache_dtype="float8_e4m3fn").page_bytes == 8 * 3 * 2 * 2 * (16 + 4)


def test_pages_are_as_many_as_are_set_or_as_memory_holds_but_no_more_than_can_be_of_use() -> None:
    small = deployed(page_size=8)
    assert with_pages(deployed(page_size=8, num_pages=7), 0).num_pages == 7
    assert with_pages(small, 10 * small.page_bytes + 1).num_pages == 10
    assert with_pages(deployed(page_size=8, kv_cache_bytes=5 * small.page_bytes), 2**40).num_pages == 5
    assert with_pages(small, 2**40).num_pages == 4 * 15 + 1  # four sequences of 120 tokens, and the sink


def test_a_cache_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="the KV cache holds 0 pages of 12288 bytes, and needs 2 at least"):
        with_pages(deployed(page_size=16, kv_cache_bytes=100), 0)


def test_what_sampling_remembers_is_not_free_for_pages() -> None:
    here = deployed()
    assert here.sampling_bytes == 4 * -(-TINY.vocab_size // 128) * 128 * (
        4 + 4
    )  # batch slots, tokens in whole tiles, a word and a bias
    stats = {"bytes_limit": 10_000_000, "bytes_in_use": 5_000_000}
    device: Any = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    assert replace(here, devices=(device,)).free_bytes() == int((5_000_000 - here.sampling_bytes) * 0.9)
    stats["bytes_in_use"] = 9_999_999
    assert replace(here, devices=(device,)).free_bytes() == 0


def test_more_pages_than_a_device_has_left_are_refused_by_their_number() -> None:
    stats = {"bytes_limit": 10_000_000, "bytes_in_use": 5_000_000}
    device: Any = SimpleNamespace(
        id=0, process_index=0, platform="tpu", device_kind="TPU v5e", memory_stats=lambda: stats
    )
    fitting = 5_000_000 // deployed().page_bytes
    assert sized(replace(deployed(num_pages=fitting), devices=(device,))).counts == (fitting,)
    message = f"the weights leave 5000000 of the 10000000 that a TPU v5e device has: set num_pages {fitting} or less"
    with pytest.raises(ConfigError, match=message):
        sized(replace(deployed(num_pages=fitting + 1), devices=(device,)))


def test_memory_is_told_of_devices_of_this_process_that_count_it() -> None:
    def device(number: int, process: int = 0, **stats: int) -> Any:
        return SimpleNamespace(id=number, process_index=process, memory_stats=lambda: stats or None)

    devices = (
        device(0, bytes_in_use=3, peak_bytes_in_use=5, bytes_limit=9),
        device(1, bytes_in_use=4, bytes_limit=9),
        device(2, process=1, bytes_in_use=4, bytes_limit=9),
        device(3),
    )
    assert replace(deployed(), devices=devices).device_memory() == (DeviceMemory(0, 3, 5, 9), DeviceMemory(1, 4, 4, 9))
    assert deployed().device_memory() == ()  # a CPU


def test_what_the_largest_head_needs_is_not_for_pages() -> None:
    here = deployed()
    head = 7 * 16 * TINY.vocab_size * 4
    assert here.logits_bytes == head
    assert here.kv_bytes(here.sampling_bytes + 2 * head) == head
    assert here.kv_bytes(here.sampling_bytes + head - 1) == 0


def test_lengths_come_from_the_settings_or_the_model() -> None:
    assert deployed().max_model_len == 120
    assert deployed(max_model_len=50).max_model_len == 50
    assert deployed(max_model_len=50).geometry(40).pages_per_seq == 2  # as many as the pages allow


@pytest.mark.parametrize(("more", "exceeded"), [(0, False), (1, True)])
def test_a_length_above_the_models_own_is_told(more: int, exceeded: bool) -> None:
    own = TINY.max_position
    deployment = deployed(max_model_len=own + more)
    info = deployment.describe(with_pages(deployment, 2**24))
    assert info.exceeded_len == (own if exceeded else None)


@pytest.mark.parametrize(("head_dim", "padding"), [(64, 0.0), (80, 0.375), (96, 0.25), (128, 0.0)])
def test_padding_of_heads_to_a_tpus_tiles_is_told(head_dim: int, padding: float) -> None:
    here = deployed()
    wide = replace(here.model, blocks=tuple(block.with_attention(head_dim=head_dim) for block in here.model.blocks))
    on_tpu = replace(here, model=wide, attention=FusedAttention(), kv_dtype="bfloat16", page_size=64)
    assert on_tpu.page_padding == padding
    assert on_tpu.describe(with_pages(on_tpu, 2**24)).page_padding == padding
    assert replace(on_tpu, attention=here.attention).page_padding == 0


def test_on_tpu_a_dispatch_holds_one_step_unless_set() -> None:
    here = deployed()
    tpu: Any = SimpleNamespace(platform="tpu")
    on_tpu = replace(here, devices=(tpu,))
    off, four = EngineConfig(same_tokens=False), EngineConfig(decode_steps=4)
    measured = [here.decode_steps(is_invariant=True), replace(here, config=off).decode_steps(is_invariant=False)]
    assert measured == [None, None]
    assert here.decode_steps(is_invariant=False) == 1
    for is_invariant in (True, False):
        assert replace(on_tpu, config=off).decode_steps(is_invariant=is_invariant) == 1
        assert replace(on_tpu, config=four).decode_steps(is_invariant=is_invariant) == 4


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel = 64, and there are \d+ cpu devices"):
        deploy(EngineConfig(tensor_parallel=64, max_num_seqs=4), TINY)


def test_native_matmuls_are_refused_where_the_kernel_cannot_compute_them() -> None:
    with pytest.raises(ConfigError, match=r"matmul 'native' is for one CPU device .* not for bfloat16 on 1 cpu"):
        deploy(EngineConfig(matmul="native", attention="xla"), replace(TINY, dtype="bfloat16", hidden_size=63))


def test_what_auto_takes_is_named_and_what_it_misses_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    here = deployed(attention="auto", matmul="auto", compile_cache_dir=tmp_path)
    assert (here.attention.name, here.matmul) == ("xla", "xla")
    assert here.fallback == "there is no C++ compiler (c++, g++ or clang++) on PATH"
    assert deployed().fallback is None  # nothing was asked for
