"""Blocks are packed as soon as they are loaded, from mapped files, to the bits of a model that is packed afterwards."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from penstock.engine.kernels.cpu import load_library
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.models import Decoder
from penstock.engine.models.block import Block
from penstock.engine.models.cpu.block import PackedDecoder, pack_block, pack_blocks
from penstock.engine.models.cpu.panels import pack_head
from tests.engine.checkpoints import write_checkpoint
from tests.engine.loading.gguf_files import all_of, write_gguf
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
WHOLE_BLOCKS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}  # which formats of GGUF need
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "as stored": ("llama", {"dtype": "bfloat16"}, "auto"),
    "in several files": ("qwen3", {"head_dim": 20, "shards": 3, "tie_word_embeddings": True}, "auto"),
    "in another type": ("llama", {"dtype": "bfloat16"}, "float16"),
    "fused": ("phi3", {"dtype": "bfloat16"}, "auto"),
    "with biases": ("qwen2", {"dtype": "float16"}, "auto"),
    "experts in a tensor each": ("qwen3_moe", {**EXPERTS, "head_dim": 12, "dtype": "bfloat16"}, "auto"),
    "experts in one tensor": ("gpt_oss", {"head_dim": 12}, "bfloat16"),
    "recurrences": ("qwen3_next", {"dtype": "bfloat16"}, "auto"),
    "vectors for each layer": ("gemma4_text", {"hidden_size_per_layer_input": 8, "dtype": "bfloat16"}, "auto"),
}


@pytest.mark.parametrize("case", CASES)
def test_packing_at_once_gives_the_bits_of_packing_afterwards(case: str, tmp_path: Path) -> None:
    family, fields, dtype = CASES[case]
    _check(write_checkpoint(tmp_path, family, **fields), dtype)


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q4_0"])
def test_so_does_packing_from_a_gguf_file(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", **WHOLE_BLOCKS)
    _check(write_gguf(tmp_path / "model.gguf", folder, all_of(kind)), "auto")


def test_kernels_are_read_where_the_file_has_them(tmp_path: Path) -> None:
    """Read into memory of their own they would be there twice, and take longer."""
    folder = write_checkpoint(tmp_path, "llama", dtype="bfloat16")
    seen: list[tuple[Any, Any]] = []

    def look(block: Block) -> Block:
        seen.extend((path, leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(block)))
        return pack_block(block, library())

    load_model(folder, read_model_config(folder), pack_head=partial(pack_head, library=library()), pack_block=look)
    kernels = [values for path, values in seen if path[-1] == "kernel"]
    assert len(kernels) == 14
    assert all(isinstance(values, np.ndarray) and not values.flags.writeable for values in kernels)


def _check(path: Path, dtype: str) -> None:
    config = read_model_config(path, dtype)
    afterwards = load_model(path, config)
    pack_head(afterwards, library())
    at_once = load_model(
        path,
        config,
        pack_head=partial(pack_head, library=library()),
        pack_block=partial(pack_block, library=library()),
    )
    expected, found = _arrays(pack_blocks(afterwards, library())), _arrays(PackedDecoder(at_once))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert isinstance(array, jax.Array), name
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name], err_msg=str(name))


def _arrays(model: Decoder) -> dict[Any, jax.Array]:
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


@cache
def library() -> Any:
    return load_library(Path.home() / ".cache" / "penstock" / "native")
