"""A request of a model with states, also in int4 by int8, is taken over after `kill -9`, and no token differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine import Engine, EngineConfig
from penstock.engine.demo import MODEL_DIR
from penstock.producer import GenerateRequest
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, ReplyEntry
from tests.e2e.real_engines import late_text, real_worker, undisturbed
from tests.e2e.takeover.left_replies import leave_killed
from tests.support.patience import eventually, slow
from tests.support.programs.worker_harness import QUICK, is_queue_empty, read_reply

NUM_TOKENS = 500
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_batch_tokens": 16, "num_pages": 400, "max_model_len": 1024, "decode_steps": 1,
}  # fmt: skip
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 4, 2, 16
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 20, 24, 4
FIELDS: dict[str, Any] = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "dtype": "float32", "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "max_position_embeddings": 1024, "full_attention_interval": 2, "tie_word_embeddings": True,
    "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": KEY_DIM,
    "linear_value_head_dim": VALUE_DIM, "linear_conv_kernel_dim": TAPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"n": 1, "temperature": 0.0, "ignore_eos": True},
    "two": {"n": 2, "temperature": 1.0, "seed": 3, "ignore_eos": True},
    "penalties": {
        "n": 2, "temperature": 0.9, "seed": 4, "frequency_penalty": 0.4, "presence_penalty": 0.2,
        "repetition_penalty": 1.2, "top_p": 0.9, "ignore_eos": True,
    },
    "stop": {"n": 2, "temperature": 1.1, "seed": 5, "ignore_eos": True},
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of random weights with the demo model's tokenizer."""
    directory = tmp_path / "model"
    shutil.copytree(MODEL_DIR, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    theirs = json.loads((directory / "config.json").read_text())
    fields = {**FIELDS, "vocab_size": theirs["vocab_size"], "eos_token_id": theirs["eos_token_id"]}
    (directory / "config.json").write_text(json.dumps(fields))
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in shapes(fields["vocab_size"]).items():
        spread = 0.3 if "norm" in name or len(shape) == 1 else 0.2
        tensors[name] = (spread * rng.standard_normal(shape)).astype(np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    keys_size, values_size = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    delta_net = {
        "in_proj_qkv.weight": (2 * keys_size + values_size, HIDDEN), "in_proj_z.weight": (values_size, HIDDEN),
        "in_proj_b.weight": (VALUE_HEADS, HIDDEN), "in_proj_a.weight": (VALUE_HEADS, HIDDEN),
        "conv1d.weight": (2 * keys_size + values_size, 1, TAPS), "A_log": (VALUE_HEADS,), "dt_bias": (VALUE_HEADS,),
        "norm.weight": (VALUE_DIM,), "out_proj.weight": (HIDDEN, values_size),
    }  # fmt: skip
    attention = {
        "q_proj.weight": (2 * HEADS * HEAD_DIM, HIDDEN), "k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN), "o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "q_norm.weight": (HEAD_DIM,), "k_norm.weight": (HEAD_DIM,),
    }  # fmt: skip
    rest = {
        "mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER), "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(FIELDS["num_hidden_layers"]):
        mixer, parts = ("self_attn", attention) if layer % 2 else ("linear_attn", delta_net)
        of_layer = {**{f"{mixer}.{name}": shape for name, shape in parts.items()}, **rest}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return found


def request(name: str, **fields: Any) -> GenerateRequest:
    asked = {"prompt": f"What is {len(name)} + 85, {name}?", "max_tokens": NUM_TOKENS, **ASKED[name], **fields}
    return GenerateRequest.model_validate({**asked, "id": name})


def is_under_way(entry: ReplyEntry) -> bool:
    return isinstance(entry, ChunkEntry) and entry.offset > 30


@pytest.mark.parametrize("held", [slow({}), {"weights": "int4", "activations": "int8"}], ids=str)
async def test_replies_go_on_in_another_worker_with_the_same_tokens(
    redis_url: str, redis: RedisClient, model: Path, compile_cache: Path, tmp_path: Path, held: dict[str, str]
) -> None:
    settings = {**SIZES, **held, "compile_cache_dir": compile_cache}
    engine = Engine.from_checkpoint(model, EngineConfig(**settings))
    assert engine.describe().batch_invariant
    text = undisturbed(engine, {"stop": request("stop")})["stop"][0][0]
    stop = late_text(text)
    asked = {name: request(name) if name != "stop" else request(name, stop=(stop,)) for name in ASKED}
    expected = undisturbed(engine, asked)
    assert expected["stop"][0][0] == text[: text.index(stop)]

    await leave_killed(redis, redis_url, tmp_path / "log", {**settings, "model": model}, asked, is_under_way)
    async with real_worker(redis_url, model, EngineConfig(**settings), **QUICK, name="heir"):
        replies = {name: await read_reply(redis, name) for name in asked}
        await eventually(lambda: is_queue_empty(redis))
    for name, reply in replies.items():
        assert reply.owners == ["victim", "heir"]
        assert reply.choices(asked[name].n) == expected[name], name
    assert sum(len(tokens) for _, tokens in expected["stop"]) < 2 * NUM_TOKENS
    assert all(len(tokens) == NUM_TOKENS for name in ("greedy", "two", "penalties") for _, tokens in expected[name])
