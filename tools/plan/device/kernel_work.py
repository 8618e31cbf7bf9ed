"""The work of a step's kernels, and what is known of their time: each takes the longest of its bytes, its FLOPs and its
schedule.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from penstock.engine.deployment.deployment import Deployment
from penstock.engine.models import ExpertsConfig
from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.device.hlo import Traffic
from penstock.tools.plan.device.kernel_calls import KernelCall
from penstock.tools.plan.device.weights import distinct_experts
from penstock.tools.plan.schedules.scaling import Cycles, cycles_of


class Basis(enum.StrEnum):
    """What a kernel's time is from, besides its bytes and FLOPs."""

    SCHEDULE = "its schedule"
    SCALED = "schedules at other shapes"
    NONE = "bytes and FLOPs alone"

    @classmethod
    def weakest(cls, bases: Iterable[Basis]) -> Basis:
        """Returns the one that says least."""
        return max(bases, key=list(cls).index, default=cls.NONE)


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Work of the kernels of one kind in a step, on each device."""

    num_bytes: float = 0.0  # to and from HBM
    flops: float = 0.0
    cycles: float = 0.0  # of their schedules; 0: not known
    name: str = ""
    basis: Basis = Basis.NONE

    def seconds(self, chip: Chip) -> float:
        """Returns the time at the roofline, or that of the schedules if it is longer."""
        roofline = max(self.num_bytes / chip.hbm_bytes_per_s, self.flops / chip.bf16_flops_per_s)
        return max(roofline, self.cycles / chip.clock_hz)


@dataclass(frozen=True, slots=True)
class Load:
    """What a step has to do, padding aside."""

    num_tokens: int
    num_rows: int  # sampled
    is_drawn: bool  # whether rows have a temperature and filters


def kernels_of(program: Traffic, chip: Chip, load: Load, num_steps: int = 1) -> Iterator[KernelWork]:
    """Yields the work of each kernel but attention and experts, and of all else that the compiler has no cycles of."""
    other_bytes, other_flops = program.kernel_bytes, program.kernel_flops
    for key, (times, num_bytes, flops) in program.calls.items():
        call, found = _known(key, chip.name)
        if call.kind == "experts":
            continue
        other_bytes, other_flops = other_bytes - num_bytes, other_flops - flops
        cycles = 0.0 if found is None else times * _cycles_of_call(call, found, load)
        yield KernelWork(num_bytes / num_steps, flops / num_steps, cycles / num_steps, call.name, basis_of(found))
    yield KernelWork(other_bytes / num_steps, other_flops / num_steps, name="what else has no estimate")


@cache
def _known(key: str, chip: str) -> tuple[KernelCall, Cycles | None]:
    """Returns a call and its cycles. A simulation asks for them at each load."""
    call = KernelCall.of_key(key)
    return call, None if call.kind is None else cycles_of(chip, call.kind, call.geometry)


def _cycles_of_call(call: KernelCall, found: Cycles, load: Load) -> float:
    if call.kind == "delta rule":  # the table has a token's, and those that are padding are skipped
        return found.at(call.point) * load.num_tokens
    if call.kind == "draw":  # a block of 8 rows without any temperature ends early
        num_blocks = -(-call.geometry["rows"] // 8)
        share = min(1.0, -(-load.num_rows // 8) / num_blocks) if load.is_drawn else 0.0
        return share * found.at("filtered") + (1 - share) * found.at("greedy")
    return found.at(call.point)


def basis_of(found: Cycles | None) -> Basis:
    return Basis.NONE if found is None else Basis.SCHEDULE if found.is_exact else Basis.SCALED


def expert_cycles(deployment: Deployment, chip: Chip, num_tokens: int, program: Traffic) -> tuple[float, Basis]:
    """Returns the cycles of all calls for quantized experts: tiles of rows as few as can be, for those with rows."""
    calls = [(*_known(key, chip.name), figures[0]) for key, figures in program.calls.items()]
    found = [(cycles, call.point, times) for call, cycles, times in calls if call.kind == "experts"]
    mixture = next((block.mlp for block in deployment.model.blocks if isinstance(block.mlp, ExpertsConfig)), None)
    total = 0.0
    for cycles, rows, times in found:
        if cycles is not None and mixture is not None:
            groups = deployment.config.expert_parallel
            tiles = max(distinct_experts(mixture, num_tokens), num_tokens * mixture.num_chosen / int(rows)) / groups
            total += times * tiles * cycles.at(rows)
    return total, Basis.weakest(basis_of(cycles) for cycles, _, _ in found)
