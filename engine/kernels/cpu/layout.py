"""What Python and the C++ kernels pass each other, in order.

The tables repeat those of `layout.h`, and are compared with them when the library is loaded.

Callers give arrays and numbers by name. The tables put them in order and check their types when a step is traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import jax
import numpy as np

from penstock.engine.errors import KernelLayoutError
from penstock.engine.formats.packing import OFFSETS

ANY, F32, S32, U8, PRED = "AnyBuffer", "F32", "S32", "U8", "Pred"
INTEGER, FLOAT, BOOL, INTEGERS, FLOATS = "int64_t", "float", "bool", "Integers", "Floats"
_DTYPES: Mapping[str, Any] = {F32: np.float32, S32: np.int32, U8: np.uint8, PRED: np.bool_}
_SCALARS: Mapping[str, Any] = {INTEGER: np.int64, FLOAT: np.float32, BOOL: bool}
_SPANS: Mapping[str, Any] = {INTEGERS: np.int64, FLOATS: np.float32}


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """A row of a table: an array, an attribute, a number or a choice, with its C++ type if it has one."""

    role: str
    type: str
    name: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.role, self.type, self.name) if part)


def rows(role: str, kind: str, *names: str) -> tuple[LayoutRow, ...]:
    return tuple(LayoutRow(role, kind, name) for name in names)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of layout.h, by its name there."""

    name: str
    rows: tuple[LayoutRow, ...]

    def having(self, *roles: str) -> tuple[LayoutRow, ...]:
        return tuple(row for row in self.rows if row.role in roles)

    def in_order(self, given: Mapping[str, Any], *roles: str) -> list[tuple[LayoutRow, Any]]:
        """Returns the rows of these roles with what is given for each.

        Raises:
            KernelLayoutError: a name has no row, or a row is not given.
        """
        rows = self.having(*roles)
        for name in sorted({row.name for row in rows} ^ given.keys()):
            raise KernelLayoutError(f"{self.name}: {name!r} is {'not declared' if name in given else 'missing'}")
        return [(row, given[row.name]) for row in rows]

    def arrays(self, given: Mapping[str, Any]) -> list[jax.Array]:
        """Returns arrays in the order of the operands, caches and groups; a group is given as a mapping of its own.

        Raises:
            KernelLayoutError: an array is missing or not declared, or has another type than its row.
        """
        arrays: list[jax.Array] = []
        for row, value in self.in_order(given, "operand", "cache", "group"):
            if row.role == "group":
                arrays += GROUPS[row.type].arrays(value)
                continue
            if value.dtype != _DTYPES.get(row.type, value.dtype):
                raise KernelLayoutError(f"{self.name}: {row.name!r} is {row.type} in C++, and not {value.dtype}")
            arrays.append(value)
        return arrays


class Kernel(Table):
    """A kernel as `jax.ffi.ffi_call` knows it, once the library is loaded."""

    __slots__ = ()

    @property
    def symbol(self) -> str:
        """The function in the library."""
        return f"Penstock{self.name}"

    @property
    def target(self) -> str:
        return "penstock" + "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in self.name)

    def __call__(
        self, operands: Mapping[str, Any], results: Mapping[str, jax.ShapeDtypeStruct], **attributes: Any
    ) -> list[jax.Array]:
        """Calls the kernel. Returns its results, and then the operands that it has updated in place.

        Raises:
            KernelLayoutError: something is missing or not declared, or an operand or result has another type.
        """
        arrays, types = self.arrays(operands), [result for _, result in self.in_order(results, "result")]
        names, aliases = [row.name for row in self.having("operand")], {}
        for row in self.having("update"):
            aliases[names.index(row.name)] = len(types)
            types.append(jax.typeof(operands[row.name]))
        call = jax.ffi.ffi_call(self.target, types, input_output_aliases=aliases)
        return list(call(*arrays, **self.attributes(attributes)))

    def attributes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns attributes in their C++ types. Raises KernelLayoutError if one is missing or not declared."""
        return {row.name: _as_attribute(row.type, value) for row, value in self.in_order(given, "attribute")}


def _as_attribute(kind: str, value: Any) -> Any:
    return np.array(value, _SPANS[kind]).ravel() if kind in _SPANS else _SCALARS[kind](value)


BATCH_ROWS = rows("operand", S32, "slots", "kv_lens", "page_indices", "cu_q_lens", "num_seqs")
_ATTENTION_OPTIONS = (
    LayoutRow("attribute", FLOAT, "scale"),
    LayoutRow("attribute", INTEGER, "window"),
    LayoutRow("attribute", FLOAT, "soft_cap"),
)
ATTENTION = Kernel(
    "RaggedAttention",
    (
        *rows("operand", ANY, "q", "k", "v", "keys", "values"), *BATCH_ROWS, *rows("operand", F32, "sinks"),
        *rows("result", ANY, "out"), *rows("update", ANY, "keys", "values"), *_ATTENTION_OPTIONS,
    ),
)  # fmt: skip
ATTENTION_INT8 = Kernel(
    "RaggedAttentionInt8",
    (
        *rows("operand", ANY, "q", "k", "v", "keys", "values"), *rows("operand", F32, "key_scales", "value_scales"),
        *BATCH_ROWS, *rows("operand", F32, "sinks"),
        *rows("result", ANY, "out"), *rows("update", ANY, "keys", "values"),
        *rows("update", F32, "key_scales", "value_scales"), *_ATTENTION_OPTIONS,
    ),
)  # fmt: skip
MATMUL = Kernel(
    "PackedMatmul",
    (
        *rows("operand", ANY, "x", "weights"), *rows("operand", F32, "bias"), *rows("operand", S32, "num_rows"),
        *rows("result", ANY, "y"), *rows("attribute", INTEGER, "gate"),
    ),
)  # fmt: skip
GROUPED_MATMUL = Kernel(
    "GroupedMatmul",
    (
        *rows("operand", ANY, "x", "weights"), *rows("operand", F32, "bias"), *rows("operand", S32, "group_sizes"),
        *rows("result", ANY, "y"), *rows("attribute", INTEGER, "gate"),
    ),
)  # fmt: skip
QUANTIZED_MATMUL = Kernel(
    "QuantizedMatmul",
    (
        *rows("operand", ANY, "x", "codes", "scales", "offsets"),
        *rows("operand", F32, "bias"), *rows("operand", S32, "group_sizes"),
        *rows("result", ANY, "y"), *rows("result", U8, "bytes"), *rows("result", F32, "row_scales"),
        *rows("result", S32, "row_sums"),
        *rows("attribute", INTEGER, "bits", "offset", "gate"),
    ),
)  # fmt: skip
HALVES = Kernel(
    "Halves",
    (
        *rows("operand", ANY, "x"), *rows("update", ANY, "x"),
        *rows("attribute", INTEGERS, "integers"), *rows("attribute", FLOATS, "floats"),
    ),
)  # fmt: skip
ROUTE = Kernel(
    "Route",
    (
        *rows("operand", F32, "logits", "correction"),
        *rows("result", S32, "chosen"), *rows("result", F32, "weights"),
        *rows("attribute", BOOL, "is_sigmoid", "is_normalized"), *rows("attribute", FLOAT, "scale"),
        *rows("attribute", INTEGER, "groups", "groups_chosen"),
    ),
)  # fmt: skip
GROUP_ROWS = Kernel(
    "GroupRows",
    (
        *rows("operand", ANY, "x"), *rows("operand", S32, "chosen"),
        *rows("result", ANY, "rows"), *rows("result", S32, "places", "group_sizes"),
    ),
)  # fmt: skip
SUM_ROWS = Kernel(
    "SumRows",
    (
        *rows("operand", F32, "rows"), *rows("operand", S32, "places"), *rows("operand", F32, "weights"),
        *rows("result", F32, "y"),
    ),
)  # fmt: skip
SURVEY = Kernel(
    "Survey",
    (*rows("operand", F32, "logits"), *rows("result", S32, "places"), *rows("result", PRED, "are_sound")),
)
KERNELS = (
    ATTENTION, ATTENTION_INT8, MATMUL, GROUPED_MATMUL, QUANTIZED_MATMUL, HALVES, ROUTE, GROUP_ROWS, SUM_ROWS, SURVEY,
)  # fmt: skip

LINEAR = Table("Linear", (*rows("operand", ANY, "weights", "scales", "offsets"), *rows("operand", F32, "bias")))
STATES = Table("States", rows("operand", S32, "cu_q_lens", "num_seqs", "positions", "reads", "ends", "writes"))
GROUPS = {table.name: table for table in (LINEAR, STATES)}
"""The tables of arrays that other tables include as a group."""

GATE_NAMES = ("none", "silu", "gelu_tanh", "gelu", "relu")
"""The activations that matmuls have built in, by their numbers."""

ENUMERATIONS = (Table("Gate", rows("choice", "", *GATE_NAMES)), Table("Offset", rows("choice", "", *OFFSETS)))


def batch_arrays(batch: Any) -> dict[str, jax.Array]:
    """Returns what kernels read of a `RaggedBatch`."""
    return {row.name: getattr(batch, row.name) for row in BATCH_ROWS}


def check_layout(text: str, tables: Sequence[Table]) -> None:
    """Compares the tables with those of a library, as layout.cc writes them.

    Raises:
        KernelLayoutError: they differ; the message names the first row that does.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            rows = found.setdefault(line.strip("[]"), [])
        else:
            rows.append(line)
    _compare("the list of tables", found, (table.name for table in tables))
    for table in tables:
        _compare(table.name, found[table.name], map(str, table.rows))


def _compare(name: str, theirs: Iterable[str], ours: Iterable[str]) -> None:
    for number, (their, our) in enumerate(zip_longest(theirs, ours), 1):
        if their != our:
            raise KernelLayoutError(
                f"{name}: row {number} is {_shown(their)} in the library of C++ kernels, and {_shown(our)} in Python"
            )


def _shown(row: str | None) -> str:
    return "missing" if row is None else repr(row)
