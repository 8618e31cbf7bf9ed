"""Quantized weights stay quantized while they are loaded, when packed beside others, and in every step."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.formats import buffers
from penstock.engine.loading import weights
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.models import Decoder
from penstock.engine.models.layers import quantized
from tests.engine.engines import EOS, SMALL, VOCAB_SIZE, drive, write_model
from tests.engine.formats.quantized_checkpoints import write_quantized
from tests.engine.formats.quantized_weights import SCHEMES
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level
from tests.support.patience import pairs, slow

pytestmark = pytest.mark.versions

GEOMETRY = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 4, "num_key_value_heads": 2}
OBJECTS_BYTES = 2**20  # for what is not an array: a process that ran many tests was seen to hold 0.2 MB more of it
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 64}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq": ("gptq in order", "llama", GEOMETRY),
    "fp8": ("fp8 blocks", "qwen3_moe", {**GEOMETRY, **EXPERTS}),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scheme, family, geometry = MODELS[request.param]
    fields = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "bos_token_id": None}
    directory, _ = write_quantized(tmp_path_factory.mktemp("memory"), SCHEMES[scheme], family, **fields, **geometry)
    byte_level(chat_template=CHAT_TEMPLATE).save_pretrained(directory)
    return directory


def _num_bytes(model: Decoder) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def _traced(directory: Path, setting: str, *, stacked: bool) -> tuple[int, int, int]:
    """Returns the numpy memory of a loaded model, the peak while it loaded, and the model's size."""
    config = read_model_config(directory, weights=setting)
    load_model(directory, config, stacked=stacked)  # objects that are made once and kept do not count
    gc.collect()  # so that garbage of other tests is not collected meanwhile, with this model's own
    tracemalloc.start()
    model = load_model(directory, config, stacked=stacked)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held, peak, _num_bytes(model)


@pytest.mark.parametrize(("checkpoint", "stacked"), pairs(MODELS, [False, True]), indirect=["checkpoint"])
def test_loading_holds_each_array_once(checkpoint: Path, stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 2**15)
    monkeypatch.setattr(buffers, "LARGE_BYTES", 2**40)  # only numpy's memory is traced
    held, peak, size = _traced(checkpoint, "auto", stacked=stacked)
    assert size <= held  # what was read into is what the device has: no copy of it
    assert peak <= 1.15 * (checkpoint / "model.safetensors").stat().st_size + OBJECTS_BYTES


@pytest.mark.parametrize("setting", [slow("int8"), "int4", "fp8"])
def test_quantizing_while_loading_holds_no_unquantized_model(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 2**15)
    monkeypatch.setattr(buffers, "LARGE_BYTES", 2**40)  # only numpy's memory is traced
    held, peak, size = _traced(write_model(tmp_path, "llama", dtype="bfloat16", **GEOMETRY), setting, stacked=False)
    assert size <= held
    assert peak <= 1.15 * size + 2**22  # rows of one block, in f32, several times


def test_an_embedding_that_is_the_head_too_is_held_once(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3", tie_word_embeddings=True)
    engines = [Engine.from_checkpoint(tmp_path, replace(SMALL, weights="int8", matmul=of)) for of in ("auto", "xla")]
    params = [engine._runner._steps.params for engine in engines]
    wide = [[param for param in of if param.size >= VOCAB_SIZE * 48] for of in params]
    assert [len(of) for of in wide] == [1, 1]
    request = Request("a", (5, 6, 7), SamplingParams(max_tokens=8, temperature=0.0))
    first, second = (drive(engine, [request])["a", 0].token_ids for engine in engines)
    assert first == second


def test_a_step_unpacks_a_little_at_a_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "PIECE", 2**16)
    engine = Engine.from_checkpoint(checkpoint, replace(SMALL, num_pages=16))
    steps, cache = engine._runner._steps, engine._runner._cache
    size = sum(param.nbytes for param in steps.params)
    for step in (steps.backbone(16, cache), steps.loop(2, 4, cache)):
        memory: Any = step.lower().compile().memory_analysis()
        assert memory.temp_size_in_bytes <= 0.3 * size
