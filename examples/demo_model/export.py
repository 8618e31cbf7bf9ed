"""Writes the demo model as a Hugging Face `Qwen3ForCausalLM` checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save
from tokenizers import Tokenizer

from examples.demo_model.config import DEMO_CONFIG
from examples.demo_model.tokenizer import END, PAD, SPECIAL_TOKENS
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.family import ParamPath
from penstock.engine.models.qwen3 import QWEN3

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.content is string -%}
        {%- set text = message.content -%}
    {%- else -%}
        {%- set text = message.content | map(attribute='text') | join('') -%}
    {%- endif -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|assistant|>' + text + '<|end|>' -}}
    {%- elif message.role in ('system', 'user') -%}
        {{- '<|' + message.role + '|>' + text -}}
    {%- else -%}
        {{- raise_exception('this model knows the roles system, user and assistant; got ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def export(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes weights, configuration, tokenizer, chat template and generation defaults to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(_tensors(model), metadata={"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for name, content in (
        ("config.json", _config()),
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


def _config() -> dict[str, Any]:
    return {
        "architectures": [QWEN3.architecture],
        "model_type": QWEN3.model_type,
        "vocab_size": DEMO_CONFIG.vocab_size,
        "hidden_size": DEMO_CONFIG.hidden_size,
        "intermediate_size": DEMO_CONFIG.intermediate_size,
        "num_hidden_layers": DEMO_CONFIG.num_layers,
        "num_attention_heads": DEMO_CONFIG.num_heads,
        "num_key_value_heads": DEMO_CONFIG.num_kv_heads,
        "head_dim": DEMO_CONFIG.head_dim,
        "hidden_act": DEMO_CONFIG.hidden_act,
        "max_position_embeddings": DEMO_CONFIG.max_position,
        "rms_norm_eps": DEMO_CONFIG.rms_norm_eps,
        "rope_parameters": {"rope_type": DEMO_CONFIG.rope.kind, "rope_theta": DEMO_CONFIG.rope.theta},
        "tie_word_embeddings": DEMO_CONFIG.tie_word_embeddings,
        "attention_bias": DEMO_CONFIG.qkv_bias,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": DEMO_CONFIG.dtype,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": DEMO_CONFIG.max_position,
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "clean_up_tokenization_spaces": False,
    }
