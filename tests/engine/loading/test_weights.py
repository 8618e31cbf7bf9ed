"""Parameters from safetensors files: transposed, repeated, stacked, and only a device's share of each."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine import CheckpointError
from penstock.engine.loading.rows import FusedRows, stored_part
from penstock.engine.loading.weights import ParameterSource, Stored, WeightFiles, open_weights

RNG = np.random.default_rng(0)
F32 = jnp.dtype("float32")


def saved(path: Path, **tensors: np.ndarray) -> dict[str, Stored]:
    save_file(tensors, path)
    return {name: Stored(path, array.shape, "F32") for name, array in tensors.items()}


def test_a_kernel_is_transposed_and_a_bias_is_not(tmp_path: Path) -> None:
    kernel, bias = (RNG.normal(size=shape).astype(np.float32) for shape in ((6, 4), (6,)))  # stored [out, in]
    stored = saved(tmp_path / "a.safetensors", kernel=np.ascontiguousarray(kernel), bias=bias)
    source = ParameterSource(("head", "kernel"), (4, 6), F32, ("kernel",), num_spread=0)
    assert source.stored_shape == (6, 4)
    with WeightFiles(stored) as files:
        np.testing.assert_array_equal(files.array(source, None), kernel.T)
        of_bias = ParameterSource(("head", "bias"), (6,), F32, ("bias",), num_spread=0)
        np.testing.assert_array_equal(files.array(of_bias, None), bias)


def test_layers_of_a_stack_come_from_a_tensor_each(tmp_path: Path) -> None:
    layers = [RNG.normal(size=(6, 4)).astype(np.float32) for _ in range(3)]
    stored = saved(tmp_path / "a.safetensors", **{f"layer{i}": layer for i, layer in enumerate(layers)})
    path = ("blocks", 0, "mlp", "up", "kernel")
    source = ParameterSource(path, (3, 4, 6), F32, ("layer0", "layer1", "layer2"), num_spread=1)
    assert source.stored_shape == (6, 4)
    with WeightFiles(stored) as files:
        np.testing.assert_array_equal(files.array(source, None), np.stack([layer.T for layer in layers]))


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_each_kv_head_is_repeated_side_by_side(tmp_path: Path, copies: int) -> None:
    head_dim, heads = 2, RNG.normal(size=(3, 2, 5)).astype(np.float32)  # heads, head_dim, in
    stored = saved(tmp_path / "a.safetensors", k=heads.reshape(6, 5))
    path = ("blocks", 0, "attention", "k", "kernel")
    source = ParameterSource(path, (5, 6 * copies), F32, ("k",), num_spread=0, copies=copies, head_dim=head_dim)
    with WeightFiles(stored) as files:
        expected = np.repeat(heads, copies, axis=0).reshape(-1, 5).T
        np.testing.assert_array_equal(files.array(source, None), expected)
        for start in range(0, 6 * copies, head_dim):  # what one of several devices reads
            share = files._share(source, (slice(None), slice(start, start + head_dim)))
            np.testing.assert_array_equal(share, expected[:, start : start + head_dim])


@pytest.mark.parametrize("is_stacked", [False, True])
def test_parameters_that_are_fused_are_rows_of_one_tensor(is_stacked: bool, tmp_path: Path) -> None:
    layers = [RNG.normal(size=(9, 4)).astype(np.float32) for _ in range(2 if is_stacked else 1)]
    stored = saved(tmp_path / "a.safetensors", **{f"layer{i}": layer for i, layer in enumerate(layers)})
    path, names = ("blocks", 0, "mlp", "up", "kernel"), tuple(stored)
    shape = (2, 4, 5) if is_stacked else (4, 5)
    source = ParameterSource(path, shape, F32, names, num_spread=int(is_stacked), rows=FusedRows(first=3, total=9))
    assert source.stored_shape == (9, 4)
    assert source.num_bytes(stored) == 5 * 4 * 4 * len(layers)
    expected = np.stack([layer[3:8].T for layer in layers])
    with WeightFiles(stored) as files:
        np.testing.assert_array_equal(files.array(source, None), expected if is_stacked else expected[0])


@pytest.mark.parametrize("is_stacked", [False, True])
def test_parameters_that_alternate_in_one_tensor_are_its_every_other_row(is_stacked: bool, tmp_path: Path) -> None:
    layers = [RNG.normal(size=(3, 4, 10)).astype(np.float32) for _ in range(2 if is_stacked else 1)]
    stored = saved(tmp_path / "a.safetensors", **{f"layer{i}": layer for i, layer in enumerate(layers)})
    path = ("blocks", 0, "mlp", "experts", "up", "kernel")
    shape = (2, 3, 4, 5) if is_stacked else (3, 4, 5)
    source = ParameterSource(
        path,
        shape,
        F32,
        tuple(stored),
        num_spread=int(is_stacked),
        rows=FusedRows(first=1, total=10, step=2),
        is_plain=True,
    )
    assert source.stored_shape == (3, 4, 10)
    assert source.num_bytes(stored) == 3 * 4 * 5 * 4 * len(layers)
    expected = np.stack(layers)[..., 1::2].reshape(shape)
    with WeightFiles(stored) as files:
        np.testing.assert_array_equal(files.array(source, None), expected)
        index = (*[slice(None)] * (len(shape) - 3), slice(1, 3), slice(2, 4), slice(1, 4))  # what one device reads
        np.testing.assert_array_equal(files._share(source, index), expected[index])


@pytest.mark.parametrize("part", [0, 1, 2])
def test_parameters_that_take_turns_by_heads(part: int, tmp_path: Path) -> None:
    """Three heads have two rows of the first parameter, one of the second and three of the third."""
    tensor, widths = RNG.normal(size=(18, 4)).astype(np.float32), (2, 1, 3)
    stored = saved(tmp_path / "a.safetensors", tensor=tensor)
    first, width = sum(widths[:part]), widths[part]
    expected = tensor.reshape(3, 6, 4)[:, first : first + width].reshape(3 * width, 4).T
    rows = FusedRows.of([3 * width for width in widths], part, turns=3)
    source = ParameterSource(
        ("blocks", 0, "mlp", "up", "kernel"), expected.shape, F32, ("tensor",), num_spread=0, rows=rows
    )
    assert source.stored_shape == (18, 4)
    with WeightFiles(stored) as files:
        np.testing.assert_array_equal(files.array(source, None), expected)
        for start in range(3 * width):
            for stop in range(start, 3 * width + 1):
                share = files._share(source, (slice(1, 3), slice(start, stop)))
                np.testing.assert_array_equal(share, expected[1:3, start:stop])


@pytest.mark.parametrize("is_stacked", [False, True])
def test_rows_may_be_another_axis_than_the_last(is_stacked: bool, tmp_path: Path) -> None:
    layers = [RNG.normal(size=(9, 1, 4)).astype(np.float32) for _ in range(2 if is_stacked else 1)]
    stored = saved(tmp_path / "a.safetensors", **{f"layer{i}": layer for i, layer in enumerate(layers)})
    shape = (2, 5, 1, 4) if is_stacked else (5, 1, 4)
    path, rows = ("blocks", 0, "recurrence", "k_taps"), FusedRows(first=3, total=9, axis=-3)
    source = ParameterSource(path, shape, F32, tuple(stored), num_spread=int(is_stacked), rows=rows)
    assert source.stored_shape == (9, 1, 4)
    assert source.num_bytes(stored) == 5 * 4 * 4 * len(layers)
    expected = np.stack([layer[3:8] for layer in layers]).reshape(shape)
    with WeightFiles(stored) as files:
        np.testing.assert_array_equal(files.array(source, None), expected)


@pytest.mark.parametrize(
    ("rows", "size", "blocks"),
    [
        (FusedRows(first=8, total=20), 4, FusedRows(first=2, total=20)),
        (FusedRows(first=6, total=20), 4, None),
        (FusedRows(first=8, total=48, step=24, run=4), 4, FusedRows(first=2, total=48, step=6, run=1)),
        (FusedRows(first=8, total=48, step=24, run=6), 4, None),
        (FusedRows(first=1, total=48, step=2), 2, None),
    ],
)
def test_rows_in_blocks(rows: FusedRows, size: int, blocks: FusedRows | None) -> None:
    assert rows.counted_in_blocks(size) == blocks


@pytest.mark.parametrize("leaf", ["kernel", "bias"])
def test_a_share_of_fused_and_repeated_heads(leaf: str, tmp_path: Path) -> None:
    tensor = RNG.normal(size=(10, 5) if leaf == "kernel" else (10,)).astype(np.float32)
    stored = saved(tmp_path / "a.safetensors", qkv=tensor)
    path, shape = ("blocks", 0, "attention", "k", leaf), (5, 8) if leaf == "kernel" else (8,)
    source = ParameterSource(
        path, shape, F32, ("qkv",), num_spread=0, copies=2, head_dim=2, rows=FusedRows(first=4, total=10)
    )
    expected = np.repeat(tensor[4:8].reshape(2, 2, -1), 2, axis=0).reshape(8, -1).T.reshape(shape)
    with WeightFiles(stored) as files:
        for start in range(0, 8, 2):
            index = (slice(None),) * (len(shape) - 1) + (slice(start, start + 2),)
            np.testing.assert_array_equal(files._share(source, index), expected[index])


def test_a_share_of_repeated_heads_reads_only_the_stored_heads_in_it() -> None:
    read, cut = stored_part(slice(10, 12), 24, copies=4, head_dim=2)  # the second copy of the second head
    assert (read, cut) == (slice(2, 4), slice(2, 4))


@pytest.mark.parametrize("path", [("embedding",), ("head", "kernel")], ids=["embedding", "head"])
def test_rows_that_pad_a_vocabulary_are_zeros_and_in_no_file(tmp_path: Path, path: tuple[str, ...]) -> None:
    table = RNG.normal(size=(5, 3)).astype(np.float32)  # vocabulary, hidden
    stored = saved(tmp_path / "a.safetensors", table=table)
    expected = np.vstack([table, np.zeros((7, 3), np.float32)])
    is_kernel = path[-1] == "kernel"
    shape, padding = ((3, 5), (0, 7)) if is_kernel else ((5, 3), (7, 0))
    source = ParameterSource(path, shape, F32, ("table",), num_spread=0, padding=padding)
    assert source.padded_shape == ((3, 12) if is_kernel else (12, 3))
    assert source.stored_shape == (5, 3)
    with WeightFiles(stored) as files:
        for start in range(0, 12, 4):  # one of three devices has some of both, one nothing but padding
            rows = slice(start, start + 4)
            share = files._share(source, (slice(None), rows) if is_kernel else (rows, slice(None)))
            np.testing.assert_array_equal(share.T if is_kernel else share, expected[rows])


def test_a_stored_tensor_knows_its_bytes() -> None:
    assert Stored(Path("a"), (3, 5), "BF16").num_bytes == 30


def test_a_file_that_is_no_safetensors_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04 not weights")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        open_weights(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not readable"):
        open_weights(tmp_path / "missing.safetensors")
