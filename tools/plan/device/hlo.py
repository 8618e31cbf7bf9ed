"""Analyses a compiled step from its HLO: bytes to and from HBM, cycles, collectives, copies of the cache.

XLA's own `bytes accessed` counts a prefetch into VMEM twice, a loop's body once, and a Pallas call not at all. Here
every instruction is counted as often as it runs, with its operands and results in HBM:

- An array whose layout names a memory space (`S(1)` is VMEM) is not in HBM.
- A fusion counts what it reads of an operand: if it only slices or gathers from it, the slices. Of a result that it
  updates in place, it counts the update.
- A loop runs as often as its condition says. A conditional counts as its cheapest branch, which for sampling is the
  greedy one, or as its most expensive branch, if every option is used. A loop over the rows that ask for options runs
  never, once, or as often as it takes for all rows.
- The KV cache as the operand of a kernel counts nothing. Nor do other arrays that a kernel updates in place, such as
  the scales next to the pages: the planner knows how much of them each kernel moves, and adds it. A kernel that updates
  nothing and does not state its accesses reads the cache if an operand is as large.
- A kernel that states how many bytes it accesses, as those for quantized weights do, counts at most that, less the part
  in VMEM: given the weights of all layers, it reads those of one.
- The kernel of the gated delta rule updates states in place, and states what it moves of them: as many as a step may
  write, read and written back.
- The experts of a grouped matmul count nothing either: it reads those that have rows, as its own program says, so the
  planner adds the expected number. The kernel for quantized experts states its accesses without them.

Cycles are those that libtpu's compiler expects, waiting for memory included; it writes them next to most instructions.
Kernels and collectives have no estimate, and copies that run next to other work (`copy-start`, `slice-start`) have none
of their own: they count nothing. What else has none, such as sorts, and gathers on SparseCores, counts its bytes like a
kernel. So does a matmul with int8 weights: the other formats of weights have kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial

from penstock.tools.plan.device.hlo_text import Computation, Instruction, parsed
from penstock.tools.plan.device.kernel_calls import ATTENTION, kernel_call

_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")

_FREE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id", "replica-id",
    "opt-barrier", "copy-done", "async-done", "async-update", "all-reduce-done", "all-gather-done", "call-done",
    "collective-permute-done", "slice-done", "iota", "domain", "custom-call-done",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape", "get-tuple-element"}
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # by opcode: index of the operand with the update
_MATMULS = {"dot", "convolution"}
_HOST = {"send", "recv", "infeed", "outfeed", "send-done", "recv-done"}


@dataclass(frozen=True, slots=True)
class Run:
    """An instruction that contains no others to run, and how often it runs."""

    instruction: Instruction
    computation: Computation
    times: int


@dataclass(slots=True)
class Traffic:
    """Traffic of one run of a program, on one device."""

    read_bytes: int = 0
    written_bytes: int = 0
    collectives: dict[str, int] = field(default_factory=dict)  # how often each kind runs
    collective_bytes: int = 0  # in their results
    host_transfers: int = 0
    cache_copies: int = 0  # instructions that write as many bytes as the cache's array, not in place
    grouped_matmuls: int = 0  # those whose experts are in HBM
    quantized_grouped_matmuls: int = 0  # calls of the kernel for quantized experts
    cycles: int = 0  # expected by the compiler, without kernels and collectives
    kernel_bytes: int = 0  # part of those bytes that kernels move, without pages and experts, and what counts like them
    kernel_flops: int = 0  # stated by kernels, except attention and grouped matmuls, whose shapes do not say
    calls: dict[str, list[int]] = field(default_factory=dict)
    """Calls of each kernel but attention, by `KernelCall.key`, with its part of `kernel_bytes` and `kernel_flops`."""

    def add(self, other: Traffic, times: int = 1) -> None:
        self.read_bytes += times * other.read_bytes
        self.written_bytes += times * other.written_bytes
        self.collective_bytes += times * other.collective_bytes
        self.host_transfers += times * other.host_transfers
        self.cache_copies += times * other.cache_copies
        self.grouped_matmuls += times * other.grouped_matmuls
        self.quantized_grouped_matmuls += times * other.quantized_grouped_matmuls
        self.cycles += times * other.cycles
        self.kernel_bytes += times * other.kernel_bytes
        self.kernel_flops += times * other.kernel_flops
        for kind, count in other.collectives.items():
            self.collectives[kind] = self.collectives.get(kind, 0) + times * count
        for key, figures in other.calls.items():
            before = self.calls.get(key, [0, 0, 0])
            self.calls[key] = [old + times * new for old, new in zip(before, figures, strict=True)]

    def towards(self, other: Traffic, share: float) -> Traffic:
        """Returns what lies between this traffic and `other`, of which it takes a share; collectives are this one's."""
        between = {
            one.name: round((1 - share) * getattr(self, one.name) + share * getattr(other, one.name))
            for one in fields(self)
            if one.name not in ("collectives", "calls")
        }
        calls = {
            key: [
                round((1 - share) * mine + share * others)
                for mine, others in zip(self.calls.get(key, [0] * 3), other.calls.get(key, [0] * 3), strict=True)
            ]
            for key in self.calls | other.calls
        }
        return Traffic(**between, collectives=dict(self.collectives), calls=calls)

    @property
    def hbm_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


class HloModule:
    """The text of an optimised HLO module, from `compiled.as_text()`."""

    def __init__(self, text: str) -> None:
        self._entry, self._computations = parsed(text)

    def traffic(self, cache_bytes: int, *, dearest: bool = False, longest: bool = False) -> Traffic:
        """Returns the traffic of one run; `dearest` counts the most expensive branches of conditionals.

        Loops that data may end sooner run once then, or as often as they can if `longest`; otherwise never.
        `cache_bytes` is the size of the KV cache's largest array on one device.
        """
        return self._count_traffic(self.entry, cache_bytes, dearest=dearest, longest=longest)

    def loop_traffic(self, cache_bytes: int, depth: int = 1) -> list[Traffic]:
        """Returns the traffic per iteration of each loop at a depth: 1 for a layer of a step, 2 in a loop of steps."""
        return [self._count_traffic(body, cache_bytes) for body in self.loops(depth)]

    def loops(self, depth: int = 1) -> list[Computation]:
        """Returns the bodies of the loops at this depth."""
        computations = [self.entry]
        for _ in range(depth):
            loops = [i for one in computations for i in one.instructions.values() if i.opcode == "while"]
            computations = [self.body(loop) for loop in loops]
        return computations

    def runs(
        self, computation: Computation, cache_bytes: int, *, dearest: bool = False, longest: bool = False
    ) -> Iterator[Run]:
        """Yields what one run of `computation` runs; a conditional runs the branch with the fewest or most bytes."""
        for instruction in computation.instructions.values():
            times, inner = 1, None
            if instruction.opcode == "while":
                times, inner = self.trips(instruction), self.body(instruction)
                if not longest and self._may_end_sooner(instruction):
                    times = int(dearest)
            elif instruction.opcode == "conditional":
                branches = [self._computations[name] for name in _branches(instruction)]
                moved = partial(self._count_traffic, cache_bytes=cache_bytes, dearest=dearest, longest=longest)
                inner = (max if dearest else min)(branches, key=lambda branch: moved(branch).hbm_bytes)
            elif instruction.opcode in ("call", "call-start"):
                inner = self._computations[instruction.called["to_apply"]]
            if inner is None:
                yield Run(instruction, computation, 1)
                continue
            for run in self.runs(inner, cache_bytes, dearest=dearest, longest=longest):
                yield Run(run.instruction, run.computation, times * run.times)

    @property
    def entry(self) -> Computation:
        return self._computations[self._entry]

    def body(self, loop: Instruction) -> Computation:
        return self._computations[loop.called["body"]]

    def collective(self, instruction: Instruction) -> Instruction | None:
        """Returns the collective that it starts, itself or on SparseCores next to the program, or None."""
        if instruction.opcode != "call-start":
            return instruction if instruction.is_collective else None
        held = self._computations[instruction.called["to_apply"]].instructions.values()
        return next((inner for inner in held if inner.is_collective), None)

    def called(self, instruction: Instruction) -> list[Computation]:
        """Returns the computations that it consists of, as a fusion does, or applies to each element."""
        names = (instruction.called.get(kind, "") for kind in ("calls", "to_apply"))
        return [self._computations[name] for name in names if name in self._computations]

    def is_matmul(self, instruction: Instruction) -> bool:
        """Whether it contains a dot or a convolution."""
        if instruction.opcode in _MATMULS:
            return True
        held = (inner for called in self.called(instruction) for inner in called.instructions.values())
        return any(self.is_matmul(inner) for inner in held)

    def _is_int8_matmul(self, instruction: Instruction, computation: Computation) -> bool:
        sources = (computation.instructions.get(name) for name in instruction.operands)
        is_int8 = any(array.is_int8 for source in sources if source is not None for array in source.results)
        return is_int8 and self.is_matmul(instruction)

    def _count_traffic(
        self, computation: Computation, cache_bytes: int, *, dearest: bool = False, longest: bool = False
    ) -> Traffic:
        total = Traffic()
        for run in self.runs(computation, cache_bytes, dearest=dearest, longest=longest):
            total.add(self._instruction_traffic(run.instruction, run.computation, cache_bytes), run.times)
        return total

    def _instruction_traffic(self, instruction: Instruction, computation: Computation, cache_bytes: int) -> Traffic:
        is_kernel, is_collective = instruction.is_kernel, instruction.is_collective
        is_int8 = self._is_int8_matmul(instruction, computation)
        cycles = 0 if is_kernel or is_collective or is_int8 else instruction.cycles
        if instruction.opcode in _FREE:
            return Traffic(cycles=cycles)
        has_no_estimate = not (cycles or is_collective or instruction.opcode.endswith("-start"))  # as kernels have none
        is_attention, is_grouped = False, instruction.is_grouped_matmul or instruction.is_quantized_grouped_matmul
        reads, grouped_matmuls = 0, 0
        updated = instruction.updated if instruction.opcode == "custom-call" else {}
        for place, name in enumerate(instruction.operands):
            source = computation.instructions.get(name)
            if source is None or not source.hbm_bytes:
                continue
            if instruction.is_grouped_matmul and place == len(instruction.operands) - 1:
                grouped_matmuls += 1
                continue
            is_cache = source.hbm_bytes >= cache_bytes and not instruction.stated_bytes  # or a stack of codes as large
            if instruction.opcode == "custom-call" and (is_cache or place in updated.values()):
                is_attention = True
                continue
            reads += min(source.hbm_bytes, self._taken(instruction, place, source.hbm_bytes))
        writes = self._written(instruction, computation)
        if instruction.opcode == "custom-call":
            others = (array for i, array in enumerate(instruction.results) if i not in updated)
            writes = sum(array.num_bytes for array in others if array.is_in_hbm and array.num_bytes < cache_bytes)
        if instruction.stated_bytes:
            states = updated if instruction.is_delta_rule else {}  # a step's share of states is stated, wherever it is
            stated = instruction.stated_bytes - self._vmem_bytes(instruction, computation, states) - writes
            reads = max(stated, 0) if instruction.is_delta_rule else min(reads, max(stated, 0))
        kernel_bytes = reads + writes if has_no_estimate else 0
        kernel_flops = instruction.stated_flops if is_kernel and not (is_attention or is_grouped) else 0
        calls = {}
        if is_kernel and (call := kernel_call(instruction.name, instruction.attributes)).name != ATTENTION:
            calls[call.key] = [1, kernel_bytes, kernel_flops]
        return Traffic(
            read_bytes=reads,
            written_bytes=writes,
            collectives={instruction.opcode.removesuffix("-start"): 1} if is_collective else {},
            collective_bytes=instruction.results[-1].num_bytes if is_collective else 0,
            host_transfers=int(instruction.opcode in _HOST or "S(5)" in instruction.attributes),
            cache_copies=int(writes >= cache_bytes > 0),
            grouped_matmuls=grouped_matmuls,
            quantized_grouped_matmuls=int(instruction.is_quantized_grouped_matmul),
            cycles=cycles,
            kernel_bytes=kernel_bytes,
            kernel_flops=kernel_flops,
            calls=calls,
        )

    def _vmem_bytes(self, instruction: Instruction, computation: Computation, but: Mapping[int, int]) -> int:
        """Returns the VMEM bytes of its operands and results, except the pairs of results and operands in `but`."""
        found, left_out = computation.instructions, but.values()
        arrays = [array for place, array in enumerate(instruction.results) if place not in but]
        for place, name in enumerate(instruction.operands):
            if name in found and place not in left_out:
                arrays += found[name].results
        return sum(array.num_bytes for array in arrays if not array.is_in_hbm)

    def _taken(self, instruction: Instruction, place: int, full: int) -> int:
        """Returns how many bytes an instruction reads of the operand at `place`."""
        if instruction.opcode == "slice-start":  # its results are the operand, the slice and a flag
            return instruction.results[1].num_bytes
        if instruction.opcode in _SLICES:
            return instruction.result_bytes if place == 0 else full
        if instruction.opcode in _IN_PLACE:
            return 0 if place == 0 else full
        called = self._computations.get(instruction.called.get("calls", ""))
        if called is None or place not in called.parameters:
            return full
        return self._taken_inside(called, called.parameters[place], full)

    def _taken_inside(self, computation: Computation, name: str, full: int) -> int:
        if computation.instructions[name].is_root:  # a view of the parameter that leaves the fusion
            return full
        total = 0
        for user in computation.users(name):
            is_passed_on = user.opcode in ("copy", "fusion") and user.result_bytes == full
            if user.opcode in _VIEWS or is_passed_on:  # inside a fusion, unused values are not computed
                total += self._taken_inside(computation, user.name, full)
            else:
                total += sum(self._taken(user, i, full) for i, operand in enumerate(user.operands) if operand == name)
        return min(total, full)

    def _written(self, instruction: Instruction, computation: Computation) -> int:
        if instruction.opcode == "copy-start" or instruction.opcode.endswith("-start"):
            first = instruction.results[0]
            return first.num_bytes if first.is_in_hbm and instruction.opcode == "copy-start" else 0
        called = self._computations.get(instruction.called.get("calls", ""))
        if instruction.opcode in _IN_PLACE:
            update = computation.instructions.get(instruction.operands[_IN_PLACE[instruction.opcode]])
            return update.result_bytes if update is not None and instruction.hbm_bytes else 0
        if called is None or not instruction.hbm_bytes:
            return instruction.hbm_bytes
        return min(instruction.hbm_bytes, self._root_written(called, called.root))

    def _root_written(self, computation: Computation, root: Instruction) -> int:
        if root.opcode == "tuple":
            return sum(
                self._root_written(computation, computation.instructions[name])
                for name in root.operands
                if computation.instructions[name].hbm_bytes
            )
        if root.opcode in _VIEWS and root.operands:
            return self._root_written(computation, computation.instructions[root.operands[0]])
        if root.opcode in _IN_PLACE:
            return computation.instructions[root.operands[_IN_PLACE[root.opcode]]].result_bytes
        inner = self._computations.get(root.called.get("calls", ""))
        return self._root_written(inner, inner.root) if inner is not None else root.result_bytes

    def trips(self, loop: Instruction) -> int:
        """Returns a loop's trip count from the condition `i < n` of a scan or counted loop; 1 if it depends on data."""
        condition = self._computations[loop.called["condition"]]
        for instruction in condition.instructions.values():
            if instruction.opcode == "constant" and instruction.result_bytes == 4:
                value = instruction.attributes.split(")")[0]
                if value.isdigit():
                    return int(value)
        return 1

    def _may_end_sooner(self, loop: Instruction) -> bool:
        """Whether its condition compares the counter with a value of the loop's state, besides a constant."""
        condition = self._computations[loop.called["condition"]]
        limits = [one.operands for one in condition.instructions.values() if one.opcode == "compare"]
        return len(limits) > 1 and len({counter for counter, _ in limits}) == 1


def _branches(instruction: Instruction) -> list[str]:
    names: list[str] = []
    for several, one in _BRANCHES.findall(instruction.attributes):
        names += [one] if one else [name.strip().lstrip("%") for name in several.split(",")]
    return names
