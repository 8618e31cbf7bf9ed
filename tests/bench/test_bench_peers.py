"""The engines' common setup, and the preset formats that they read. No other engine is needed."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from benchmarks.peers import run
from benchmarks.peers.checkpoints import gguf_file, gguf_name, lengthened, w8a8
from benchmarks.peers.engines import KINDS, PENSTOCK, SET, Peer, PeerFailed, converted, python_of
from benchmarks.peers.protocol import Setup
from benchmarks.peers.workloads import WORKLOADS
from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.loading.checkpoint import check_weights, read_model_config
from penstock.tools.bench.presets import GEOMETRIES, preset_dir

VOCAB = 8192


@pytest.fixture(scope="module")
def presets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets")


# --- workloads ---


def lengths(name: str, turn: int = 0) -> tuple[list[int], list[int]]:
    wanted = WORKLOADS[name].requests(VOCAB, None, turn)
    return [len(each["prompt"]) for each in wanted], [each["num_tokens"] for each in wanted]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_request_of_a_workload_fits_and_has_gaps(name: str) -> None:
    prompts, outputs = lengths(name)
    assert max(map(sum, zip(prompts, outputs, strict=True))) <= WORKLOADS[name].max_model_len
    assert min(outputs) >= 2  # otherwise there is no time between two tokens


def test_the_workloads_are_what_they_are_called() -> None:
    prompts, outputs = lengths("log-normal")
    assert (len(prompts), min(prompts) >= 8, max(prompts) <= 1200) == (96, True, True)
    assert 120 < statistics.median(prompts) < 260
    assert 40 < statistics.median(outputs) < 90
    assert lengths("4-streams") == ([32] * 4, [400] * 4)
    assert set(lengths("4k")[0]) == {4000}


def test_shared_prefixes_meet_the_cache_in_a_run_and_not_in_the_next() -> None:
    workload = WORKLOADS["prefixes"]
    assert workload.prefix_caching
    first, second = (workload.requests(VOCAB, None, turn) for turn in (0, 1))
    prefixes = [tuple(each["prompt"][:700]) for each in first]
    assert len(set(prefixes)) == 8
    assert not set(prefixes) & {tuple(each["prompt"][:700]) for each in second}


def test_online_requests_come_at_the_rate_and_other_lengths_with_another_seed() -> None:
    workload = WORKLOADS["online-40"].with_options(500, 7)
    wanted = workload.requests(VOCAB, 20.0, 0)
    assert wanted[-1]["time_s"] == pytest.approx(500 / 20, rel=0.2)
    assert wanted[0]["prompt"] != WORKLOADS["online-40"].with_options(500, 8).requests(VOCAB, 20.0, 0)[0]["prompt"]


def test_the_rate_is_a_share_of_what_ours_serves_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(self: Peer, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"stamps_s": [0.1, 2.0 if place else 4.0]} for place in range(len(wanted))]

    monkeypatch.setattr(Peer, "run", answer)
    peers = [Peer(PENSTOCK, "", None, tmp_path)]  # type: ignore[arg-type]
    assert run.rate_of(WORKLOADS["online-80"].with_options(10, 0), peers, VOCAB) == pytest.approx(0.8 * 10 / 4)
    assert run.rate_of(WORKLOADS["shared"], peers, VOCAB) is None


# --- who is compared with whom ---


def found(tokens: list[int], seconds: float) -> dict[str, Any]:
    wanted = [{"prompt": [1], "num_tokens": len(tokens), "time_s": 0.0}]
    stamps_s = np.linspace(seconds / len(tokens), seconds, len(tokens)).tolist()
    got = [{"tokens": tokens, "stamps_s": stamps_s}]
    return {"summary": run.summary(wanted, got), "tokens": [tokens], "load": 1.0}


def test_others_are_compared_with_ours_as_set_and_that_with_ours_as_it_is(tmp_path: Path) -> None:
    runs = {
        PENSTOCK: [found([7] * 10, 2.0)],
        SET: [found([7] * 10, 1.0)],
        "vllm": [found([8] * 10, 4.0)],
    }
    rows = {
        name: run.row(Peer(name, "", None, tmp_path), runs, SET, [[7] * 10])  # type: ignore[arg-type]
        for name in runs
    }
    assert {name: row["x output tok/s"] for name, row in rows.items()} == {PENSTOCK: 2.0, SET: 2.0, "vllm": 4.0}
    assert rows["vllm"]["x TTFT p50"] == 0.25
    assert [row["tokens as reference"] for row in rows.values()] == ["1/1", "1/1", "0/1"]


def test_an_answer_of_another_length_is_a_failure() -> None:
    with pytest.raises(PeerFailed, match="1 tokens came instead of 2"):
        run.summary([{"prompt": [1], "num_tokens": 2, "time_s": 0.0}], [{"tokens": [5], "stamps_s": [1.0]}])


@pytest.mark.parametrize("text", ["weights", "=int8"])
def test_an_option_of_penstock_has_a_name_and_a_value(text: str) -> None:
    assert run.option("weights=int8") == ("weights", "int8")
    with pytest.raises(argparse.ArgumentTypeError, match=f"KEY=VALUE, not '{text}'"):
        run.option(text)


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEERS_HOME", str(tmp_path))
    with pytest.raises(PeerFailed, match=f"vllm-int8 is left out: there is no {tmp_path}/vllm/bin/python"):
        python_of("vllm-int8")
    monkeypatch.delenv("PEERS_HOME")
    with pytest.raises(PeerFailed, match="PEERS_HOME is not set"):
        python_of("llamacpp")
    adapters = Path(run.__file__).parent
    assert all((adapters / f"{kind.adapter}.py").is_file() for kind in KINDS.values())


# --- checkpoints ---


def test_a_longer_form_of_a_preset_differs_in_its_positions_alone(presets: Path) -> None:
    preset = preset_dir("nano", "float32", presets)
    assert lengthened(preset, 2048) == preset
    longer = lengthened(preset, 4096)
    assert json.loads((longer / "config.json").read_text())["max_position_embeddings"] == 4096
    assert json.loads((preset / "config.json").read_text())["max_position_embeddings"] == 2048
    assert (longer / "model.safetensors").samefile(preset / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_w8a8_holds_the_weights_within_half_a_step(presets: Path, dtype: str) -> None:
    preset = preset_dir("nano", dtype, presets)
    plain, quantized = (load_file(folder / "model.safetensors") for folder in (preset, w8a8(preset)))
    name = "model.layers.1.mlp.down_proj.weight"
    scale = quantized[name + "_scale"].astype(np.float32)
    assert (quantized[name].dtype, scale.shape) == (np.dtype(np.int8), (32, 1))
    error = np.abs(quantized[name] * scale - plain[name].astype(np.float32))
    assert (error <= 0.51 * scale).all()
    assert quantized["model.embed_tokens.weight"].dtype == plain["model.embed_tokens.weight"].dtype
    check_weights(w8a8(preset), read_model_config(w8a8(preset)))


@pytest.mark.parametrize("model", ["nano", "nano-moe"])
def test_a_gguf_file_of_a_preset_gives_its_tokens(presets: Path, model: str) -> None:
    """Our own loader reads it, which is tested against transformers': names, shapes and metadata are right."""
    preset = preset_dir(model, "float32", presets)
    config = EngineConfig(dtype="float32", max_num_seqs=1, max_batch_tokens=16, max_model_len=64, num_pages=20)
    tokens = []
    for path in (preset, gguf_file(preset, "float32")):
        engine = Engine.from_checkpoint(path, config)
        engine.add(Request("r", (301, 7, 99, 250), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        tokens.append([token for output in outputs for token in output.token_ids])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 8


def test_a_gguf_file_in_int8_has_blocks_for_matrices_alone(presets: Path) -> None:
    reader = gguf.GGUFReader(gguf_file(preset_dir("nano-moe", "bfloat16", presets), "int8"))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.1.ffn_down_exps.weight"] == types["blk.0.attn_q.weight"] == "Q8_0"
    assert types["blk.1.ffn_gate_inp.weight"] == types["blk.0.attn_norm.weight"] == "F32"


def test_tensors_have_the_names_that_llama_cpp_knows() -> None:
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 2)
    parts = ("input_layernorm", "self_attn.q_norm", "self_attn.o_proj", "mlp.gate", "mlp.experts.down_proj")
    names = [f"model.layers.1.{part}.weight" for part in parts]
    for name in [*names, "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"]:
        assert gguf_name(name) == known.get_name(name, try_suffixes=(".weight",))


def test_the_large_mixture_has_the_widths_of_the_model_it_stands_for() -> None:
    moe = GEOMETRIES["moe"]
    assert (moe.hidden, moe.intermediate, moe.heads, moe.kv_heads, moe.experts_per_token) == (2048, 768, 32, 4, 8)


def test_a_gguf_file_is_loaded_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    setup = Setup(str(file), "float32", 512, prefix_caching=False, is_int8=False)
    assert converted(KINDS["llamacpp"], setup) == converted(KINDS[PENSTOCK], setup) == file
    assert run.expected_tokens(setup, [{}], Console()) == []
