"""The demo checkpoint loads in `transformers`, fits in the package, and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_model.attention import PackedAttention
from examples.demo_model.config import DEMO_CONFIG
from examples.demo_model.evaluate import evaluate
from examples.demo_model.export import export
from examples.demo_model.train import TrainingState, restore, save, step_batches
from penstock.engine.demo import MODEL_DIR
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.models.decoder import Decoder

PROMPT = "<|user|>What is 347 + 85?<|assistant|>347 + 85"


def logits(model: Decoder, token_ids: list[int]) -> np.ndarray:
    attend = PackedAttention((jnp.ones((1, len(token_ids)), jnp.int32),))
    hidden, _ = model(jnp.asarray(token_ids), jnp.arange(len(token_ids)), (None,) * DEMO_CONFIG.num_layers, attend)
    return np.asarray(model.logits(hidden))


def test_the_weights_fit_in_the_package() -> None:
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 8_000_000


def test_transformers_reads_the_checkpoint_and_gives_the_same_logits() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    reference: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    token_ids = tokenizer(PROMPT).input_ids
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0].numpy()
    np.testing.assert_allclose(logits(load_model(MODEL_DIR, DEMO_CONFIG), token_ids), expected, atol=2e-3)
    question = [{"role": "user", "content": "What is 347 + 85?"}]
    assert PROMPT.startswith(str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)))
    answer = reference.generate(torch.tensor([token_ids]), max_new_tokens=20)[0, len(token_ids) :]
    assert tokenizer.decode(answer) == " = 432<|end|>"


def test_what_is_exported_loads_back_the_same(tmp_path: Path) -> None:
    model = Decoder(DEMO_CONFIG, rngs=nnx.Rngs(3))
    export(model, Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), tmp_path)
    assert read_model_config(tmp_path) == DEMO_CONFIG
    exported = load_model(tmp_path, DEMO_CONFIG)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(exported))
    assert {path.name for path in tmp_path.iterdir()} <= {path.name for path in MODEL_DIR.iterdir()}


@pytest.mark.parametrize("task", ["sum", "count"])
def test_held_out_problems_are_answered(task: str) -> None:
    """At least 98 % are answered, of enough problems that one hard problem more or less does not decide."""
    (score,) = evaluate(MODEL_DIR, (task,), num_questions=200, seed=1)
    assert score.chat_correct >= 196
    assert score.plain_correct >= 196


def test_a_resumed_run_continues_where_it_stopped(tmp_path: Path) -> None:
    fresh = TrainingState({"weight": jnp.zeros(3)}, (jnp.zeros(()),), 0)
    assert restore(tmp_path, fresh) == fresh
    save(tmp_path, TrainingState({"weight": jnp.arange(3.0)}, (jnp.ones(()),), 7))
    restored = restore(tmp_path, fresh)
    assert restored.step == 7
    np.testing.assert_array_equal(restored.params["weight"], [0, 1, 2])
    assert float(restored.opt_state[0]) == 1
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    first, second = (step_batches(7, 0, tokenizer)[0] for _ in range(2))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    assert np.any(first.token_ids != step_batches(8, 0, tokenizer)[0].token_ids)
