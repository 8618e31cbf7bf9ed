"""Writes the demo model as a Hugging Face `Qwen3ForCausalLM` checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save
from tokenizers import Tokenizer

from examples.demo_model.config import CONFIG_JSON, QWEN3
from examples.demo_model.tokenizer import END, PAD, SPECIAL_TOKENS
from penstock.engine.demo import MODEL_DIR
from penstock.engine.models.axes import ParamPath
from penstock.engine.models.decoder import Decoder


def export(model: Decoder, tokenizer: Tokenizer, folder: Path, config_json: Mapping[str, Any] = CONFIG_JSON) -> None:
    """Writes weights, configuration, tokenizer, chat template and generation defaults to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(_tensors(model), metadata={"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text((MODEL_DIR / "chat_template.jinja").read_text())
    for name, content in (
        ("config.json", dict(config_json)),
        ("tokenizer_config.json", _tokenizer_config()),
        ("generation_config.json", {"do_sample": False, "eos_token_id": END, "pad_token_id": PAD}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _tensors(model: Decoder) -> dict[str, np.ndarray]:
    tensors = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        array = np.asarray(jax.device_get(leaf[...]))
        tensors[QWEN3.tensor_name(cast(ParamPath, path))] = np.ascontiguousarray(
            array.T if path[-1] == "kernel" else array
        )
    return tensors


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG_JSON["max_position_embeddings"],
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "clean_up_tokenization_spaces": False,
    }
