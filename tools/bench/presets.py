"""Checkpoints with random weights, for measuring speed where the text does not matter. A seed always gives the same
weights.

They are real checkpoints in Hugging Face format, so that workers and other engines can load the same files.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.tools.bench.errors import ImpossibleLoad

PREFIX = "random:"
Dtype = Literal["float32", "bfloat16"]


class PresetSizes(NamedTuple):
    """Sizes of a Qwen3, or of its mixture if it has experts."""

    vocab_size: int
    hidden: int
    intermediate: int  # of one expert, where there are experts
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool  # embeddings
    num_experts: int = 0
    experts_per_token: int = 0


GEOMETRIES = {
    "nano": PresetSizes(512, 32, 64, 2, 2, 1, 16, True),  # for trying out a benchmark
    "nano-moe": PresetSizes(512, 32, 32, 2, 2, 1, 16, True, 4, 2),
    "tiny": PresetSizes(8192, 384, 2304, 8, 6, 2, 64, False),  # 31M parameters
    "qwen06": PresetSizes(32768, 1024, 3072, 28, 16, 8, 128, True),  # 474M
    "moe": PresetSizes(32768, 2048, 768, 4, 32, 4, 128, True, 64, 8),  # 1.4G, in the widths of Qwen3-30B-A3B
    "llama8": PresetSizes(
        128256, 4096, 14336, 32, 32, 8, 128, False
    ),  # 8.0G, the sizes of Llama-3.1-8B: for accelerators
}
_MAX_POSITION = 2048
_DEVIATION = 0.02
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def preset_dir(name: str, dtype: str, root: Path) -> Path:
    """Returns the folder of a preset under `root`, and writes it if it is not there yet.

    Raises:
        ImpossibleLoad: there is no such preset, or it can't have this dtype.
    """
    if name not in GEOMETRIES:
        raise ImpossibleLoad(
            f"--model {PREFIX}{name} is not one of {', '.join(PREFIX + known for known in GEOMETRIES)}"
        )
    if dtype not in get_args(Dtype):
        raise ImpossibleLoad(f"--dtype of a random model must be one of {', '.join(get_args(Dtype))}, not {dtype!r}")
    directory = root / f"{name}-{dtype}"
    if not directory.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=root, prefix="."))
        try:
            write_preset(name, dtype, scratch)
            scratch.rename(directory)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return directory


def preset_root() -> Path:
    """Returns the folder of presets.

    Raises:
        ImpossibleLoad: there is no such folder, as this user has no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock" / "bench"
    except RuntimeError as error:
        raise ImpossibleLoad(f"random models have no folder to be in: {error} Set XDG_CACHE_HOME") from error


def write_preset(name: str, dtype: str, directory: Path) -> None:
    """Writes the checkpoint's files into an existing folder."""
    config = _config(name, dtype)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    _tokenizer(config["vocab_size"]).save_pretrained(directory)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    rng = np.random.default_rng(0)
    tensors = {
        tensor: (np.ones(shape, np.float32) if "norm" in tensor else _normal(rng, shape)).astype(kind)
        for tensor, shape in _shapes(GEOMETRIES[name]).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _config(name: str, dtype: str) -> dict[str, Any]:
    geometry = GEOMETRIES[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": dtype, "torch_dtype": dtype,
        "vocab_size": geometry.vocab_size, "hidden_size": geometry.hidden, "intermediate_size": geometry.intermediate,
        "num_hidden_layers": geometry.layers, "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads, "head_dim": geometry.head_dim,
        "tie_word_embeddings": geometry.tied, "max_position_embeddings": _MAX_POSITION, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return config | _expert_fields(geometry) if geometry.num_experts else config


def _expert_fields(geometry: PresetSizes) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": geometry.num_experts,
        "num_experts_per_tok": geometry.experts_per_token, "moe_intermediate_size": geometry.intermediate,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _shapes(geometry: PresetSizes) -> dict[str, tuple[int, ...]]:
    hidden = geometry.hidden
    layer = _attention_shapes(geometry) | _mlp_shapes(geometry)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (geometry.vocab_size, hidden)}
    for place in range(geometry.layers):
        shapes |= {f"model.layers.{place}.{part}.weight": shape for part, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not geometry.tied:
        shapes["lm_head.weight"] = (geometry.vocab_size, hidden)
    return shapes


def _attention_shapes(geometry: PresetSizes) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = geometry.hidden, geometry.head_dim
    q_size, kv_size = geometry.heads * head_dim, geometry.kv_heads * head_dim
    return {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden), "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden), "self_attn.o_proj": (hidden, q_size),
        "self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,),
    }  # fmt: skip


def _mlp_shapes(geometry: PresetSizes) -> dict[str, tuple[int, ...]]:
    hidden, inner = geometry.hidden, geometry.intermediate
    parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if not geometry.num_experts:
        return {f"mlp.{part}": shape for part, shape in parts.items()}
    experts = range(geometry.num_experts)
    shapes = {f"mlp.experts.{expert}.{part}": shape for expert in experts for part, shape in parts.items()}
    return {"mlp.gate": (geometry.num_experts, hidden), **shapes}


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(_DEVIATION)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Builds byte-level BPE, like Qwen's: each token beyond the bytes is an earlier one plus one letter."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: place + 1 for place, symbol in enumerate(symbols)}
    vocab["<|endoftext|>"] = 0
    merges: list[tuple[str, str]] = []
    stems = list(_LETTERS)
    for stem in stems:  # grows during the iteration
        for letter in _LETTERS:
            if len(vocab) < vocab_size:
                merges.append((stem, letter))
                vocab[stem + letter] = len(vocab)
                stems.append(stem + letter)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=end, model_max_length=_MAX_POSITION
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer
