"""Cycles of a layer, parsed from a small text, and those that libtpu's compiler expects of real models."""

from __future__ import annotations

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import deploy
from penstock.engine.models import FAMILIES
from penstock.tools.plan import PRESETS, preset
from penstock.tools.plan.device.attention_schedule import AttentionSchedule
from penstock.tools.plan.device.chips import CHIPS
from penstock.tools.plan.device.cycles import LayerCycles, layer_cycles
from penstock.tools.plan.device.hlo import HloModule
from penstock.tools.plan.device.links import LinkTime
from penstock.tools.plan.device.roofline import all_reduce_s, decode_step, kv_bytes_moved
from penstock.tools.plan.device.topology import devices_of
from tests.engine.planning.plans import plan
from tests.support.needs import needs_libtpu
from tests.support.patience import slow

pytestmark = pytest.mark.versions


def cycles(count: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


TEXT = f"""HloModule step

%product (p0: bf16[8,8], p1: bf16[8,8]) -> bf16[8,8] {{
  %p0 = bf16[8,8]{{1,0}} parameter(0)
  %p1 = bf16[8,8]{{1,0}} parameter(1)
  ROOT %dot = bf16[8,8]{{1,0}} convolution(%p0, %p1), dim_labels=bf_io->bf
}}

%search (i: s32[]) -> s32[] {{
  %i = s32[] parameter(0)
  ROOT %next = s32[] add(%i, %i), {cycles(100)}
}}

%until (j: s32[]) -> pred[] {{
  %j = s32[] parameter(0)
  %five = s32[]{{:T(128)}} constant(5)
  ROOT %less = pred[] compare(%j, %five), direction=LT
}}

%layer (x: bf16[8,8]) -> bf16[8,8] {{
  %x = bf16[8,8]{{1,0}} parameter(0)
  %half = bf16[8,8]{{1,0}} fusion(%x, %x), kind=kOutput, calls=%product, {cycles(1000)}
  %sum = (f32[8]{{0}}, bf16[8,8]{{1,0}}) fusion(%x, %half), kind=kLoop, calls=%other, {cycles(30)}
  %found = s32[] while(%zero), condition=%until, body=%search
  %attended = bf16[8,8]{{1,0}} custom-call(%half), custom_call_target="tpu_custom_call"
  ROOT %all = bf16[8,8]{{1,0}} all-reduce(%attended), to_apply=%add
}}

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {{
  %x = bf16[8,8]{{1,0}} parameter(0)
  %first = s32[] while(%zero), condition=%until, body=%search
  ROOT %last = bf16[8,8]{{1,0}} while(%x), condition=%until, body=%layer
}}
"""


def test_cycles_are_told_apart_by_what_they_are_for() -> None:
    layer = layer_cycles(HloModule(TEXT), cache_bytes=0)
    assert layer == LayerCycles(matmul=1000, rest=30 + 5 * 100, num_rest=1 + 5, num_kernels=1, num_collectives=1)
    assert layer.rest_share == pytest.approx(530 / 1530)


def test_cycles_of_a_program_are_those_of_all_that_runs() -> None:
    """Loops count as often as they run; kernels and collectives have no cycles here."""
    search = 5 * 100
    assert HloModule(TEXT).traffic(cache_bytes=10**6).cycles == search + 5 * (1000 + 30 + search)


def test_a_program_without_a_loop_has_no_layers() -> None:
    text = TEXT.replace("while(%zero), condition=%until, body=%search", "add(%zero, %zero)")
    assert layer_cycles(HloModule(text.replace("while(%x), condition=%until, body=%layer", "negate(%x)")), 0) is None


IN_TWO_PARTS = {("Llama-3.1-8B", 512): 4, ("Llama-3.3-70B", 128): 5, ("Llama-3.3-70B", 512): 4}
"""Steps that overlap all-reduces with computation, with the number of collectives in a layer. One of the four
all-reduces is a scatter and a gather where it is small.
"""


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "topology", "tensor", "size", "most"),
    [
        ("Llama-3.1-8B", "v6e:2x2", 4, 128, 0.15),
        slow("Llama-3.1-8B", "v6e:2x2", 4, 16, 0.15),
        slow("Llama-3.1-8B", "v6e:2x2", 4, 256, 0.15),
        slow("Llama-3.1-8B", "v6e:2x2", 4, 512, 0.19),  # a mixed step, without its attention
        slow("Llama-3.3-70B", "v6e:2x4", 8, 16, 0.15),
        slow("Llama-3.3-70B", "v6e:2x4", 8, 128, 0.15),
        slow("Llama-3.3-70B", "v6e:2x4", 8, 256, 0.15),
        slow("Llama-3.3-70B", "v6e:2x4", 8, 512, 0.19),
    ],
)
def test_what_is_neither_matmul_nor_attention_takes_little(
    name: str, topology: str, tensor: int, size: int, most: float
) -> None:
    model = preset(name)
    assert model is not None
    config = EngineConfig(max_num_seqs=256, max_batch_tokens=512, max_model_len=8192, tensor_parallel=tensor)
    (bucket,) = (bucket for bucket in plan(model, topology, config, only=frozenset({size})).buckets if bucket.layer)
    assert bucket.layer is not None
    assert bucket.layer.rest_share <= most
    sum_bytes = size * model.hidden_size * 2
    assert (bucket.layer.num_kernels, bucket.layer.num_collectives) == (1, IN_TWO_PARTS.get((name, size), 2))
    assert bucket.links is not None
    embedded_s = all_reduce_s(sum_bytes, tensor, CHIPS["v6e"])  # behind the embedding, where nothing else is to be done
    of_layers = LinkTime(bucket.links.seconds - embedded_s, bucket.links.waited_s - embedded_s)
    if (name, size) in IN_TWO_PARTS:
        assert of_layers.hidden_share > 0.5
    else:
        assert of_layers.hidden_share == pytest.approx(0, abs=1e-6)


def test_what_the_compiler_does_not_know_counts_its_bytes_and_no_cycles() -> None:
    """Libtpu writes the largest number for what it gives to SparseCores, and nothing for sorts."""
    text = f"""HloModule step

ENTRY %main (x: f32[8,128]) -> f32[8,128] {{
  %x = f32[8,128]{{1,0}} parameter(0)
  %known = f32[8,128]{{1,0}} add(%x, %x), {cycles(700)}
  %unknown = f32[8,128]{{1,0}} fusion(%known), kind=kCustom, calls=%gather, {cycles(2**63 - 1)}
  %ahead = (f32[8,128]{{1,0}}, f32[8,128]{{1,0}}, u32[]) copy-start(%x)
  ROOT %sorted = f32[8,128]{{1,0}} sort(%unknown), dimensions={{1}}, to_apply=%less
}}
"""
    traffic = HloModule(text).traffic(10**9)
    assert (traffic.cycles, traffic.kernel_bytes) == (700, 2 * 2 * 8 * 128 * 4)


def test_matmuls_with_int8_weights_count_their_bytes_as_the_kernels_of_other_formats_do() -> None:
    text = TEXT.replace("%x = bf16[8,8]", "%x = s8[8,8]")
    assert HloModule(text).traffic(10**6).cycles == HloModule(TEXT).traffic(10**6).cycles - 5 * 1000
    moved = 5 * (2 * 8 * 8 + 2 * 8 * 8)  # both operands of each, and the result
    kernels = HloModule(text).traffic(10**6).kernel_bytes - HloModule(TEXT).traffic(10**6).kernel_bytes
    assert kernels == moved


@pytest.mark.parametrize(
    ("choice", "times"), [({}, 0), ({"dearest": True}, 1), ({"dearest": True, "longest": True}, 5)]
)
def test_a_loop_over_rows_that_ask_runs_never_once_or_for_all(choice: dict[str, bool], times: int) -> None:
    text = f"""HloModule step

%until (s: (s32[], s32[])) -> pred[] {{
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %five = s32[]{{:T(128)}} constant(5)
  %asked = pred[] compare(%i, %n), direction=LT
  %bound = pred[] compare(%i, %five), direction=LT
  ROOT %both = pred[] and(%asked, %bound)
}}

%body (t: (s32[], s32[])) -> (s32[], s32[]) {{
  %t = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %m = s32[] get-tuple-element(%t), index=1
  %next = s32[] add(%j, %j), {cycles(100)}
  ROOT %u = (s32[], s32[]) tuple(%next, %m)
}}

ENTRY %main (x: (s32[], s32[])) -> (s32[], s32[]) {{
  %x = (s32[], s32[]) parameter(0)
  ROOT %last = (s32[], s32[]) while(%x), condition=%until, body=%body
}}
"""
    assert HloModule(text).traffic(10**9, **choice).cycles == times * 100


@needs_libtpu
def test_a_step_is_expected_to_take_longer_than_its_roofline_and_not_twice_as_long() -> None:
    """In a decode step weights and pages come from HBM: the compiler expects matmuls to have most of its bandwidth.

    The step of the largest bucket has the same function, and is that of a prompt.
    """
    fields = {**PRESETS["Llama-3.1-8B"], "vocab_size": 32768, "num_hidden_layers": 4}
    config = EngineConfig(max_num_seqs=16, max_batch_tokens=16, max_model_len=2048, tensor_parallel=4)
    made = plan(FAMILIES["llama"].config(fields, "bfloat16"), "v6e:2x2", config)
    backbone, head, _ = (bucket.traffic for bucket in made.buckets)
    layer = made.buckets[0].layer
    assert layer is not None
    assert 4 * (layer.matmul + layer.rest) < backbone.cycles < 5 * (layer.matmul + layer.rest)
    for step in (*made.decode, made.prefill):
        of = step.time
        assert of.xla_s == pytest.approx((backbone.cycles + head.cycles) / CHIPS["v6e"].clock_hz)
        assert of.compute_s < of.memory_s < of.xla_s + of.kernels_s < 2 * of.memory_s
        assert step.seconds == of.xla_s + of.kernels_s + of.collective_s
    deployment = deploy(config, made.model, devices_of("v6e:2x2"))
    pages = 16 * kv_bytes_moved(deployment, 1024)
    work = AttentionSchedule(deployment, CHIPS["v6e"]).work([(1024, 1)] * 16, pages, 0.0)
    attention = next(kernel for kernel in made.decode[-1].kernels if kernel.name == "attention")
    assert attention.seconds(CHIPS["v6e"]) == work.seconds(CHIPS["v6e"])
    assert made.decode[-1].time.kernels_s == sum(each.seconds(CHIPS["v6e"]) for each in made.decode[-1].kernels)


@needs_libtpu
@pytest.mark.parametrize("batch", [slow(1), slow(16), slow(64), slow(256)])
def test_a_decode_step_moves_few_bytes_at_every_context(batch: int) -> None:
    """Short sequences, whose last tile is mostly empty, are no exception."""
    model = preset("Llama-3.1-8B")
    assert model is not None
    config = EngineConfig(max_num_seqs=max(16, batch), max_model_len=8192, tensor_parallel=4)
    made = plan(model, "v6e:2x2", config, only=frozenset({max(16, batch)}))
    backbone, head = (
        next(bucket.traffic for bucket in made.buckets if bucket.kind == kind) for kind in ("backbone", "head")
    )
    deployment = deploy(config, model, devices_of("v6e:2x2"))
    for context in (64, 65, 100, 520, 1000):
        assert decode_step(deployment, CHIPS["v6e"], batch, context, backbone, head).overhead <= 1.10
