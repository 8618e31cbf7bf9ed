"""The planner's arithmetic by hand, its parser of HLO on a small text, and one plan compiled for a real topology."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.attention import check_page_table, page_size_for
from penstock.engine.attention.selection import SMEM_BYTES, page_table_bytes
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.formats.kv_cache import KVCacheScheme
from penstock.engine.loading.kv_scales import with_kv_scales
from penstock.engine.models import FAMILIES, ModelConfig, active_parameters, matmul_parameters
from penstock.engine.models.hf.blocks import sliding
from penstock.tools.plan import ALL_OPTIONS, PRESETS, as_dict, planned_model, preset
from penstock.tools.plan.device.chips import CHIPS
from penstock.tools.plan.device.hlo import HloModule, Traffic
from penstock.tools.plan.device.kernel_work import KernelWork, Load
from penstock.tools.plan.device.roofline import Programs, StepWork, collective_s, kv_token_bytes, step_flops
from penstock.tools.plan.device.topology import devices_of
from tests.engine.planning.plans import plan
from tests.support.needs import needs_libtpu
from tests.support.patience import slow

HLO = """HloModule step, is_scheduled=true

%taken (p0: bf16[4,256,128], p1: s32[]) -> bf16[256,128] {
  %p0 = bf16[4,256,128]{2,1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %row = bf16[1,256,128]{2,1,0:T(8,128)} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,256,128}
  ROOT %view = bf16[256,128]{1,0:T(8,128)S(1)} bitcast(%row)
}

%put (p0: f32[1000,128], p1: s32[8], p2: f32[8,128]) -> f32[1000,128] {
  %p0 = f32[1000,128]{1,0} parameter(0)
  %p1 = s32[8]{0} parameter(1)
  %p2 = f32[8,128]{1,0} parameter(2)
  ROOT %scatter = f32[1000,128]{1,0} scatter(%p0, %p1, %p2), to_apply=%sum
}

%body (state: (s32[], bf16[4,256,128], f32[1000,128], f32[8,128])) -> (s32[], bf16[4,256,128], f32[1000,128], f32[8,128]) {
  %state = (s32[]{:T(128)}, bf16[4,256,128]{2,1,0}, f32[1000,128]{1,0}, f32[8,128]{1,0}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%state), index=0
  %weights = bf16[4,256,128]{2,1,0} get-tuple-element(%state), index=1
  %cache = f32[1000,128]{1,0} get-tuple-element(%state), index=2
  %x = f32[8,128]{1,0} get-tuple-element(%state), index=3
  %layer = bf16[256,128]{1,0:T(8,128)S(1)} fusion(%weights, %i), kind=kLoop, calls=%taken
  %places = s32[8]{0:S(1)} iota(), iota_dimension=0
  %written = f32[1000,128]{1,0} fusion(%cache, %places, %x), kind=kCustom, calls=%put
  %sum.1 = f32[8,128]{1,0:S(1)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%sum
  %more = f32[8,128]{1,0} add(%x, %sum.1)
  ROOT %out = (s32[]{:T(128)}, bf16[4,256,128]{2,1,0}, f32[1000,128]{1,0}, f32[8,128]{1,0}) tuple(%i, %weights, %written, %more)
}

%until (state.1: (s32[], bf16[4,256,128], f32[1000,128], f32[8,128])) -> pred[] {
  %four = s32[]{:T(128)} constant(4)
  %state.1 = (s32[]{:T(128)}, bf16[4,256,128]{2,1,0}, f32[1000,128]{1,0}, f32[8,128]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %four), direction=LT
}

ENTRY %main (a: bf16[4,256,128], b: f32[1000,128], c: f32[8,128]) -> f32[1000,128] {
  %a = bf16[4,256,128]{2,1,0} parameter(0)
  %b = f32[1000,128]{1,0} parameter(1)
  %c = f32[8,128]{1,0} parameter(2)
  %start = s32[]{:T(128)S(6)} constant(0)
  %all = (s32[]{:T(128)}, bf16[4,256,128]{2,1,0}, f32[1000,128]{1,0}, f32[8,128]{1,0}) tuple(%start, %a, %b, %c)
  %loop = (s32[]{:T(128)}, bf16[4,256,128]{2,1,0}, f32[1000,128]{1,0}, f32[8,128]{1,0}) while(%all), condition=%until, body=%body
  %result = f32[1000,128]{1,0} get-tuple-element(%loop), index=2
  ROOT %copied = f32[1000,128]{1,0} copy(%result)
}
"""  # noqa: E501 -- HLO has long lines


def llama_8b() -> ModelConfig:
    model = preset("Llama-3.1-8B")
    assert model is not None
    return model


def narrow_llama(num_layers: int = 4) -> ModelConfig:
    """Returns a model with a narrow feed-forward and a small vocabulary."""
    sizes = {"vocab_size": 1024, "intermediate_size": 4096, "num_hidden_layers": num_layers}
    return FAMILIES["llama"].config({**PRESETS["Llama-3.1-8B"], **sizes}, "bfloat16")


def logits_bytes(model: ModelConfig) -> int:
    """Returns the most bytes of f32 logits that a greedy step of 16 rows moves.

    They are next to nothing beside the weights of a real model, and a quarter of those of a small one over many
    devices.
    """
    return 5 * 16 * model.vocab_size * 4


def test_bytes_are_counted_from_hbm_operands_as_often_as_they_move() -> None:
    traffic = HloModule(HLO).traffic(cache_bytes=1000 * 128 * 4)
    layer, x = 256 * 128 * 2, 8 * 128 * 4
    turn_reads = layer + x + x + x  # the layer's slice, the update, the reduced, the added
    turn_writes = x + x  # the update in place, the sum
    cache = 1000 * 128 * 4
    assert traffic.read_bytes == 4 * turn_reads + cache
    assert traffic.written_bytes == 4 * turn_writes + cache
    assert traffic.collectives == {"all-reduce": 4}
    assert traffic.cache_copies == 1  # the one that the text ends with
    assert HloModule(HLO).loop_traffic(cache)[0].collectives == {"all-reduce": 1}


def test_a_slice_that_is_prefetched_is_read_once() -> None:
    text = """ENTRY %main (a: f32[4,1024]) -> f32[1,1024] {
  %a = f32[4,1024]{1,0} parameter(0)
  %slice-start = ((f32[4,1024]{1,0}), f32[1,1024]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:1], [0:1024]}
  %slice-done = f32[1,1024]{1,0:S(1)} slice-done(%slice-start)
  ROOT %out = f32[1,1024]{1,0} negate(%slice-done)
}
"""
    traffic = HloModule(text).traffic(cache_bytes=0)
    assert (traffic.read_bytes, traffic.written_bytes) == (4096, 4096)


def test_a_slice_of_what_a_fusion_lays_out_anew_is_a_slice() -> None:
    text = """%other_layout (q0: u8[12,64,128]) -> u8[12,64,128] {
  %q0 = u8[12,64,128]{2,1,0:T(32,128)} parameter(0)
  ROOT %copied = u8[12,64,128]{2,1,0:T(8,128)} copy(%q0)
}

%one (p0: u8[12,64,128], p1: s32[]) -> u8[1,64,128] {
  %p0 = u8[12,64,128]{2,1,0:T(32,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %again = u8[12,64,128]{2,1,0:T(8,128)} fusion(%p0), kind=kLoop, calls=%other_layout
  ROOT %row = u8[1,64,128]{2,1,0:T(8,128)S(1)} dynamic-slice(%again, %p1, %zero, %zero), dynamic_slice_sizes={1,64,128}
}

ENTRY %main (a: u8[12,64,128], b: s32[]) -> u8[1,64,128] {
  %a = u8[12,64,128]{2,1,0} parameter(0)
  %b = s32[]{:S(6)} parameter(1)
  ROOT %layer = u8[1,64,128]{2,1,0:S(1)} fusion(%a, %b), kind=kLoop, calls=%one
}
"""
    assert HloModule(text).traffic(cache_bytes=0).hbm_bytes == 64 * 128


def test_the_experts_of_a_grouped_matmul_are_left_to_the_planner() -> None:
    text = """ENTRY %main (rows: bf16[8,64], all: bf16[96,64,128]) -> f32[8,128] {
  %sizes = s32[97]{0:S(1)} parameter(0)
  %rows = bf16[8,64]{1,0} parameter(1)
  %all = bf16[96,64,128]{2,1,0} parameter(2)
  ROOT %ragged-dot-none = f32[8,128]{1,0:S(1)} custom-call(%sizes, %rows, %all), custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="8,64,128"}
}
"""  # noqa: E501
    traffic = HloModule(text).traffic(cache_bytes=10**9)
    assert (traffic.read_bytes, traffic.written_bytes, traffic.grouped_matmuls) == (8 * 64 * 2, 0, 1)


def test_presets_have_the_published_numbers_of_parameters() -> None:
    billions = {}
    for name in PRESETS:
        model = preset(name.lower())
        assert model is not None
        tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
        billions[name] = round((matmul_parameters(model) + tables) / 1e9, 2)
    assert billions == {
        "Qwen3-0.6B": 0.6,
        "Llama-3.1-8B": 8.03,
        "Qwen3-32B": 32.76,
        "Qwen3-30B-A3B": 30.53,
        "Mixtral-8x7B": 46.7,
        "Gemma-3-27B": 27.01,
        "Qwen3.6-27B": 26.89,
        "Qwen3.6-35B-A3B": 34.66,
        "Gemma-4-31B": 30.70,
        "Gemma-4-26B-A4B": 25.23,
        "Llama-3.3-70B": 70.55,
        "gpt-oss-20b": 20.91,
        "gpt-oss-120b": 116.79,
    }


def test_the_roofline_of_a_step_by_hand() -> None:
    model = llama_8b()
    assert kv_token_bytes(model, "bfloat16") == 2 * 32 * 8 * 128 * 2
    assert matmul_parameters(model) == 32 * (4096 * (32 * 128 + 2 * 8 * 128 + 32 * 128) + 3 * 4096 * 14336)
    matmuls = 2 * (matmul_parameters(model) + 128256 * 4096) * 64
    assert step_flops(model, 64, 64, 64 * 1000) == matmuls + 4 * 32 * 32 * 128 * 64 * 1000
    one = 2 * 3 / 4 * (64 * 4096 * 2) / (2 * 9.0e10) + 2 * 3 * 1e-6
    assert collective_s(model, 64, 4, CHIPS["v6e"]) == pytest.approx(65 * one)
    assert collective_s(model, 64, 1, CHIPS["v6e"]) == 0


def test_clocks_are_those_at_which_the_matrix_units_have_their_peak() -> None:
    assert {name: round(chip.clock_hz / 1e9, 2) for name, chip in CHIPS.items()} == {
        "v5e": 1.50, "v6e": 1.75, "tpu7x": 2.20,
    }  # fmt: skip


def test_a_step_takes_the_longer_of_its_roofline_and_of_cycles_and_kernels() -> None:
    """On v6e, 1.64 MB take a microsecond, as do 918 MFLOP; 1,751 cycles take 1.00003 microseconds."""
    chip = CHIPS["v6e"]
    cycle_us = 1e6 / chip.clock_hz
    backbone = Traffic(read_bytes=1_640_000, kernel_bytes=820_000, kernel_flops=918_000_000, cycles=1_000)
    head = Traffic(written_bytes=1_640_000, cycles=751)

    def us(backbone: Traffic, head: Traffic, flops: float = 0.0, num_steps: int = 1) -> float:
        work = StepWork(
            programs=Programs.of((backbone, head), 820_000, chip, Load(1, 1, is_drawn=False), num_steps),
            attention=KernelWork(1_640_000, 2 * 918e6),  # by FLOPs
            experts=KernelWork(3_280_000, 1e6),  # by bytes
            flops=flops,
            collective_s=5e-6,
        )
        return 1e6 * work.time(chip).seconds

    assert us(backbone, head) == pytest.approx(1_751 * cycle_us + 1 + 2 + 2 + 5)
    assert us(backbone, head, num_steps=2) == pytest.approx((1_751 * cycle_us + 1) / 2 + 2 + 2 + 5)
    assert us(backbone, head, flops=7 * 918e6) == pytest.approx(7 + 5)
    silent = replace(head, cycles=0)  # the backbone's cycles alone say nothing of a step
    assert us(backbone, silent) == pytest.approx(1 + 1 + 1 + 2 + 5)
    assert us(backbone, Traffic()) == pytest.approx(0.5 + 1 + 2 + 5)  # one was not printed: the weights


def test_the_flops_of_experts_are_counted_by_hand() -> None:
    model = preset("qwen3-30b-a3b")
    assert model is not None
    attention, router, expert = 2048 * (2 * 32 + 2 * 4) * 128, 2048 * 128, 3 * 2048 * 768
    head = 151936 * 2048
    of_one = 48 * (attention + router + 8 * expert)
    assert step_flops(model, 1, 1, 0) == 2 * (of_one + head)
    assert step_flops(model, 4, 4, 0) == 4 * step_flops(model, 1, 1, 0)
    assert round(active_parameters(model) / 1e9, 2) == 3.35


def test_page_tables_follow_the_rule_of_scalar_memory() -> None:
    assert page_table_bytes(256, 1024) > SMEM_BYTES  # does not compile
    check_page_table(max_num_seqs=64, max_model_len=64 * 2048, page_size=64)
    with pytest.raises(ConfigError, match=r"max_num_seqs 256 x 1024 pages .* raise page_size"):
        check_page_table(max_num_seqs=256, max_model_len=16384, page_size=16)
    assert page_size_for("cpu", max_num_seqs=256, max_model_len=131072) == 32
    assert page_size_for("tpu", max_num_seqs=16, max_model_len=2048) == 64
    assert page_size_for("tpu", max_num_seqs=16, max_model_len=2048, kv_dtype="int8") == 128
    assert page_size_for("tpu", max_num_seqs=16, max_model_len=2048, kv_dtype="float8_e4m3fn") == 128
    size = page_size_for("tpu", max_num_seqs=256, max_model_len=131072)
    check_page_table(max_num_seqs=256, max_model_len=131072, page_size=size)
    assert size == 256


def test_a_model_is_planned_from_a_config_alone_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "anything.json"
    path.write_text(json.dumps({**PRESETS["Qwen3-32B"], "architectures": ["Qwen3ForCausalLM"]}))
    assert planned_model(str(path)) == preset("qwen3-32b")
    with pytest.raises(ConfigError, match=r"'gpt-5' is not a preset \(Qwen3-0.6B"):
        planned_model("gpt-5")
    with pytest.raises(ConfigError, match="'h100:8' names no known chip"):
        plan(llama_8b(), "h100:8", EngineConfig())


def test_without_libtpu_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tools.plan.device.topology.has_libtpu", lambda: False)
    with pytest.raises(ConfigError, match=r"libtpu, which is not installed here .*: pip install"):
        plan(llama_8b(), "v5e:2x2", EngineConfig())


SMALL = EngineConfig(max_num_seqs=16, max_batch_tokens=16, max_model_len=2048, tensor_parallel=4)


@needs_libtpu
@pytest.mark.slow
def test_what_was_learnt_of_a_function_is_kept(tmp_path: Path) -> None:
    """Only the same function reads it again: another model's are compiled."""
    config = replace(SMALL, compile_cache_dir=tmp_path)
    first, again = (plan(narrow_llama(), "v6e:2x2", config) for _ in range(2))
    assert not any(bucket.is_kept for bucket in first.buckets)
    assert all(bucket.is_kept for bucket in again.buckets)
    assert [replace(bucket, is_kept=False) for bucket in again.buckets] == list(first.buckets)
    assert again.decode == first.decode
    for path in (tmp_path / "plans").iterdir():
        path.write_text("{")
    assert not any(bucket.is_kept for bucket in plan(narrow_llama(), "v6e:2x2", config).buckets)
    model = replace(narrow_llama(), vocab_size=2048)
    assert {bucket.kind: bucket.is_kept for bucket in plan(model, "v6e:2x2", config).buckets} == {
        "backbone": False, "head": False, ALL_OPTIONS: False,
    }  # fmt: skip


@needs_libtpu
@pytest.mark.slow
def test_every_kind_of_head_is_counted_and_filters_cost_little() -> None:
    made = plan(llama_8b(), "v6e:2x2", replace(SMALL, max_num_seqs=64, max_batch_tokens=64), only=frozenset({64}))
    head = next(bucket for bucket in made.buckets if bucket.kind == "head")
    everything = next(bucket for bucket in made.buckets if bucket.kind == ALL_OPTIONS)
    assert head.traffic.hbm_bytes >= 2 * 4096 * 128256 // 4
    assert head.full_traffic.hbm_bytes <= 1.3 * head.traffic.hbm_bytes
    assert head.full_traffic.collectives["all-to-all"] == 1
    assert everything.full_traffic.hbm_bytes > everything.traffic.hbm_bytes > 0
    greedy, filtered, one_asks, all_ask = (
        next(step for step in steps if step.num_tokens == 64)
        for steps in (made.decode, made.decode_filtered, made.decode_one_asks, made.decode_all_options)
    )
    assert greedy.seconds < filtered.seconds < 1.1 * greedy.seconds
    assert filtered.time.collective_s - greedy.time.collective_s == pytest.approx(64 * 128256 / (2 * 9.0e10), rel=0.5)
    assert filtered.counted_bytes < one_asks.counted_bytes < all_ask.counted_bytes


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "topology", "tensor"),
    [
        ("Qwen3-0.6B", "v6e:2x2", 1),
        slow("Qwen3-0.6B", "v5e:2x2", 1),
        slow("Llama-3.1-8B", "v6e:2x2", 4),
        slow("Gemma-4-31B", "v6e:2x2", 4),
    ],
)
def test_rows_with_options_cost_a_step_little(name: str, topology: str, tensor: int) -> None:
    """Beside more bytes it is a second draw, of the rows that ask."""
    model = preset(name)
    assert model is not None
    config = replace(SMALL, max_num_seqs=32, max_batch_tokens=32, tensor_parallel=tensor)
    made = plan(model, topology, config)
    for filtered, one_asks, all_ask in zip(
        made.decode_filtered, made.decode_one_asks, made.decode_all_options, strict=True
    ):
        assert one_asks.seconds <= 1.1 * filtered.seconds
        assert all_ask.seconds <= 1.25 * filtered.seconds
    assert {step.num_tokens for step in made.decode_one_asks} == {1, 32}


@needs_libtpu
def test_what_no_worker_could_serve_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"1000000 pages take \d+ bytes, and the weights leave \d+ .* set num_pages \d+"
    ):
        plan(narrow_llama(), "v6e:2x2", replace(SMALL, num_pages=1_000_000))
    with pytest.raises(ConfigError, match=r"v5e:4x4 is 4 hosts of 4 devices each, and tensor_parallel = 8 would"):
        plan(llama_8b(), "v5e:4x4", replace(SMALL, tensor_parallel=8))
    with pytest.raises(ConfigError, match=r"context 2048 leaves no room .* the longest sequence here has 2048 tokens"):
        plan(narrow_llama(), "v6e:2x2", SMALL, context=2048)


@needs_libtpu
@pytest.mark.slow
def test_a_function_that_does_not_fit_beside_the_pages_is_refused_with_what_would() -> None:
    """The compiler sees no pages when it compiles the head."""
    small = plan(narrow_llama(), "v6e:2x2", SMALL)
    free, page = CHIPS["v6e"].hbm_bytes - small.weight_bytes, small.page_bytes
    with pytest.raises(
        ConfigError, match=r"the .* of 16 \d+, programs \d+; set num_pages (\d+), or a lower max_num"
    ) as e:
        plan(narrow_llama(), "v6e:2x2", replace(SMALL, num_pages=free // page))
    most = int(str(e.value).split("num_pages ")[1].split(",")[0])
    made = plan(narrow_llama(), "v6e:2x2", replace(SMALL, num_pages=most))
    assert 0 <= made.spare_bytes < 2 * page
    assert made.used_bytes == sum(as_dict(made)["hbm"][part] for part in HBM_PARTS) <= made.chip.hbm_bytes


HBM_PARTS = ("weights", "lane_padding", "pages", "sampling", "temporaries", "programs")


@needs_libtpu
def test_a_model_without_a_loop_over_layers_is_planned_too() -> None:
    made = plan(narrow_llama(1), "v6e:2x2", SMALL, only=frozenset({16}))
    assert [bucket.layer for bucket in made.buckets] == [None] * 3
    assert made.decode


@needs_libtpu
@pytest.mark.slow
def test_states_are_counted_and_updated_where_they_are() -> None:
    fields = {"hidden_size": 512, "num_hidden_layers": 5, "layer_types": ["conv", "full_attention"] * 2 + ["conv"]}
    model = FAMILIES["lfm2"].config({**fields, "num_attention_heads": 8, "num_key_value_heads": 8}, "bfloat16")
    made = plan(model, "v6e:2x2", replace(SMALL, tensor_parallel=2), only=frozenset({16}))
    assert made.slot_bytes == 3 * 2 * 512 * 2 // 2
    assert made.num_states > SMALL.max_num_seqs
    assert made.cache_is_aliased
    assert made.used_bytes > made.weight_bytes + made.cache_bytes + made.state_bytes
    shown = as_dict(made)
    assert (shown["hbm"]["states"], shown["states"]["count"]) == (made.state_bytes, made.num_states)


@needs_libtpu
@pytest.mark.slow
def test_matrices_of_delta_nets_are_read_and_written_once_in_a_decode_step() -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096}
    fields = {**sizes, **heads, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    model = FAMILIES["qwen3_5_text"].config(fields, "bfloat16")
    made = plan(model, "v6e:2x2", replace(SMALL, tensor_parallel=2), only=frozenset({16}))
    assert made.slot_bytes == 6 * (8 * 128 * 128 * 4 + 3 * (2 * 4 * 128 + 8 * 128) * 2) // 2
    assert made.cache_is_aliased
    moved = next(bucket.traffic for bucket in made.buckets if bucket.kind == "backbone")
    assert moved.kernel_bytes == pytest.approx(2 * 16 * made.slot_bytes, rel=0.01)
    assert (moved.cache_copies, moved.written_bytes < made.slot_bytes) == (0, True)  # beside the kernel


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "tensor", "expert", "num_seqs"),
    [
        ("Qwen3.6-27B", "v6e:2x4", 8, 1, 64),
        ("Qwen3.6-27B", "v5e:2x4", 8, 1, 64),
        ("Qwen3.6-35B-A3B", "v6e:2x2", 2, 2, 32),
        ("Qwen3.6-35B-A3B", "v5e:2x4", 2, 4, 32),
    ],
)
def test_decode_steps_of_qwen3_6_move_their_ideal_bytes(
    name: str, topology: str, tensor: int, expert: int, num_seqs: int
) -> None:
    """The ideal includes states, which a step reads and writes once."""
    model = preset(name)
    assert model is not None
    config = EngineConfig(
        max_num_seqs=num_seqs, max_batch_tokens=num_seqs, max_model_len=4096, tensor_parallel=tensor,
        expert_parallel=expert,
    )  # fmt: skip
    made = plan(model, topology, config, only=frozenset({num_seqs}))
    assert made.cache_is_aliased
    full = next(step for step in made.decode if step.num_tokens == num_seqs)
    assert full.overhead <= 1.15


@needs_libtpu
def test_rows_that_are_padded_at_loading_are_counted() -> None:
    """Rows of 1,440 bytes of 4-bit codes take 1,536."""
    model = planned_model("gpt-oss-20b")
    model = replace(model, blocks=model.blocks[:2])
    made = plan(model, "v6e:2x2", replace(SMALL, tensor_parallel=1, expert_parallel=4), only=frozenset())
    padding = made.lane_padding_bytes / made.weight_bytes
    assert 0.01 < padding < 0.07
    assert as_dict(made)["hbm"]["lane_padding"] == made.lane_padding_bytes


@needs_libtpu
def test_batches_whose_pages_are_not_there_get_no_estimate() -> None:
    made = plan(narrow_llama(), "v6e:2x2", replace(SMALL, num_pages=1 + 5 * 8), context=500, only=frozenset({16}))
    assert [step.num_tokens for step in made.decode] == [1, 5]  # 8 pages of 64 tokens each
    assert made.spare_pages == made.max_pages - made.num_pages


@needs_libtpu
@pytest.mark.parametrize("attention", ["fused", slow("ragged")])
def test_a_small_plan_holds_what_the_ledger_says(attention: str) -> None:
    """In place, two all-reduces per layer, nothing to the host, bytes near the ideal; compiled for four v6e chips."""
    model = narrow_llama(32)
    config = EngineConfig(
        max_num_seqs=16, max_batch_tokens=16, max_model_len=2048, tensor_parallel=4, attention=attention
    )
    made = plan(model, "v6e:2x2", config)
    assert made.cache_is_aliased
    step = next(bucket for bucket in made.buckets if bucket.kind == "backbone")
    assert step.layer_collectives == {"all-reduce": 2}
    assert step.traffic.collectives == {"all-reduce": 2 * model.num_layers + 1}
    assert not any(bucket.traffic.host_transfers for bucket in made.buckets)
    assert made.used_bytes < made.chip.hbm_bytes
    assert made.decode[0].overhead < 1.10
    assert json.loads(json.dumps(as_dict(made)))["pages"]["aliased_and_never_copied"] is True


@needs_libtpu
@pytest.mark.slow
def test_several_decode_steps_and_8_bit_pages_are_planned_and_copy_no_cache() -> None:
    model = narrow_llama()
    config = EngineConfig(
        max_num_seqs=16, max_batch_tokens=16, max_model_len=2048, tensor_parallel=4, num_pages=65, decode_steps=4
    )
    wide = plan(model, "v6e:2x2", config)
    codes = plan(model, "v6e:2x2", replace(config, kv_cache_dtype="int8"))
    calibrated = with_kv_scales(model, FAMILIES[model.family], KVCacheScheme(is_static=True), {})
    floats = plan(calibrated, "v6e:2x2", config)  # as the checkpoint says
    assert floats.kv_dtype == "float8_e4m3fn"
    assert codes.page_bytes * 128 == wide.page_bytes * (128 + 4)  # twice the tokens; head_dim is 128
    assert floats.page_bytes == codes.page_bytes
    for made in (wide, codes, floats):
        assert made.cache_is_aliased
        loop = next(bucket for bucket in made.buckets if bucket.kind == "loop")
        assert loop.layer_collectives == {"all-reduce": 2}
        reduced, exchanged = loop.traffic.collectives["all-reduce"], loop.traffic.collectives["all-to-all"]
        assert reduced <= 4 * (2 * model.num_layers + 1 + 4)  # some of them bring tokens and log-probabilities together
        assert exchanged == 4
        assert not loop.traffic.host_transfers
        assert made.decode[0].overhead < 1.10


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "tensor", "fields"),
    [
        ("v5e:2x4", 8, {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 64}),
        slow("v6e:2x4", 4, {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 96}),
        slow("v5e:2x4", 2, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}),
        slow("v6e:2x2", 4, {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}),
        ("tpu7x:2x2x1", 8, {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}),
        ("v6e:2x2", 4, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 8191}),
    ],
    ids=str,
)
def test_unusual_geometries_hold_it_too(topology: str, tensor: int, fields: dict[str, int], tmp_path: Path) -> None:
    """Among them are one KV head on 8 devices, vocabularies and caches small enough for VMEM, and a vocabulary that the
    devices do not divide.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 3, "vocab_size": 8192}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**PRESETS["Llama-3.1-8B"], **sizes, **fields}))
    config = EngineConfig(
        max_num_seqs=16, max_batch_tokens=16, max_model_len=2048, tensor_parallel=tensor, num_pages=33
    )
    model = planned_model(str(path))
    made = plan(model, topology, config, only=frozenset({16}))
    assert bool(as_dict(made)["hbm"]["vocab_padding"]) == bool(model.vocab_size % (tensor * 128))
    step = made.buckets[0]
    assert made.cache_is_aliased
    assert step.layer_collectives == {"all-reduce": 2}
    assert step.traffic.collectives == {"all-reduce": 7}
    assert step.temporary_bytes < made.weight_bytes / 4  # no second copy of the weights
    assert not any(bucket.traffic.host_transfers for bucket in made.buckets)
    assert made.decode[0].counted_bytes - logits_bytes(model) < 1.10 * made.decode[0].ideal_bytes


@needs_libtpu
def test_layers_that_alternate_are_counted_one_by_one() -> None:
    model = narrow_llama()
    model = replace(model, blocks=tuple(sliding(model.blocks[0], [512, None, 512, None, 512, None])))
    config = EngineConfig(max_num_seqs=16, max_batch_tokens=16, max_model_len=2048, tensor_parallel=4, num_pages=65)
    made = plan(model, "v6e:2x2", config, only=frozenset({16}))
    step = made.buckets[0]
    assert made.cache_is_aliased
    assert step.layer_collectives == {"all-reduce": 2}  # though an iteration of the loop has two layers
    assert step.traffic.collectives == {"all-reduce": 2 * model.num_layers + 1}
    assert made.decode[0].overhead < 1.10


@needs_libtpu
@pytest.mark.parametrize(("topology", "num_devices"), [("v6e:1x1", 1), ("tpu7x:1x1x1", 2), ("v5e:2x4", 8)])
def test_slices_of_one_chip_are_known_too(topology: str, num_devices: int) -> None:
    assert len(devices_of(topology)) == num_devices


@needs_libtpu
def test_experts_are_copied_nowhere() -> None:
    """The experts of three layers are more than VMEM holds of one matrix; those of one layer are more than is fetched
    ahead.
    """
    fields = {
        **PRESETS["Qwen3-30B-A3B"], "num_hidden_layers": 3, "num_experts": 64, "moe_intermediate_size": 1024,
        "vocab_size": 4096,
    }  # fmt: skip
    model = FAMILIES["qwen3_moe"].config(fields, "bfloat16")
    config = EngineConfig(
        max_num_seqs=16, max_batch_tokens=16, max_model_len=2048, tensor_parallel=2, expert_parallel=2, num_pages=33
    )
    made = plan(model, "v6e:2x2", config, only=frozenset({16}))
    step = made.buckets[0]
    assert step.layer_collectives == {"all-reduce": 2}
    assert step.traffic.grouped_matmuls == 3 * model.num_layers
    assert step.temporary_bytes < 32 * 2048 * 512  # half of a matrix of a layer's experts on each device
    for decode in made.decode:  # steps of 1 and 16 tokens, which choose 8 and nearly all of the experts
        assert decode.counted_bytes - logits_bytes(model) < 1.10 * decode.ideal_bytes


@needs_libtpu
def test_what_does_not_fit_is_refused_with_its_numbers() -> None:
    model = preset("Qwen3-32B")
    assert model is not None
    with pytest.raises(ConfigError, match=r"the weights take 65\d+ bytes of the .* v5e device has"):
        plan(model, "v5e:2x2", EngineConfig(max_num_seqs=16, max_model_len=2048))
