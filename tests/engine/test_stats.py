"""Figures that an engine reports about itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from penstock.engine import Engine, EngineInfo
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.models import num_parameters
from penstock.engine.sharding.placement import split_model
from tests.engine.engines import SMALL, write_model
from tests.support.needs import HAS_COMPILER


def count_stored(directory: Path) -> int:
    with safe_open(directory / "model.safetensors", framework="numpy") as tensors:
        return sum(tensors.get_tensor(name).size for name in tensors.keys())  # noqa: SIM118 -- not a mapping


def test_an_engine_tells_what_it_is(tiny_model: Path) -> None:
    info = Engine.from_checkpoint(tiny_model, SMALL).describe()
    native = "native" if HAS_COMPILER else "xla"
    assert info == EngineInfo(
        num_parameters=count_stored(tiny_model),
        dtype="float32",
        kv_dtype="float32",
        kv_cache_tokens=63 * 4,
        kv_cache_bytes=info.kv_cache_bytes,
        max_model_len=96,
        platform="cpu",
        device_kind="cpu",
        num_devices=1,
        attention=native,
        matmul=native,
        fallback=None if HAS_COMPILER else "there is no C++ compiler (c++, g++ or clang++) on PATH",
        vocab_size=read_model_config(tiny_model).vocab_size,
        batch_invariant=HAS_COMPILER,
        instructions=info.instructions,
        arithmetic=info.arithmetic,
    )
    assert len(info.arithmetic or "") == 16
    assert (info.instructions is not None) == HAS_COMPILER
    config = read_model_config(tiny_model)
    heads = config.attentions[0]
    assert info.kv_cache_bytes == 64 * 4 * 4 * 2 * config.num_layers * heads.num_kv_heads * heads.head_dim


def test_without_a_compiler_it_tells_why_it_is_slow(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        "penstock.engine.deployment.opening.keep_compilations", lambda directory: None
    )  # the process-wide one
    info = Engine.from_checkpoint(tiny_model, replace(SMALL, compile_cache_dir=tmp_path / "compiled")).describe()
    assert (info.attention, info.matmul) == ("xla", "xla")
    assert info.fallback == "there is no C++ compiler (c++, g++ or clang++) on PATH"


def test_what_is_set_is_no_fallback(tiny_model: Path) -> None:
    info = Engine.from_checkpoint(tiny_model, replace(SMALL, attention="xla", matmul="xla")).describe()
    assert (info.attention, info.matmul, info.fallback) == ("xla", "xla", None)
    assert not info.batch_invariant


@pytest.mark.parametrize("choice", ["attention", "matmul"])
def test_sums_of_xla_are_said_to_depend_on_the_batch(tiny_model: Path, choice: str) -> None:
    config = replace(SMALL, **{choice: "xla"})  # type: ignore[arg-type]
    assert not Engine.from_checkpoint(tiny_model, config).describe().batch_invariant


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_checkpoint_whatever_it_is_split_over(tmp_path: Path, tied: bool) -> None:
    model = write_model(tmp_path, tie_word_embeddings=tied, num_hidden_layers=3)
    config = read_model_config(model)
    assert num_parameters(config) == count_stored(model)
    assert num_parameters(split_model(config, config.blocks[0].attention.num_heads)) == count_stored(model)
