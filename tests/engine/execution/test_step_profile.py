"""The step profile, read from a program's text and a trace."""

from __future__ import annotations

import pytest

from benchmarks.parts.step_profile import Event, Kind, Program, kinds_of, summarized

HLO = """HloModule jit_step, is_scheduled=true

ENTRY %main {
  %flat.1 = s32[400]{0} parameter(0), metadata={op_name="flat"}
  %ffi_call.7 = bf16[64,2304]{1,0} custom-call(%a, %b), custom_call_target="matmul", metadata={op_name="jit(step)/x"}
  %ffi_call.8 = (bf16[64,384]{1,0}, f32[9,2]{1,0}) custom-call(%a, %b), custom_call_target="attention", api_version=4
  %add_fusion = f32[64]{0} fusion(%c), kind=kLoop, calls=%f, metadata={op_name="jit(step)/add" stack_frame_id=8}
  %wide_fusion.2 = f32[64]{0} fusion(%c), kind=kLoop, calls=%f, backend_config={"outer_dimension_partitions":["2"]}
  %while.7 = (s32[], f32[2,3]{1,0}) while(%t), condition=%r, body=%s
  ROOT %copy = f32[64]{0} copy(%add_fusion)
}
"""


def test_operations_are_told_apart_by_who_computes_them() -> None:
    found = kinds_of(HLO)
    assert found["ffi_call.7"] == Kind("C++", "matmul to 2304")
    assert found["ffi_call.8"] == Kind("C++", "attention")
    assert found["add_fusion"] == Kind("XLA, one thread", "add")
    assert found["wide_fusion.2"] == Kind("XLA, divided", "wide_fusion")
    assert "while.7" not in found


def test_runs_are_matched_with_dispatches_and_summed_up() -> None:
    small = Program("16 tokens", "jit_step", {"mul": Kind("C++", "matmul"), "add": Kind("XLA, one thread", "add")})
    large = Program("64 tokens", "jit_step", {"mul": Kind("C++", "matmul")})
    events = [
        Event("jit_step", (1, 20), "mul", 1000, 600),  # the second dispatch, whatever its ids are
        Event("jit_step", (2, 10), "mul", 0, 200),
        Event("jit_step", (2, 10), "add", 200, 200),
        Event("jit_step", (2, 10), "while.7", 0, 900),
        Event("jit_other", (3, 1), "mul", 0, 5000),
    ]
    profile = summarized(events, [small, large])
    assert [(row["program"], row["runs"], row["share"]) for row in profile.programs] == [
        ("64 tokens", 1, 0.6),
        ("16 tokens", 1, 0.4),
    ]
    assert [(row["computed by"], row["share"]) for row in profile.places] == [("C++", 0.8), ("XLA, one thread", 0.2)]
    assert profile.operations[0]["calls per step"] == 1
    assert profile.idle_share == pytest.approx(600 / 1600)
