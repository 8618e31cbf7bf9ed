"""What libtpu's compiler expects the work of a layer to take, read from the HLO of a compiled step.

It writes `estimated_cycles` beside most instructions. An instruction is one of

- matmul: it holds a dot or a convolution, with all that was fused into it;
- attention: a Pallas kernel, of which the compiler has no estimate, so that its cycles are left out here;
- collective: no estimate either;
- rest: everything else. What does next to nothing has about 2,100 cycles: those that it takes to start it.

A loop within the layer counts as often as its condition says, and a conditional as its dearest branch. Sorts have no
estimate and copies that run beside other work (`copy-start`, `slice-start`) have none of their own: both count nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.engine.planning.hlo import COLLECTIVES

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_MATMULS = {"dot", "convolution"}


@dataclass(frozen=True, slots=True)
class LayerCycles:
    """Of one iteration of the loop over layers, on one device."""

    matmul: int = 0
    rest: int = 0
    num_rest: int = 0  # instructions that `rest` is of, each as often as it runs
    num_kernels: int = 0  # Pallas kernels
    num_collectives: int = 0

    def __add__(self, other: LayerCycles) -> LayerCycles:
        return LayerCycles(
            self.matmul + other.matmul,
            self.rest + other.rest,
            self.num_rest + other.num_rest,
            self.num_kernels + other.num_kernels,
            self.num_collectives + other.num_collectives,
        )

    def times(self, count: int) -> LayerCycles:
        return LayerCycles(
            count * self.matmul,
            count * self.rest,
            count * self.num_rest,
            count * self.num_kernels,
            count * self.num_collectives,
        )

    @property
    def rest_share(self) -> float:
        """Of what has an estimate, if anything has: attention left out, which would make it smaller."""
        return self.rest / (self.matmul + self.rest) if self.matmul or self.rest else 0.0


def layer_cycles(text: str) -> LayerCycles | None:
    """Of the loop in a stacked step's optimised HLO whose body takes longest; None where layers are in no loop."""
    computations, entry = _computations(text)
    bodies = [match.group(2) for line in computations[entry] if (match := _LOOP.search(line))]
    longest = max(
        (_of(body, computations) for body in bodies), key=lambda found: found.matmul + found.rest, default=None
    )
    return longest if longest is not None and longest.matmul else None


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each by its name, and the name of the one that a run begins with."""
    found: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head.group(2)
            found[name] = []
            entry = name if head.group(1) else entry
        elif name and line.startswith("  "):
            found[name].append(line)
    return found, entry


def _of(name: str, computations: dict[str, list[str]]) -> LayerCycles:
    total = LayerCycles()
    for line in computations[name]:
        match = _LINE.match(line)
        if match is not None:
            total += _of_one(match.group(1), line, computations)
    return total


def _of_one(opcode: str, line: str, computations: dict[str, list[str]]) -> LayerCycles:
    if loop := _LOOP.search(line):
        return _of(loop.group(2), computations).times(_trips(computations[loop.group(1)]))
    if branches := _BRANCHES.search(line):
        names = [name.strip().lstrip("%") for name in branches.group(1).split(",")]
        return max((_of(name, computations) for name in names), key=lambda cycles: cycles.matmul + cycles.rest)
    if opcode.removesuffix("-start") in COLLECTIVES:
        return LayerCycles(num_collectives=1)
    if opcode == "custom-call" and _KERNEL in line:
        return LayerCycles(num_kernels=1)
    estimate = _CYCLES.search(line)
    if estimate is None or not int(estimate.group(1)):
        return LayerCycles()
    cycles = int(estimate.group(1))
    if _is_matmul(opcode, line, computations):
        return LayerCycles(matmul=cycles)
    return LayerCycles(rest=cycles, num_rest=1)


def _is_matmul(opcode: str, line: str, computations: dict[str, list[str]]) -> bool:
    if opcode in _MATMULS:
        return True
    called = [computations[name] for name in _CALLED.findall(line) if name in computations]
    inside = [(match.group(1), held) for lines in called for held in lines if (match := _LINE.match(held))]
    return any(_is_matmul(opcode, held, computations) for opcode, held in inside)


def _trips(condition: list[str]) -> int:
    """1 where it depends on data."""
    return next((int(match.group(1)) for line in condition if (match := _TRIPS.search(line))), 1)
