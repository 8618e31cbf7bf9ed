"""Tiles, emulated tiles and vectors sum bf16 in one order, which a model in numpy writes down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.engine.kernels.test_native_processors import built, needs_compiler
from tests.support.packages import ROOT

BLOCK = 32  # features between two additions to a sum
SMALLEST = np.float32(2.0**-126)


def flushed(x: np.ndarray) -> np.ndarray:
    """Rounds to f32, with zeros for denormals."""
    rounded = x.astype(np.float32)
    return np.where(np.abs(rounded) < SMALLEST, np.float32(0), rounded)


def in_tile_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Returns x @ w as TDPBF16PS sums it. Products of bf16 and their sum with an f32 are exact enough in f64."""
    x, w = flushed(x).astype(np.float64), flushed(w).astype(np.float64)
    sums = np.zeros((len(x), w.shape[1]), np.float32)
    for block in range(0, w.shape[0], BLOCK):
        chains = np.zeros((2, *sums.shape), np.float32)
        for k in range(block, min(block + BLOCK, w.shape[0])):
            chains[k % 2] = flushed(np.outer(x[:, k], w[k]) + chains[k % 2])
        sums = flushed(sums + flushed(chains[0] + chains[1]))
    return sums


def cases(depth: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws x and weights in bf16: sums of any size, and some inputs, products and sums that are denormal."""
    rng = np.random.default_rng(depth)
    x, w = (rng.normal(size=shape) * 2.0 ** rng.integers(-4, 4, shape) for shape in ((96 + 5, depth), (depth, columns)))
    x[::3] *= 2.0**-64
    w[:, ::4] *= 2.0**-64
    x[1, ::5] = w[::7, 1] = 2.0**-130
    return x.astype(ml_dtypes.bfloat16).astype(np.float32), w.astype(ml_dtypes.bfloat16).astype(np.float32)


def products(name: str, x: np.ndarray, w: np.ndarray, directory: Path) -> np.ndarray:
    command, width = built(name, directory)
    depth, columns = w.shape
    panels = -(-columns // width)
    padded = np.pad(w, ((0, 0), (0, panels * width - columns)))
    pairs = padded.reshape(depth // 2, 2, panels, width).transpose(2, 0, 3, 1).astype(ml_dtypes.bfloat16)
    header = np.array([1, 16, 0, *x.shape, depth, panels], np.int64)
    (directory / "case").write_bytes(header.tobytes() + x.astype(np.float32).tobytes() + pairs.tobytes())
    subprocess.run([*command, str(directory / "case"), str(directory / "result")], check=True)
    return np.fromfile(directory / "result", np.float32).reshape(len(x), -1)[:, :columns]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiles")


@needs_compiler
@pytest.mark.parametrize(
    "name", ["amx", "emulated tiles", pytest.param("haswell with emulated tiles", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("depth", "columns"), [(2, 5), (38, 70), (1094, 130)])
def test_any_number_of_rows_has_the_sums_of_the_model(name: str, depth: int, columns: int, directory: Path) -> None:
    """From 5 rows on tiles sum, below it vectors; 96 rows are a task."""
    x, w = cases(depth, columns)
    expected = in_tile_order(x, w)
    assert (expected == 0).any()  # some are flushed
    for rows in [*range(1, 71), len(x)] if depth == 38 else [1, 2, 3, 4, 5, 16, 17, 33, len(x)]:
        np.testing.assert_array_equal(products(name, x[:rows], w, directory), expected[:rows])


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param("aarch64 with bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("depth", "columns"), [(2, 5), (38, 70), (1094, 30)])
def test_rows_of_arm_have_the_same_sums_beside_others(name: str, depth: int, columns: int, directory: Path) -> None:
    """Two rows are summed by BFMMLA, and one by BFDOT."""
    x, w = cases(depth, columns)
    together = products(name, x, w, directory)
    np.testing.assert_allclose(together, in_tile_order(x, w), rtol=0, atol=1e-5 * np.abs(together).max())
    for rows in range(1, 8):
        np.testing.assert_array_equal(products(name, x[:rows], w, directory), together[:rows])


@needs_compiler
@pytest.mark.slow
def test_an_engine_has_the_same_bits_by_tiles_whatever_else_a_step_has() -> None:
    """Where there is AMX, the tests of whole engines run on it. Here they run on the emulation."""
    tests = ("tests/engine/whole/test_engine_bits.py", "tests/engine/models/test_packed_quantized.py")
    command = [sys.executable, "-m", "tests.engine.kernels.emulated_tiles", "-q", "-x", "-m", "slow or not slow"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # with torch, which helpers that write checkpoints import
    told = subprocess.run(
        [*command, "-k", "bfloat16", *tests], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout[-2000:]
