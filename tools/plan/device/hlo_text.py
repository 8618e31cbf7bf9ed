"""The text of an optimised HLO module: its computations and their instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.engine.kernels.tpu import GATED_DELTA_RULE, GROUPED_QUANTIZED_MATMUL

_ITEM_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "token": 0}
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(calls|body|condition|to_apply)=%?([\w.\-]+)")
_UNKNOWN = 2**63 - 1  # libtpu's figure for cycles that it cannot estimate
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_STATED_BYTES = re.compile(r'"bytes_accessed":"(\d+)"')
_STATED_FLOPS = re.compile(r'"flops":"(\d+)"')
_ALIASES = re.compile(r"\{(\d*)\}: \((\d+), \{\}")  # a result's index, empty if there is only one, and its operand

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


@dataclass(frozen=True, slots=True)
class BufferShape:
    num_bytes: int
    is_in_hbm: bool
    is_int8: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    opcode: str
    results: tuple[BufferShape, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    cycles: int = 0  # expected by the compiler; 0: no estimate
    stated_bytes: int = 0  # stated by a kernel; 0: not stated
    stated_flops: int = 0

    @property
    def is_kernel(self) -> bool:
        """Whether it is a Pallas kernel, or one that libtpu made."""
        return self.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in self.attributes

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective or the start of one."""
        return self.opcode.removesuffix("-start") in COLLECTIVES

    @property
    def called(self) -> dict[str, str]:
        return dict(_CALLED.findall(self.attributes))

    @property
    def is_grouped_matmul(self) -> bool:
        """Whether it is libtpu's form of `ragged_dot`: its last operand holds the matrices of all groups."""
        return self.opcode == "custom-call" and "ragged_dot_tiling=" in self.attributes

    @property
    def is_quantized_grouped_matmul(self) -> bool:
        return self.opcode == "custom-call" and self.name.startswith(GROUPED_QUANTIZED_MATMUL)

    @property
    def is_delta_rule(self) -> bool:
        return self.opcode == "custom-call" and self.name.startswith(GATED_DELTA_RULE)

    @property
    def updated(self) -> dict[int, int]:
        """The results of a kernel that update operands in place, with the index of each operand."""
        _, _, after = self.attributes.partition("output_to_operand_aliasing={")
        return {int(result or 0): int(operand) for result, operand in _ALIASES.findall(after.partition("}}")[0])}

    @property
    def result_bytes(self) -> int:
        return sum(array.num_bytes for array in self.results)

    @property
    def hbm_bytes(self) -> int:
        return sum(array.num_bytes for array in self.results if array.is_in_hbm)


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    @cached_property
    def parameters(self) -> dict[int, str]:
        found = {}
        for instruction in self.instructions.values():
            if instruction.opcode == "parameter":
                found[int(instruction.attributes.split(")")[0])] = instruction.name
        return found

    def users(self, name: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions.values() if name in instruction.operands]


def parsed(text: str) -> tuple[str, dict[str, Computation]]:
    """Returns the name of the entry, and all computations by name."""
    entry = name = ""
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name, instructions = head.group(2), {}
            entry = name if head.group(1) else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, instructions)
        elif (match := _LINE.match(line)) and name:
            found = _instruction(match.group(2), match.group(3), is_root=bool(match.group(1)))
            instructions[found.name] = found
    return entry, computations


def _instruction(name: str, rest: str, *, is_root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    results, rest = tuple(_arrays(rest[:end])), rest[end:].lstrip()
    opcode, _, inner = rest.partition("(")
    close = _closing(rest, len(opcode))
    operands = tuple(_NAME.findall(rest[len(opcode) : close]))
    attributes = inner if opcode in ("parameter", "constant") else rest[close:].split(", metadata=")[0]
    is_kernel = opcode == "custom-call"
    cycles = _number(_CYCLES, rest, close)
    return Instruction(
        name,
        opcode.strip(),
        results,
        operands,
        attributes,
        is_root,
        cycles=0 if cycles == _UNKNOWN else cycles,
        stated_bytes=_number(_STATED_BYTES, rest, close) if is_kernel else 0,
        stated_flops=_number(_STATED_FLOPS, rest, close) if is_kernel else 0,
    )


def _number(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Returns the number that the pattern finds, or 0."""
    found = pattern.search(text, start)
    return 0 if found is None else int(found[1])


def _arrays(text: str) -> Iterator[BufferShape]:
    for kind, dims, layout in _SHAPE.findall(text):
        size = math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        yield BufferShape(size * _item_bits(kind) // 8, "S(" not in layout, kind == "s8")


def _item_bits(kind: str) -> int:
    if kind in _ITEM_BYTES:
        return 8 * _ITEM_BYTES[kind]
    digits = re.match(r"[a-z]+(\d+)", kind)
    return int(digits.group(1)) if digits else 0


def _closing(text: str, start: int) -> int:
    """Returns the index where the first parenthesis from `start` on closes."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "(":
            depth += 1
        elif text[place] == ")":
            depth -= 1
            if depth == 0:
                return place
    return len(text)
