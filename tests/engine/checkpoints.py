"""Writes tiny random Hugging Face checkpoints with transformers, and computes what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

# Threads of torch wait for one another spinning, at each operation: where each core has a test process, for long.
torch.set_num_threads(1)

VOCAB_SIZE = 120

GEOMETRY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,  # some families' default is beyond this vocabulary
}
DELTA_NETS = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"],
}
WITH_EXPERTS = {
    **DELTA_NETS,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
GEMMA4 = {"head_dim": 16, "global_head_dim": 24, "hidden_size_per_layer_input": 0}
# What is large by default.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "gemma4_unified": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gpt_oss": {"num_local_experts": 4},
    "qwen3_next": WITH_EXPERTS,
    "qwen3_5": DELTA_NETS,
    "qwen3_5_text": DELTA_NETS,
    "qwen3_5_moe": WITH_EXPERTS,
    "qwen3_5_moe_text": WITH_EXPERTS,
}

QWEN_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
QWEN2_5_VISION = {**QWEN_VISION, "fullatt_block_indexes": [0]}
VISION: dict[str, dict[str, Any]] = {
    "qwen3_5": {"vision_config": QWEN_VISION},
    "qwen3_5_moe": {"vision_config": QWEN_VISION},
    "qwen2_vl": {"vision_config": {"depth": 1, "embed_dim": 8, "hidden_size": 48, "num_heads": 2, "patch_size": 4}},
    "qwen2_5_vl": {"vision_config": {**QWEN2_5_VISION}},
    "qwen3_vl": {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}},
    "gemma4": {"vision_config": None, "audio_config": None},
    "gemma4_unified": {"vision_config": {"patch_size": 4}, "audio_config": {}},
    "gemma3": {
        "vision_config": {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 16,
            "patch_size": 4,
        },
    },
}


def write_checkpoint(
    directory: Path, family: str, *, seed: int = 0, dtype: str = "float32", shards: int = 1, **config: Any
) -> Path:
    """Writes a checkpoint of `family` with random weights, norms and biases included, so that a missing one shows.

    `config` overrides GEOMETRY. `shards` above 1 gives at least as many files and an index.
    """
    torch.manual_seed(seed)
    model = _auto(family).from_config(_config_of(family, {**GEOMETRY, **OF_FAMILY.get(family, {}), **config}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or name.endswith("bias") else 1.5 if name.endswith("sinks") else 0.15
            is_factor = "norm" in name or name.endswith("scale")
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if is_factor else 0.0))
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.copy_(torch.randn_like(buffer) * 0.3 + (1.0 if name.endswith("scalar") else 0.0))
    model = model.to(getattr(torch, dtype))
    num_bytes = sum(stored.numel() * stored.element_size() for stored in (*model.parameters(), *model.buffers()))
    model.save_pretrained(directory, max_shard_size=num_bytes // shards + 1 if shards == 1 else int(num_bytes / shards))
    return directory


def _config_of(family: str, fields: dict[str, Any]) -> Any:
    """Makes the config of a family. The fields of a model that takes images too are those of its text model."""
    if "hidden_size_per_layer_input" in fields:  # a table of as many tokens
        fields = {**fields, "vocab_size_per_layer_input": fields["vocab_size"]}
    if family not in VISION:
        return AutoConfig.for_model(family, **fields)
    tied = {name: fields[name] for name in ("tie_word_embeddings",) if name in fields}
    return AutoConfig.for_model(family, text_config=fields, **VISION[family], **tied)


def _auto(family: str) -> Any:
    return AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM


def edit_config(directory: Path, *remove: str, **fields: Any) -> None:
    """Removes fields from a config.json and sets others."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in remove} | fields))


def reference_logits(
    directory: Path, token_ids: list[int], *, dtype: torch.dtype = torch.float32
) -> np.ndarray:  # [num_tokens, vocab]
    with torch.no_grad():
        logits: np.ndarray = reference_model(directory, dtype)(torch.tensor([token_ids])).logits[0].numpy()
    return logits


def reference_greedy(directory: Path, token_ids: list[int], num_tokens: int, *, cached: bool = True) -> list[int]:
    """Returns what `model.generate` continues `token_ids` with, end-of-sequence ids ignored.

    Each call makes its own model: some models remember how long the longest sequence was.
    """
    out = reference_model(directory).generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=cached,
    )
    tokens: list[int] = out[0, len(token_ids) :].tolist()
    return tokens


def reference_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    # torch's grouped matmul takes rows of 16 bytes alone; the eager one takes any size
    auto = _auto(json.loads((directory / "config.json").read_text())["model_type"])
    reference = auto.from_pretrained(directory, dtype=dtype, experts_implementation="eager")
    return reference.eval()
