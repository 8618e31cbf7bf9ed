"""Checkpoints with KV cache scales, and what transformers computes with keys and values quantized by them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import DynamicCache

from tests.engine.checkpoints import edit_config, reference_model

COMPRESSED = ("k_scale", "v_scale")
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
"""`kv_cache_scheme`, as llm-compressor writes it."""


def with_scales(
    plain: Path, directory: Path, layers: Sequence[Mapping[str, np.ndarray]], scheme: Mapping[str, Any] | None = SCHEME
) -> Path:
    """Copies a checkpoint, with these tensors below the name of each layer's attention."""
    shutil.copytree(plain, directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    for layer, scales in enumerate(layers):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": np.asarray(scale) for name, scale in scales.items()}
    save_file(tensors, directory / "model.safetensors")
    if scheme is not None:
        config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": dict(scheme)}
        edit_config(directory, quantization_config=config)
    return directory


def random_scales(num_layers: int, shape: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    """Draws scales for keys and values of about 1: quotients have large codes, and the largest are clipped."""
    rng = np.random.default_rng(3)
    sizes = rng.uniform(0.0005, 0.003, (num_layers, len(COMPRESSED), *shape)).astype(np.float32)
    return [dict(zip(COMPRESSED, layer, strict=True)) for layer in sizes]


class QuantizedCache(DynamicCache):
    """A cache of keys and values that have the values of their fp8 codes."""

    def __init__(self, layers: Sequence[Mapping[str, np.ndarray]]) -> None:
        super().__init__()
        self._scales = [[torch.from_numpy(layer[name]).reshape(-1, 1, 1) for name in COMPRESSED] for layer in layers]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Quantizes keys and values, each `[1, num_kv_heads, num_tokens, head_dim]`."""
        held = [
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for x, scale in zip((key_states, value_states), self._scales[layer_idx], strict=True)
        ]
        return super().update(*held, layer_idx, *args, **kwargs)


def reference_logprobs(
    plain: Path, token_ids: Sequence[int], layers: Sequence[Mapping[str, np.ndarray]] | None
) -> np.ndarray:  # f32 [num_tokens, vocab]
    """Returns log-probabilities of a checkpoint without scales. Without `layers`, keys and values are not quantized."""
    cache = DynamicCache() if layers is None else QuantizedCache(layers)
    with torch.no_grad():
        logits = reference_model(plain)(torch.tensor([list(token_ids)]), past_key_values=cache, use_cache=True).logits
    logprobs: np.ndarray = torch.log_softmax(logits[0], dim=-1).numpy()
    return logprobs
