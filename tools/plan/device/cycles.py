"""The cycles that libtpu's compiler expects for the work of a layer, by category, from the HLO of a compiled step.

An instruction is one of

- matmul: it contains a dot or a convolution, with everything fused into it;
- kernel: a Pallas kernel, such as attention's; the compiler has no estimate for these, so their cycles are left out;
- collective: no estimate either;
- rest: everything else. An instruction that does next to nothing has about 2,100 cycles, the cost of starting it.

A loop within the layer counts as often as its condition says, and a conditional as the branch with the most bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.tools.plan.device.hlo import HloModule, Run


@dataclass(frozen=True, slots=True)
class LayerCycles:
    """Cycles of one iteration of the loop over layers, on one device."""

    matmul: int = 0
    rest: int = 0
    num_rest: int = 0  # instructions in `rest`, each as often as it runs
    num_kernels: int = 0  # Pallas kernels
    num_collectives: int = 0

    @property
    def rest_share(self) -> float:
        """The share of `rest` in everything with an estimate, or 0. With kernels included it would be smaller."""
        return self.rest / (self.matmul + self.rest) if self.matmul or self.rest else 0.0


def layer_cycles(program: HloModule, cache_bytes: int) -> LayerCycles | None:
    """Returns the cycles of the loop whose body takes longest in a stacked step; None if layers are in no loop.

    `cache_bytes` is the size of the KV cache's largest array on one device.
    """
    bodies = (program.runs(body, cache_bytes, dearest=True) for body in program.loops())
    found = (_count_cycles(program, body) for body in bodies)
    longest = max(found, key=lambda cycles: cycles.matmul + cycles.rest, default=None)
    return longest if longest is not None and longest.matmul else None


def _count_cycles(program: HloModule, runs: Iterable[Run]) -> LayerCycles:
    matmul = rest = num_rest = num_kernels = num_collectives = 0
    for run in runs:
        cycles = run.times * run.instruction.cycles
        if run.instruction.is_collective:
            num_collectives += run.times
        elif run.instruction.is_kernel:
            num_kernels += run.times
        elif program.is_matmul(run.instruction):
            matmul += cycles
        elif cycles:
            rest, num_rest = rest + cycles, num_rest + run.times
    return LayerCycles(matmul, rest, num_rest, num_kernels, num_collectives)
