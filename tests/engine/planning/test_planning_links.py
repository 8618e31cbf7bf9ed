"""Time that a program waits for its collectives, counted by hand from its text."""

from __future__ import annotations

import pytest

from penstock.tools.plan.device.chips import CHIPS
from penstock.tools.plan.device.hlo import HloModule
from penstock.tools.plan.device.links import link_time
from penstock.tools.plan.device.roofline import all_reduce_s

pytestmark = pytest.mark.versions

CHIP = CHIPS["v6e"]
SUM = f"bf16[512,{8192}]{{1,0}}"
SUM_S = all_reduce_s(512 * 8192 * 2, 8, CHIP)  # 96 us


def of(seconds: float) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{round(seconds * CHIP.clock_hz)}"}}}}'


TEXT = f"""HloModule step, is_scheduled=true

%beside (p: {SUM}) -> {SUM} {{
  %p = {SUM} parameter(0)
  ROOT %travelling = {SUM} all-reduce(%p), to_apply=%add
}}

%until (j: s32[]) -> pred[] {{
  %j = s32[] parameter(0)
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %five), direction=LT
}}

%layer (x: {SUM}) -> {SUM} {{
  %x = {SUM} parameter(0)
  %before = {SUM} fusion(%x), kind=kLoop, calls=%other, {of(50e-6)}
  %one = (({SUM}), {SUM}) call-start(%before), async_execution_thread="sparsecore", to_apply=%beside
  %during = {SUM} fusion(%x), kind=kLoop, calls=%other, {of(40e-6)}
  %two = (({SUM}), {SUM}) call-start(%during), async_execution_thread="sparsecore", to_apply=%beside
  %come = {SUM} call-done(%one)
  %later = {SUM} fusion(%come), kind=kLoop, calls=%other, {of(30e-6)}
  ROOT %last = {SUM} call-done(%two)
}}

ENTRY %main (x: {SUM}) -> {SUM} {{
  %x = {SUM} parameter(0)
  %embedded = {SUM} all-reduce(%x), to_apply=%add
  ROOT %out = {SUM} while(%embedded), condition=%until, body=%layer
}}
"""


def test_what_runs_between_start_and_done_is_not_waited_for() -> None:
    program = HloModule(TEXT)
    (layer,) = program.loops()
    found = link_time(program, layer, CHIP, 8)
    assert found.seconds == pytest.approx(2 * SUM_S)
    assert found.waited_s == pytest.approx((SUM_S - 40e-6) + (SUM_S - 30e-6), rel=1e-3)
    assert found.hidden_share == pytest.approx(70e-6 / (2 * SUM_S), rel=1e-3)
    assert found.num_pairs == 2
    whole = link_time(program, program.entry, CHIP, 8)
    assert whole.seconds == pytest.approx(11 * SUM_S)
    assert whole.waited_s == pytest.approx(SUM_S + 5 * found.waited_s)
    assert whole.num_pairs == 10


def test_collectives_beside_the_program_are_counted_as_those_in_it() -> None:
    traffic = HloModule(TEXT).traffic(cache_bytes=2**40)
    num_bytes = 512 * 8192 * 2
    assert traffic.collectives == {"all-reduce": 11}
    assert traffic.collective_bytes == 11 * num_bytes


def test_links_of_one_collective_are_free_for_the_next() -> None:
    text = TEXT.replace(of(40e-6), of(400e-6))
    (layer,) = HloModule(text).loops()
    assert link_time(HloModule(text), layer, CHIP, 8).waited_s == pytest.approx(SUM_S - 30e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "devices", "links"), [("v5e", 2, 1), ("v5e", 4, 2), ("v6e", 8, 2), ("tpu7x", 4, 1), ("tpu7x", 8, 2)]
)
def test_two_chips_have_one_link_between_them_and_more_have_a_ring(name: str, devices: int, links: int) -> None:
    chip, num_bytes = CHIPS[name], 2**24
    carried_s = 2 * (devices - 1) / devices * num_bytes / (links * chip.link_bytes_per_s)
    assert all_reduce_s(num_bytes, devices, chip) == pytest.approx(carried_s + 2 * (devices - 1) * chip.hop_s)
