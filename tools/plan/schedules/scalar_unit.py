"""What a kernel's scalar unit computes, so that its schedule can be followed for the tables that it is given.

Loops and branches of our kernels depend on scalars alone: lengths, counts, grids. Addresses are numbers that do not
overlap; nothing in VMEM or HBM is looked at, and what comes from the vector unit is None, for unknown. A branch on
unknowns is an error, never a guess.

Operations of a bundle read what was there before it. Only values without a slot of their own, such as `int_to_ptr`,
are read within the bundle that makes them.
"""

from __future__ import annotations

import operator
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.tools.plan.schedules.bundles import Bundle, Operation, Predicate, ScheduleError

Value = int | bool | None  # None: unknown

GRANULE_BYTES = 32
"""The unit of the sizes of transfers. On v5e and v6e, the transfer of a page of 64 keys shows it."""

_BITS, _FLOAT = struct.Struct("<i"), struct.Struct("<f")
_SPACE = 2**18  # words of SMEM, and so the distance between allocations
_ADDRESS = re.compile(r"#(allocation\d+\w*)|\$?(0x[0-9a-f]+)|(%\w+)|(\d+)")
_UNSIGNED = 2**32 - 1
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << b if 0 <= b < 32 else 0,
    "sshrl": lambda a, b: (a & _UNSIGNED) >> b if 0 <= b < 32 else 0,
    "sshra": lambda a, b: a >> min(b, 31),
    "smin": min,
    "smax": max,
    "smulhi": lambda a, b: a * b >> 32,
    "scalar_lea": operator.add,
}
_MOVES = ("smov", "pmov", "int_to_ptr", "ptr_to_int")


@dataclass(slots=True)
class ScalarUnit:
    """Registers and SMEM. `inputs` are the kernel's operands that are read as scalars, by their index."""

    inputs: Mapping[int, Sequence[int]]
    from_vectors: int | None = None  # what a scalar that the vector unit made is taken to be; None: unknown
    transfers: Counter[str] = field(default_factory=Counter)  # DMAs that were started, by kind
    transfer_bytes: Counter[str] = field(default_factory=Counter)
    unknown: set[str] = field(default_factory=set)  # opcodes whose results are not modelled
    _registers: dict[str, Value] = field(default_factory=dict)
    _memory: dict[int, Value] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)
    _remainders: dict[str, Value] = field(default_factory=dict)  # by the divisions that made them
    _input_at: dict[int, int] = field(default_factory=dict)  # an operand's index by its address

    def run(self, bundle: Bundle) -> int | None:
        """Executes a bundle. Returns the region that it branches to, or None.

        Raises:
            ScheduleError: whether it branches is unknown.
        """
        made: dict[str, Value] = {}
        stores: list[tuple[int, Value]] = []
        target = None
        for operation in bundle.operations:
            if operation.target is not None:
                holds = self._holds(operation.predicate, made)
                if holds is None:
                    raise ScheduleError(
                        f"whether bundle {bundle.address:#x} branches to region {operation.target} depends on what is "
                        f"not known: {', '.join(sorted(self.unknown)) or 'memory that nothing wrote'}"
                    )
                target = operation.target if holds else target
            elif operation.opcode == "sphi":  # both ways into a loop leave it in the register of the result
                continue
            elif operation.result is not None and operation.result[1] in "sp":
                made[operation.result] = self._result(operation, made)
            elif operation.opcode == "sst":
                stores += self._stored(operation, made)
            elif operation.opcode.startswith("sdivrem."):
                self._remainders[operation.result or ""] = self._remainder(operation, made)
            elif operation.is_transfer:
                self._transfer(operation, made)
        for name, value in made.items():
            self._registers[_register(name)] = value
        self._memory.update(stores)
        return target

    def _result(self, operation: Operation, made: Mapping[str, Value]) -> Value:
        holds = self._holds(operation.predicate, made)
        if operation.predicate is not None and not holds:
            otherwise = operation.predicate.otherwise
            old = self._registers.get(_register(operation.result or ""))
            return None if holds is None else old if otherwise is None else self._value(otherwise, made)
        if operation.input_index is not None:
            return self._input(operation)
        stem, _, kind = operation.opcode.partition(".")
        if stem == "sld":
            address = self._address(operation.operands[0], made)
            return None if address is None else self._memory.get(address)
        values = [self._value(operand, made) for operand in operation.operands]
        if stem == "scmp":
            return _compared(kind, values)
        if operation.opcode == "spop.drf":
            return self._remainders.get(operation.operands[0])
        if stem in ("spop", "vpop") and self.from_vectors is not None:
            return self.from_vectors
        if stem in _MOVES:
            return values[0]
        if stem == "scalar_select":
            return None if values[0] is None else values[1 if values[0] else 2]
        if stem in ("pand", "por", "pnand", "pnor", "pneg", "pxor"):
            return _logical(stem, values)
        if stem == "scalar_lea":
            values = values[:2]  # a third is what the first points into
        if stem in _ARITHMETIC and len(values) == 2:
            return _arithmetic(stem, kind, values)
        self.unknown.add(operation.opcode)
        return None

    def _input(self, operation: Operation) -> Value:
        index = operation.input_index or 0
        if operation.opcode == "inlined_call_operand.<no":  # not in memory: a scalar
            given = self.inputs.get(index)
            return given[0] if given else None
        address = self._place(f"operand {index}")
        self._input_at[address] = self._input_at[_signed(address << 4)] = index
        return address

    def _remainder(self, operation: Operation, made: Mapping[str, Value]) -> Value:
        a, b = (self._value(operand, made) for operand in operation.operands[:2])
        return None if a is None or not b else _signed((a & _UNSIGNED) % (b & _UNSIGNED))

    def _stored(self, operation: Operation, made: Mapping[str, Value]) -> list[tuple[int, Value]]:
        holds = self._holds(operation.predicate, made)
        address = self._address(operation.operands[0], made)
        if holds is False or address is None:
            return []
        value = self._value(operation.operands[1], made) if len(operation.operands) > 1 else None
        return [(address, value if holds else None)]

    def _transfer(self, operation: Operation, made: Mapping[str, Value]) -> None:
        holds = self._holds(operation.predicate, made)
        if holds is None:
            raise ScheduleError(f"whether {operation.opcode} starts depends on what is not known")
        if not holds:
            return
        source, size, destination = (self._value(operand, made) for operand in operation.operands[:3])
        kind = operation.opcode.removeprefix("dma.")
        self.transfers[kind] += 1
        self.transfer_bytes[kind] += (size or 0) * GRANULE_BYTES
        if kind.endswith("_to_smem") and destination is not None and source is not None:
            table = self.inputs.get(self._input_at.get(source, -1), ())
            self._memory.update((destination + i, value) for i, value in enumerate(table))

    def _holds(self, predicate: Predicate | None, made: Mapping[str, Value]) -> bool | None:
        if predicate is None:
            return True
        value = self._value(predicate.name, made)
        return None if value is None else bool(value) != predicate.is_negated

    def _value(self, operand: str, made: Mapping[str, Value]) -> Value:
        if operand.startswith("%"):
            return made[operand] if operand in made else self._registers.get(_register(operand))
        if operand.startswith("["):
            return self._address(operand, made)
        try:
            is_float = "." in operand
            return _BITS.unpack(_FLOAT.pack(float(operand)))[0] if is_float else _signed(int(operand, 0))
        except ValueError:
            return None

    def _address(self, operand: str, made: Mapping[str, Value]) -> int | None:
        """Returns the sum of what is in brackets."""
        total = 0
        for name, hexadecimal, register, decimal in _ADDRESS.findall(operand.removeprefix("[smem:")):
            value = self._place(name) if name else self._value(register, made) if register else None
            value = int(hexadecimal or decimal, 0) if hexadecimal or decimal else value
            if value is None:
                return None
            total += value
        return total

    def _place(self, name: str) -> int:
        return self._places.setdefault(name, (len(self._places) + 1) * _SPACE)


def _register(name: str) -> str:
    return name.rpartition("_")[2]


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _compared(kind: str, values: Sequence[Value]) -> Value:
    a, b = values
    if a is None or b is None:
        return None
    relation, _, form = kind.partition(".")
    if form.startswith("u32"):
        a, b = a & _UNSIGNED, b & _UNSIGNED
    if form.startswith("f32"):
        a, b = (_FLOAT.unpack(_BITS.pack(value))[0] for value in (a, b))
    return _COMPARE[relation](a, b)


def _logical(stem: str, values: Sequence[Value]) -> Value:
    """Returns what follows even if one of the values is unknown."""
    if stem == "pneg":
        return None if values[0] is None else not values[0]
    if stem == "pxor":
        return None if None in values else bool(values[0]) != bool(values[1])
    decisive = stem in ("por", "pnor")  # one such value decides
    if any(value is not None and bool(value) == decisive for value in values):
        found: bool | None = decisive
    else:
        found = None if None in values else not decisive
    return found if found is None or stem in ("pand", "por") else not found


def _arithmetic(stem: str, kind: str, values: Sequence[Value]) -> Value:
    a, b = values
    if a is None or b is None:
        return None
    if kind == "u32":
        a, b = a & _UNSIGNED, b & _UNSIGNED
    return _signed(_ARITHMETIC[stem](a, b))
