"""Schedules of kernels: read from texts that are written here by hand, and from what libtpu dumps."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from penstock.engine.kernels.pallas import Ref
from penstock.tools.plan.device.topology import devices_of
from penstock.tools.plan.schedules import Schedule, ScheduleError, compiled_schedules
from tests.support.needs import needs_libtpu

TABLE = [
    "%s1_s0 = inlined_call_operand.hbm [shape: s32[2], index: 1, kind: input, shape index: {}] /* operand 1 */",
    "%s2_s1 = smov [#allocation7] /* materialized constant */",
    "%3 = dma.hbm_to_smem /*hbm=*/%s1_s0, /*size_in_granules=*/16, /*smem=*/%s2_s1, /*dst_syncflagno=*/[#allocation1]",
    "%s4_s2 = sld [smem:[#allocation7]]  ;;  %s5_s3 = sld [smem:[#allocation7 + $0x1]]",
]
"""Four bundles, after which s2 and s3 are the numbers of operand 1."""


def written(*bundles: str | tuple[str, str], slots: int = 4) -> str:
    """Returns a dump of these bundles: operations, and the comment behind them. `slots` empty ones follow a branch."""
    lines = ["= control target key start", "LB: loop body", "= control target key end", ""]
    address = 0
    for bundle in bundles:
        code, comment = (bundle, "") if isinstance(bundle, str) else bundle
        empty = slots if "sbr.rel" in code else 0
        for operations, after in [(code, comment), *[("", "")] * empty]:
            lines.append(
                f" {address:#5x}   : > {{ {operations} }} {after}" if address else f"     0   :  {{ {operations} }}"
            )
            address += 1
    return "\n".join(lines)


def loop(region: int, body: Sequence[str | tuple[str, str]], counter: str, limit: str) -> list[str | tuple[str, str]]:
    """Returns a loop of `body`, an addition, a comparison and a branch back, and the bundle before it."""
    return [
        f"%s90_{counter} = smov 0",
        (f"%s91_{counter} = sphi %s90_{counter}, %s92_{counter}", f"/* Start region {region} */"),
        *body,
        f"%s92_{counter} = sadd.s32 1, %s91_{counter}",
        f"%p93_p0 = scmp.ge.s32.totalorder %s92_{counter}, {limit}",
        f"%94 = sbr.rel (!%p93_p0) target = $region{region}",
    ]


@pytest.mark.parametrize("slots", [1, 4])
def test_loops_run_as_often_as_the_tables_say(slots: int) -> None:
    inner = [
        "%6 = vst [vmem:[#allocation8_spill] sm:$0xff] %v1_v0  ;;  %v2_v1 = vld [vmem:[#allocation9_spill] sm:$0xff]"
    ]
    outer = ["%7 = dma.hbm_to_vmem [thread:$0]  %s1_s0, 64, %s2_s1, [#allocation1]", *loop(2, inner, "s9", "%s5_s3")]
    check = (
        "%8 = shalt.err (!%p1_p1) /* BoundsCheck 2 [deref of %s2] for %7 = dma.hbm_to_vmem /*hbm=*/%s1\nhlo: it\n */"
    )
    behind = (check, "/* Start region 4 */")
    text = written(
        *TABLE, *loop(1, [*outer, behind], "s8", "%s4_s2"), ("%9 = sfence", "/* Start region 3 */"), slots=slots
    )
    schedule = Schedule.of("nested", text)
    first, second = schedule.loops
    inner_length = 5 + slots  # sphi, the body, an addition, a comparison, a branch
    assert (first.depth, second.depth) == (0, 1)
    assert (first.bundles, second.bundles) == (7 + slots, inner_length)
    assert (first.transfers, first.bounds_checks, first.spills) == (1, 1, 0)
    assert (second.transfers, second.spills, second.fills) == (0, 1, 1)

    done = schedule.run({1: [3, 5]})
    assert (done.trips(first), done.trips(second)) == (3, 15)
    assert done.cycles == len(TABLE) + 1 + 3 * first.bundles + 15 * second.bundles + 1
    assert done.cycles_in(first) == done.cycles - len(TABLE) - 2
    assert (done.spills, done.fills, done.bounds_checks) == (15, 15, 3)
    assert done.transfers == {"hbm_to_smem": 1, "hbm_to_vmem": 3}
    assert done.transfer_bytes["hbm_to_vmem"] == 3 * 64 * 32


def test_on_tpu7x_six_slots_follow_a_branch_and_an_empty_bundle_may_stand_for_several() -> None:
    """What the next trip needs is copied behind the end of the loop's region, and another branch is not a slot.

    The kind of a transfer is in a comment.
    """
    text = written(
        "%s1_s0 = smov 0",
        ("%s2_s0 = sphi %s1_s0, %s4_s0", "/* Start region 1 */"),
        "%s3_s1 = sadd.s32 1, %s2_s0",
        "%p5_p0 = scmp.ge.s32.totalorder %s3_s1, 3",
        "%6 = sbr.rel (!%p5_p0) target = $region1",
        ("", "/* End region 1 */"),
        "%s4_s0 = smov %s3_s1",
        "",
        "%7 = sbr.rel (%p5_p0) target = $region2",
        "",
        ("%8 = sfence", "/* Start region 2 */"),
        "%9 = dma.general /*src=*/%s2_s0, /*size_in_granules=*/4, /*dst=*/%s3_s1 /* hbm-to-vmem */",
        slots=0,
    )
    schedule = Schedule.of("copies", text)
    done = schedule.run()
    assert done.transfer_bytes == {"hbm_to_vmem": 128}
    assert schedule.delay_slots == 6
    assert (done.trips(schedule.loops[0]), done.cycles) == (3, 1 + 3 * 7 + 4)


@pytest.mark.parametrize(
    ("number", "cycles"),
    [(7, 4 + 2 + 4 + 3), (6, 4 + 2 + 4 + 1)],  # what is skipped has two bundles
)
def test_a_branch_skips_what_its_predicate_says(number: int, cycles: int) -> None:
    text = written(
        *TABLE,
        "%p6_p0 = scmp.ne.s32.totalorder %s4_s2, 7",
        "%7 = sbr.rel (%p6_p0) target = $region5",
        ("%8 = dma.vmem_to_hbm [thread:$0]  (%p9_p1), %s1_s0, 2, %s2_s1, [#allocation1]", "/* Start region 4 */"),
        "",
        ("%10 = sfence", "/* Start/End empty region 5 */"),
    ).replace("(%p9_p1), ", "(%p6_p0), ")
    done = Schedule.of("skips", text).run({1: [number, 0]})
    assert done.cycles == cycles
    assert "vmem_to_hbm" not in done.transfers  # its predicate is false where it is reached


def test_operations_read_what_was_there_before_their_bundle() -> None:
    """Only what has no slot of its own is read within it; a move whose predicate is false keeps what it names."""
    text = written(
        *TABLE,
        "%s6_s2 = sadd.s32 %s5_s3, 0  ;;  %s7_s3 = sadd.s32 %s4_s2, 0",  # swapped
        "%s8_s4 = sshll.u32 %s6_s2, 4  ;;  %s9_s4 = int_to_ptr.vmem [resolvable:$true] %s8_s4",
        "%p1_p0 = scmp.eq.s32.totalorder %s9_s4, 144  ;;  %p2_p1 = scmp.lt.s32.totalorder %s7_s3, 0",
        "%s10_s5 = smov (!%p2_p1, %s7_s3), 1  ;;  %s11_s6 = smov (%p2_p1, %s7_s3), 2",
        "%p3_p2 = scmp.eq.s32.totalorder %s10_s5, 1  ;;  %p4_p3 = scmp.eq.s32.totalorder %s11_s6, 5",
        "%p5_p4 = pnand %p1_p0, %p3_p2  ;;  %p6_p5 = pneg %p4_p3",
        "%p7_p6 = por %p5_p4, %p6_p5",
        "%7 = sbr.rel (%p7_p6) target = $region5",
        ("", "/* Start region 4 */"),
        ("%10 = sfence", "/* Start/End empty region 5 */"),
    )
    schedule = Schedule.of("moves", text)
    assert schedule.run({1: [5, 9]}).cycles == len(schedule.bundles)  # not skipped: all held


def test_a_loop_may_count_in_the_bundle_that_it_begins_with() -> None:
    text = written(
        "%s1_s0 = smov 0",
        ("%s3_s0 = sadd.s32 1, %s2_s0  ;;  %s2_s0 = sphi %s1_s0, %s3_s0", "/* Start region 1 */"),
        "%p4_p0 = scmp.ge.s32.totalorder %s3_s0, 6",
        "%5 = sbr.rel (!%p4_p0) target = $region1",
    )
    schedule = Schedule.of("counts", text)
    assert schedule.run().trips(schedule.loops[0]) == 6


@pytest.mark.parametrize(("made", "cycles"), [(0x3F800000, 5 + 4 + 1), (0, 5 + 4)])  # 1.0 is more than 0.0
def test_scalars_of_vectors_and_remainders_may_decide_too(made: int, cycles: int) -> None:
    """The branch leads to an empty region at the end, which is named nowhere."""
    text = written(
        "%1 = vpush %v1_v0  ;;  %2 = sdivrem.u32 17, 5",
        "%s3_s0 = spop %1  ;;  %s4_s1 = spop.drf %2",
        "%p5_p0 = scmp.gt.f32.partialorder %s3_s0, 0.0  ;;  %p6_p1 = scmp.eq.s32.totalorder %s4_s1, 2",
        "%p7_p2 = pnand %p5_p0, %p6_p1",
        "%8 = sbr.rel (%p7_p2) target = $region8",
        ("%9 = sfence", "/* Start region 7 :: End region 7 */"),
    )
    schedule = Schedule.of("vectors", text)
    assert schedule.run(from_vectors=made).cycles == cycles
    with pytest.raises(ScheduleError, match="spop"):
        schedule.run()


def test_what_is_not_known_is_an_error_and_never_a_guess() -> None:
    unknown = written(
        "%s1_s0 = vpop.sfrf %1",
        "%p2_p0 = scmp.eq.s32.totalorder %s1_s0, 1",
        "%3 = sbr.rel (%p2_p0) target = $region1",
        ("", "/* Start region 1 */"),
    )
    with pytest.raises(ScheduleError, match=r"bundle 0x2 branches to region 1 .* vpop\.sfrf"):
        Schedule.of("unknown", unknown).run()
    forever = written(*loop(1, [], "s0", "5")).replace("sadd.s32 1", "sadd.s32 0")
    with pytest.raises(ScheduleError, match="more than 1000 cycles"):
        Schedule.of("forever", forever).run(max_cycles=1000)
    with pytest.raises(ScheduleError, match="region 9, which begins nowhere"):
        Schedule.of("nowhere", written("%3 = sbr.rel target = $region9")).run()
    for text in ("", written("", "", "").replace("0x2", "0x4")):
        with pytest.raises(ScheduleError, match="not numbered"):
            Schedule.of("gaps", text)


def _add_chosen(counts: Ref, x: Ref, out: Ref) -> None:
    out[...] = x[...]

    def add(i: jax.Array, carry: None) -> None:
        @pl.when(counts[i] > 0)
        def _() -> None:
            out[...] = out[...] * 2.0 + 1.0

    lax.fori_loop(0, counts[8], add, None)


def compile_adding(topology: str) -> None:
    """Compiles a kernel of three blocks, each with a loop of `counts[8]` trips, of which positive counts do more."""
    place = SingleDeviceSharding(devices_of(topology)[0])
    block = pl.BlockSpec((8, 128), lambda i, _: (i, 0))
    call = pl.pallas_call(
        _add_chosen,
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(3,), in_specs=[block], out_specs=block),
        out_shape=jax.ShapeDtypeStruct((24, 128), jnp.float32),
        name="add_chosen",
    )
    counts = jax.ShapeDtypeStruct((9,), jnp.int32, sharding=place)
    jax.jit(call).lower(counts, jax.ShapeDtypeStruct((24, 128), jnp.float32, sharding=place)).compile()


@pytest.mark.versions
@needs_libtpu
@pytest.mark.parametrize("topology", ["v6e:2x2", "tpu7x:2x2x1"])
def test_a_kernel_takes_the_cycles_of_the_loops_and_branches_that_its_tables_choose(topology: str) -> None:
    (schedule,) = (found for found in compiled_schedules(compile_adding, topology) if found.name == "add_chosen")
    grid, chosen = schedule.loops
    costs = {}
    for positive in (0, 3, 8):
        done = schedule.run({0: [1] * positive + [0] * (8 - positive) + [8]})
        assert (done.trips(chosen), done.transfers["vmem_to_hbm"]) == (24, 3)
        assert done.transfer_bytes["vmem_to_hbm"] == 24 * 128 * 4
        assert done.cycles <= len(schedule.bundles) + grid.bundles * 5 + chosen.bundles * 24
        costs[positive] = done.cycles
    assert costs[8] - costs[3] == 5 * (costs[3] - costs[0]) / 3  # each costs the same
    assert (costs[8] > costs[0]) == (topology == "v6e:2x2")  # on TPU7x its operations are predicated, without a branch
    assert schedule.run({0: [0] * 9}).trips(chosen) == 0
