"""The C++ kernels on other processors: what they compute there, and which instructions this one's library has."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.engine.formats.packing import OFFSETS, PLANES, Packing
from penstock.engine.kernels.cpu.compilation import FLAGS as COMPILER_FLAGS
from penstock.engine.kernels.cpu.compilation import build_here
from penstock.engine.kernels.cpu.processor_kinds import TARGETS, features
from penstock.engine.models.cpu.held import NOT_GATED
from penstock.engine.models.cpu.quantized import quantized_panels
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.quantized import Quantized, quantized_rows
from tests.support.packages import ROOT

SOURCES = ROOT / "engine" / "kernels" / "cpu"
BUILD_DIR = Path.home() / ".cache" / "penstock" / "native"
CPUINFO = Path("/proc/cpuinfo")
FLAGS = frozenset(CPUINFO.read_text().split()) if CPUINFO.exists() else frozenset()
IS_X86 = platform.machine() == "x86_64"

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@cache
def functions(library: Path) -> dict[str, str]:
    """Returns the disassembly of each function, by name."""
    listing = subprocess.run(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    parts = re.split(r"^[0-9a-f]+ <(.*)>:$", listing, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@needs_compiler
@pytest.mark.skipif(shutil.which("objdump") is None, reason="NOT CHECKED, there is no objdump: apt install binutils")
@pytest.mark.parametrize(
    ("flag", "name", "instruction"),
    [
        ("avx512_vnni", r"penstock::DotTile<6, ", "vpdpbusd"),
        ("avx512_vnni", r"penstock::DotTile<1, ", "vpdpbusd"),
        ("avx512_vnni", r"penstock::SmallDotTile<6, ", "vpdpbusd"),
        ("avx512_vnni", r"penstock::attention::Multiply\w*<penstock::attention::KeyBytes\b", "vpdpbusd"),
        ("avx512_vnni", r"penstock::attention::Multiply\w*<penstock::attention::ValueBytes\b", "vpdpbusd"),
        ("avx512_bf16", r"penstock::attention::Multiply\w*<penstock::attention::BFloat16Pairs\b", "vdpbf16ps"),
        ("avx512_bf16", r"penstock::ScaledTile<6, true, penstock::BFloat16, penstock::BFloat16>", "vdpbf16ps"),
        ("avx512_bf16", r"penstock::FewTile<1, penstock::BFloat16, 4>", "vdpbf16ps"),
        ("avx512_bf16", r"penstock::Multiply<6, \(penstock::Fetch\)2>\(penstock::BFloat16", "vdpbf16ps"),
    ],
)
def test_the_library_has_the_instructions_that_it_claims(flag: str, name: str, instruction: str) -> None:
    if flag not in FLAGS:
        pytest.skip(f"NOT CHECKED, the processor has no {flag}")
    found = {function: text for function, text in functions(build_here(BUILD_DIR)).items() if re.search(name, function)}
    assert found, f"no function is called {name}"
    assert any(re.search(rf"\b{instruction}\b.*%zmm", text) for text in found.values())


AMX = TARGETS["x86_64"][0].flags
EMULATED = ("-mno-avx512bf16", "-DPENSTOCK_TILES=2")
PROCESSORS: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {  # compiler, flags, what runs it
    "this one": ("g++", ("-march=native",), ()),
    "haswell": ("g++", ("-march=haswell",), ()),
    "skylake-avx512": ("g++", ("-march=skylake-avx512",), ()),
    "x86-64": ("g++", ("-march=x86-64",), ()),
    "amx": ("g++", AMX, ()),
    "emulated tiles": ("g++", ("-march=native", *EMULATED), ()),
    "haswell with emulated tiles": ("g++", ("-march=haswell", *EMULATED), ()),
    "aarch64": ("aarch64-linux-gnu-g++", ("-static",), ("qemu-aarch64",)),
    "aarch64 with dot products": (
        "aarch64-linux-gnu-g++",
        ("-static", "-march=armv8.2-a+dotprod"),
        ("qemu-aarch64", "-cpu", "max"),
    ),
    "aarch64 with bf16": (
        "aarch64-linux-gnu-g++",
        ("-static", *TARGETS["aarch64"][0].flags),
        ("qemu-aarch64", "-cpu", "max"),
    ),
}
QUICK = ("this one", "haswell", "amx", "emulated tiles")


@cache
def built(name: str, directory: Path) -> tuple[list[str], int]:
    """Returns a command, and the width of panels there."""
    compiler, flags, runner = PROCESSORS[name]
    for program in (compiler, *runner[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"NOT CHECKED, there is no {program}: apt install g++-aarch64-linux-gnu qemu-user")
    if compiler == "g++" and not IS_X86 and name != "this one":
        pytest.skip("NOT CHECKED, the processor is not x86")
    if name == "amx" and not TARGETS["x86_64"][0].features <= features():
        pytest.skip("NOT CHECKED, the processor has no AMX, or this process may not use it")
    if name == "skylake-avx512" and "avx512bw" not in FLAGS:
        pytest.skip("NOT CHECKED, the processor has no AVX-512")
    built = directory / name.replace(" ", "-")
    common = [flag for flag in COMPILER_FLAGS if flag != "-fPIC"]
    command = [compiler, *common, *flags, f"-I{SOURCES}", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*command, str(Path(__file__).parent / "native_core.cc"), "-o", str(built)], check=True)
    found = [*runner, str(built)]
    return found, int(subprocess.run(found, capture_output=True, check=True).stdout)


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(not IS_X86, reason="NOT CHECKED, the processor is not x86")
def test_the_kernels_for_amx_multiply_by_tiles() -> None:
    flags = ["g++", *COMPILER_FLAGS, *AMX, f"-I{SOURCES}", f"-I{jax.ffi.include_dir()}", "-S", "-o", "-"]
    source = str(Path(__file__).parent / "native_core.cc")
    listing = subprocess.run([*flags, source], capture_output=True, text=True, check=True).stdout
    for instruction in ("tdpbf16ps", "tdpbssd"):
        found = set(re.findall(rf"{instruction}\s+(%tmm\d), (%tmm\d), (%tmm\d)", listing))
        assert {(f"%tmm{6 + column}", f"%tmm{4 + row}", f"%tmm{2 * row + column}")
                for row in (0, 1) for column in (0, 1)} <= found  # fmt: skip
    assert "vdpbf16ps" not in listing


KINDS = ("float32", "bfloat16", "float16", "int8")
CASES: dict[str, Packing] = {
    "int8 per channel": Packing("int8", 0),
    "int8 in groups with zeros": Packing("int8", 32, offset="zeros"),
    "int4 in groups": Packing("int4", 32),
    "int4 with minimums": Packing("int4", 128, offset="minimums"),
}
ROWS, COLUMNS, DEPTH = 101, 70, 384


class Weights:
    """Weights for `quantized_panels`, and the values that they stand for."""

    def __init__(self, packing: Packing) -> None:
        rng = np.random.default_rng(0)
        self.packing = packing
        groups = packing.num_groups(DEPTH)
        if packing.code == "int8":
            codes = rng.integers(-128, 128, (COLUMNS, DEPTH)).astype(np.int8)
            self.codes = codes
        else:
            codes = rng.integers(0, 16, (COLUMNS, DEPTH)).astype(np.uint8)
            self.codes = codes[:, ::2] | codes[:, 1::2] << 4
        self.scales = rng.uniform(0.5, 2, (COLUMNS, groups)).astype(np.float32)
        self.zeros, self.minimums = rng.integers(-9, 9, (COLUMNS, groups)), rng.uniform(-2, 2, (COLUMNS, groups))
        scales: Any
        scales, zeros, minimums = (
            np.repeat(of, DEPTH // groups, axis=1) for of in (self.scales, self.zeros, self.minimums)
        )
        values = codes.astype(np.float64)
        offsets: dict[str, Any] = {"none": 8.0 * (packing.code == "int4"), "zeros": zeros, "minimums": 0}
        values -= offsets[packing.offset]
        self.values: np.ndarray = values * scales - (minimums if packing.offset == "minimums" else 0)

    def panels(self, width: int) -> dict[str, jax.Array]:
        """Returns codes, scales and offsets, if there are any, in the layout of the kernel."""
        leaves = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "minimums": self.minimums}
        _, arrays = quantized_panels([Linear(Quantized(self.packing, (COLUMNS, DEPTH)), leaves)], width, NOT_GATED)
        return arrays


def computed(name: str, kind: str, packing: Packing, x: np.ndarray, directory: Path) -> np.ndarray:
    command, width = built(name, directory)
    weights = Weights(packing)
    panels = weights.panels(width)
    header = [KINDS.index(kind), PLANES[packing.code][0], OFFSETS.index(packing.offset), *x.shape]
    group = packing.group or DEPTH
    arrays = [np.array([*header, group, panels["codes"].shape[0]], np.int64), x, *map(np.asarray, panels.values())]
    (directory / "case").write_bytes(b"".join(array.tobytes() for array in arrays))
    subprocess.run([*command, str(directory / "case"), str(directory / "result")], check=True)
    return np.fromfile(directory / "result", np.float32).reshape(len(x), -1)[:, :COLUMNS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processors")


@needs_compiler
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROCESSORS]
)
def test_every_processor_computes_the_products(name: str, directory: Path) -> None:
    x = np.random.default_rng(1).normal(size=(ROWS, DEPTH)).astype(ml_dtypes.bfloat16).astype(np.float32)
    codes, scales = quantized_rows(jnp.asarray(x))
    rounded = np.asarray(codes, np.float64) * np.asarray(scales)
    for packing in CASES.values():
        values = Weights(packing).values
        for kind in KINDS:
            expected = (rounded if kind == "int8" else x.astype(np.float64)) @ values.T
            found = computed(name, kind, packing, x, directory)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
            np.testing.assert_array_equal(computed(name, kind, packing, x[:3], directory), found[:3])


@needs_compiler
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROCESSORS]
)
def test_float16_is_that_of_ieee_on_every_processor(name: str, directory: Path) -> None:
    """Tests each float16 number, what lies halfway between neighbours and just beside it, and numbers of any size."""
    command, _ = built(name, directory)
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    halfway = (finite[1:] + finite[:-1]) / 2
    any_size = np.random.default_rng(3).integers(0, 2**32, 2**16, np.uint32).view(np.float32)
    x = np.concatenate([every, halfway, np.nextafter(halfway, np.inf), np.nextafter(halfway, -np.inf), any_size])
    x = np.resize(x, (-(-len(x) // 16), 16))
    x.tofile(directory / "floats")
    subprocess.run([*command, str(directory / "floats"), str(directory / "rounded"), "float16"], check=True)
    found = np.fromfile(directory / "rounded", np.float32).reshape(-1, 2, 16)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32).ravel()
    for way in range(2):
        got = found[:, way].ravel()
        np.testing.assert_array_equal(got, expected)
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))


@needs_compiler
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROCESSORS]
)
def test_whole_numbers_are_the_same_to_the_bit_on_every_processor(name: str, directory: Path) -> None:
    x = np.random.default_rng(2).normal(size=(7, DEPTH)).astype(np.float32)
    x[0], x[1, 5] = 0, 100
    codes, scales = (np.asarray(of) for of in quantized_rows(jnp.asarray(x)))
    for packing in (Packing("int8", 0), Packing("int4", 0)):
        weights = Weights(packing)
        sums = codes.astype(np.int64) @ (weights.values / weights.scales).astype(np.int64).T
        expected = sums.astype(np.float32) * weights.scales[:, 0] * scales
        np.testing.assert_array_equal(computed(name, "int8", packing, x, directory), expected)
