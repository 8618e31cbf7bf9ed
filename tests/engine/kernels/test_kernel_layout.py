"""Python and the C++ kernels declare alike what they pass each other: a slip on either side is an error at load."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from penstock.engine.errors import KernelLayoutError
from penstock.engine.kernels import cpu
from penstock.engine.kernels.cpu import NativeLibrary, value_or_empty
from penstock.engine.kernels.cpu.compilation import COMPILERS, SOURCES
from penstock.engine.kernels.cpu.halves import HALF_FLOATS, HALF_KINDS, Half, run_halves
from penstock.engine.kernels.cpu.layout import GROUPS, KERNELS, SURVEY, LayoutRow, Table, check_layout
from penstock.engine.kernels.cpu.library import TABLES
from tests.support.needs import needs_compiler

FOLDER = Path(cpu.__file__).parent
TYPES = ("AnyBuffer", "F32", "S32", "U8", "Pred", "int64_t", "float", "bool", "Integers", "Floats")
NAMES = [table.name for table in TABLES]


def text_of(tables: Iterator[Table] | tuple[Table, ...] = TABLES) -> str:
    return "".join(f"[{table.name}]\n" + "".join(f"{row}\n" for row in table.rows) for table in tables)


def slips(rows: tuple[LayoutRow, ...]) -> Iterator[tuple[LayoutRow, ...]]:
    """Yields rows with each slip that one side can make."""
    for i, row in enumerate(rows):
        yield rows[:i] + rows[i + 1 :]
        yield (*rows[:i], row, *rows[i:])
        yield (*rows[:i], replace(row, name=f"{row.name}_too"), *rows[i + 1 :])
        for other in {*TYPES, *GROUPS} - {row.type}:
            yield (*rows[:i], replace(row, type=other), *rows[i + 1 :])
        for j in range(i + 1, len(rows)):
            yield (*rows[:i], rows[j], *rows[i + 1 : j], row, *rows[j + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_any_slip_in_a_table_names_the_table_and_the_row(name: str) -> None:
    text, number = text_of(), NAMES.index(name)
    theirs = TABLES[number].rows
    for rows in slips(theirs):
        with pytest.raises(KernelLayoutError) as raised:
            check_layout(text, (*TABLES[:number], replace(TABLES[number], rows=rows), *TABLES[number + 1 :]))
        pairs = enumerate(zip_longest(theirs, rows), 1)
        place, their, our = next((i, their, our) for i, (their, our) in pairs if their != our)
        their_row, our_row = ("missing" if row is None else repr(str(row)) for row in (their, our))
        told = f"row {place} is {their_row} in the library of C++ kernels, and {our_row} in Python"
        assert str(raised.value) == f"{name}: {told}"


def test_a_table_that_one_side_lacks_or_has_elsewhere_is_named() -> None:
    for i, name in enumerate(NAMES):
        with pytest.raises(KernelLayoutError, match=rf"^the list of tables: row {i + 1} is '{name}' in the library"):
            check_layout(text_of(), (*TABLES[:i], *TABLES[i + 1 :]))
        with pytest.raises(KernelLayoutError, match=rf"^the list of tables: row {i + 1} .*'{name}' in Python"):
            check_layout(text_of((*TABLES[:i], *TABLES[i + 1 :])), TABLES)
    with pytest.raises(KernelLayoutError, match=r"^the list of tables"):
        check_layout(text_of(tuple(reversed(TABLES))), TABLES)


def built(folder: Path, old: str = "", new: str = "") -> Path:
    """Compiles layout.cc alone, with a part of layout.h replaced."""
    header = (FOLDER / "layout.h").read_text()
    assert not old or header.count(old) == 1
    (folder / "layout.h").write_text(header.replace(old, new) if old else header)
    shutil.copy(FOLDER / "layout.cc", folder)
    library = folder / "layout.so"
    compiler = next(path for name in COMPILERS if (path := shutil.which(name)))
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", folder / "layout.cc", "-o", library], check=True)
    return library


SLIPS = {  # the text of layout.h, what replaces it, and where the error is
    "a row of a group dropped": (" OPERAND(S32, ends)", "", "States: row 5"),
    "a type changed": ("OPERAND(F32, correction)", "OPERAND(AnyBuffer, correction)", "Route: row 2"),
    "an array renamed": ("GROUP(Linear, down)", "GROUP(Linear, down_again)", "FeedForward: row 6"),
}
SWAPS = [
    ("CACHE(AnyBuffer, q_kept)", "CACHE(AnyBuffer, k_kept)", "DeltaNet: row 1"),
    ("NUMBER(int64_t, num_heads)", "NUMBER(int64_t, head_dim)", "HalfIntegers: row 11"),
    ("NUMBER(float, eps)", "NUMBER(float, residual_scale)", "HalfFloats: row 1"),
    ("ATTRIBUTE(int64_t, groups)", "ATTRIBUTE(int64_t, groups_chosen)", "Route: row 8"),
    ("HALF(ShortConv)", "HALF(DeltaNet)", "the list of tables: row 13"),
    ("CHOICE(kZeros, zeros)", "CHOICE(kMinimums, minimums)", "Offset: row 2"),
    ("OPERAND(S32, slots)", "OPERAND(S32, kv_lens)", "RaggedAttention: row 6"),
]
SLIPS |= {f"{a} after {b}": (f"{a} {b}", f"{b} {a}", where) for a, b, where in SWAPS}


@needs_compiler
def test_the_tables_in_cpp_are_those_in_python(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(built(tmp_path)))
    library.PenstockLayout.restype = ctypes.c_char_p
    assert library.PenstockLayout().decode() == text_of()


@needs_compiler
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_cpp_is_an_error_at_load(slip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, where = SLIPS[slip]
    library = built(tmp_path, old, new)
    monkeypatch.setattr("penstock.engine.kernels.cpu.library.shipped_library", lambda: library)
    for setting in ("auto", "native"):
        monkeypatch.setattr("penstock.engine.kernels.cpu.library._loaded", {})
        monkeypatch.setattr("penstock.engine.kernels.cpu.library._found", {})
        with pytest.raises(KernelLayoutError, match=rf"^{where} is "):
            NativeLibrary(tmp_path).load_for("matmul", setting)


def test_all_kernels_are_made_from_the_tables() -> None:
    sources = {file.name: file.read_text() for file in SOURCES}
    defined = re.findall(r"PENSTOCK_DEFINE_KERNEL\((\w+)\)|HANDLER_SYMBOL\(Penstock(\w+),", "".join(sources.values()))
    assert sorted(a or b for a, b in defined) == sorted(kernel.name for kernel in KERNELS)
    for text in sources.values():  # no parameter list by hand
        assert not re.search(r"\.(Arg|Ret|Attr)<", text)
    calls = [file for file in FOLDER.parents[1].rglob("*.py") if "ffi_call(" in file.read_text()]
    assert sorted(file.name for file in calls) == ["halves.py", "layout.py"]


def example(row: LayoutRow) -> Any:
    dtype = {"S32": jnp.int32, "Pred": jnp.bool_, "U8": jnp.uint8}.get(row.type, jnp.float32)
    return {r.name: example(r) for r in GROUPS[row.type].rows} if row.role == "group" else jnp.zeros((1,), dtype)


def examples(table: Table, *roles: str) -> dict[str, Any]:
    return {row.name: example(row) for row in table.having(*roles)}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_call_that_a_table_does_not_declare_is_refused(kernel: Any) -> None:
    operands, results = examples(kernel, "operand"), examples(kernel, "result")
    attributes = dict.fromkeys((row.name for row in kernel.having("attribute")), 0)
    for name in operands:
        with pytest.raises(KernelLayoutError, match=f"^{kernel.name}: '{name}' is missing"):
            kernel({key: value for key, value in operands.items() if key != name}, results, **attributes)
    for row in kernel.having("operand"):
        if row.type != "AnyBuffer":
            wrong = {**operands, row.name: jnp.zeros((1,), jnp.float16)}
            with pytest.raises(KernelLayoutError, match=f"^{kernel.name}: '{row.name}' is {row.type} in C.*float16"):
                kernel(wrong, results, **attributes)
    for name in results:
        with pytest.raises(KernelLayoutError, match=f"^{kernel.name}: '{name}' is missing"):
            kernel(operands, {key: value for key, value in results.items() if key != name}, **attributes)
    for name in attributes:
        with pytest.raises(KernelLayoutError, match=f"^{kernel.name}: '{name}' is missing"):
            kernel(operands, results, **{key: 0 for key in attributes if key != name})
    with pytest.raises(KernelLayoutError, match=f"^{kernel.name}: 'more' is not declared"):
        kernel({**operands, "more": value_or_empty(None)}, results, **attributes)
    with pytest.raises(KernelLayoutError, match=f"^{kernel.name}: 'more' is not declared"):
        kernel(operands, results, **attributes, more=0)


@pytest.mark.parametrize("kind", HALF_KINDS, ids=lambda kind: kind.name)
def test_a_half_that_its_table_does_not_declare_is_refused(kind: Table) -> None:
    assert list(kind.having("cache")) == list(kind.rows[: len(kind.having("cache"))])  # as `run_halves` counts them
    x, arrays = jnp.zeros((1, 1)), examples(kind, "operand", "cache", "group")
    for name in arrays:
        with pytest.raises(KernelLayoutError, match=f"^{kind.name}: '{name}' is missing"):
            run_halves(x, [Half(kind, {key: value for key, value in arrays.items() if key != name}, {})])
    for row in kind.having("group"):
        for of_group in GROUPS[row.type].rows:
            part = {key: value for key, value in arrays[row.name].items() if key != of_group.name}
            with pytest.raises(KernelLayoutError, match=f"^{row.type}: '{of_group.name}' is missing"):
                run_halves(x, [Half(kind, {**arrays, row.name: part}, {})])
    with pytest.raises(KernelLayoutError, match=f"^{kind.name}: 'more' is not declared"):
        run_halves(x, [Half(kind, {**arrays, "more": x}, {})])
    with pytest.raises(KernelLayoutError, match=f"^{kind.name}: the number 'epsilon' is not declared"):
        run_halves(x, [Half(kind, arrays, {"epsilon": 1e-5})])


def test_numbers_arrive_in_the_order_of_their_table() -> None:
    """A call as XLA sees it: arrays by table, and each number in the place that its row has."""
    kind = HALF_KINDS[0]
    arrays = examples(kind, "operand", "cache", "group")
    numbers = {row.name: float(i) for i, row in enumerate(HALF_FLOATS.rows, 1)}
    traced = jax.make_jaxpr(lambda x: run_halves(x, [Half(kind, arrays, numbers)])[0])(jnp.zeros((1, 1)))
    (call,) = (equation for equation in traced.jaxpr.eqns if equation.primitive.name == "ffi_call")
    assert dict(call.params["attributes"])["floats"].val.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert call.params["target_name"] == "penstock_halves"
    assert SURVEY.target == "penstock_survey"
