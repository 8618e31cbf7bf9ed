"""Writes GGUF files from Hugging Face checkpoints, with tensors named and laid out as by llama.cpp's converter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "olmo3": "olmo2",
}
PERMUTED = ("llama", "mistral", "mixtral", "smollm3", "granite", "granitemoe")
ADDS_ONE = ("gemma", "gemma2", "gemma3_text")
KEYS = {  # in config.json, and in the metadata
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
}
Kinds = Callable[[str], str]
"""Type in which a tensor is stored, by its name in the file."""


def all_of(kind: str) -> Kinds:
    """Stores all tensors in one type, except, as converters do, tensors of one axis and routers as floats."""

    def of(name: str) -> str:
        return "F32" if "norm" in name or "ffn_gate_inp" in name or name.endswith("bias") or "sinks" in name else kind

    return of


def q4_k_m(name: str) -> str:
    """Mixes types as llama.cpp's preset of that name does."""
    kind = all_of("Q4_K")(name)
    is_better = name.startswith(("output.", "blk.1.attn_v", "blk.0.ffn_down"))
    return "Q6_K" if kind == "Q4_K" and is_better else kind


def write_gguf(path: Path, checkpoint: Path, kinds: Kinds, *, split: Any = None, **metadata: Any) -> Path:
    """Writes the file; the checkpoint's weights become the values that the file's stand for. `metadata` overrides
    fields; None removes one. `split` is a mapping of the writer's options for several files.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    values = {name: array.copy() for name, array in load_file(checkpoint / "model.safetensors").items()}
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, architecture, **(split or {}))
    for key, value in {**_metadata(config), **metadata}.items():
        if value is not None:
            _add(writer, key if key.startswith(("general.", "split.")) else f"{architecture}.{key}", value)
    if (checkpoint / "tokenizer.json").exists():
        add_tokenizer(writer, AutoTokenizer.from_pretrained(checkpoint), config["vocab_size"])
    for name, (rows, kind) in _encoded(values, config, architecture, kinds).items():
        raw = None if kind in ("F32", "F16") else GGMLQuantizationType[kind]
        writer.add_tensor(name, rows, raw_dtype=raw)
    for name, factors in _rope_factors(config).items():
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(values, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return path


def _encoded(
    values: dict[str, np.ndarray], config: Mapping[str, Any], architecture: str, kinds: Kinds
) -> dict[str, tuple[np.ndarray, str]]:
    """Encodes tensors by the file's names; `values` become what the encoded ones stand for."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    rows: dict[str, list[np.ndarray]] = {}
    for name in values:
        for known, view in _parts(name, values[name]):
            stored = _stored_name(known, names)
            kind, offset = kinds(stored), float(config["model_type"] in ADDS_ONE and "norm" in stored)
            held = encode(view + np.float32(offset), kind)
            view[...] = decode(held, kind) - np.float32(offset)
            rows.setdefault(stored, []).append(_permuted(held, stored, config))
    is_stacked = "_exps" in "".join(rows)
    return {
        name: (np.stack(parts) if is_stacked and "_exps" in name and len(parts) > 1 else parts[0], kinds(name))
        for name, parts in rows.items()
    }


def _parts(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields views of the tensors that converters write apart; those of experts one by one, in order."""
    if "block_sparse_moe.input_linear" in name:  # Granite has one half above the other
        base = name.replace("block_sparse_moe.input_linear", "mlp.experts.{}_proj")
        half = array.shape[1] // 2
        yield base.format("gate"), array[:, :half]
        yield base.format("up"), array[:, half:]
    elif "block_sparse_moe.output_linear" in name:
        yield name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj"), array
    elif ".experts.gate_up_proj" in name:  # gpt-oss, whose kernels are [experts, in, out]
        base, bias = name.split("gate_up_proj")
        of_all = array if bias else array.swapaxes(1, 2)
        leaf = "bias" if bias else "weight"
        yield f"{base}gate_proj.{leaf}", of_all[:, ::2]
        yield f"{base}up_proj.{leaf}", of_all[:, 1::2]
    elif ".experts.down_proj" in name:
        base, bias = name.split("down_proj")
        yield f"{base}down_proj.{'bias' if bias else 'weight'}", array if bias else array.swapaxes(1, 2)
    elif name.endswith("shared_expert_gate.weight"):
        yield name, array[0]
    else:
        yield re.sub(r"\.experts\.\d+\.", ".experts.", name), array


def _stored_name(name: str, names: gguf.TensorNameMap) -> str:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = f"{name}.weight" if name.endswith("sinks") else name
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _permuted(rows: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Interleaves the rows of both halves of a head."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if config["model_type"] not in PERMUTED or heads is None:
        return rows
    parts = rows.reshape(config[heads], 2, -1, *rows.shape[1:])
    return parts.swapaxes(1, 2).reshape(rows.shape)


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Encodes values as a file holds them.

    The library can't quantize to the K types: for those the result is other values that are legal.
    """
    if kind in ("F32", "F16"):
        return values.astype({"F32": np.float32, "F16": np.float16}[kind])
    if kind.endswith("_K"):
        return _random_blocks(values.shape, kind)
    return quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType[kind])


def decode(rows: np.ndarray, kind: str) -> np.ndarray:
    return rows.astype(np.float32) if kind in ("F32", "F16") else dequantize(rows, GGMLQuantizationType[kind])


def _random_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Returns blocks whose values are about as large as those of a tiny random checkpoint."""
    rng = np.random.default_rng(sum(shape))
    block, num_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, num_bytes), np.uint8)
    scales = {"Q4_K": {0: 0.001, 2: 0.0075}, "Q5_K": {0: 0.0005, 2: 0.0075}, "Q6_K": {208: 0.0001}}[kind]
    for place, scale in scales.items():
        spread = rng.uniform(0.9 * scale, 1.1 * scale, (*rows.shape[:-1], 1)).astype(np.float16)
        rows[..., place : place + 2] = spread.view(np.uint8)
    return rows.reshape(*shape[:-1], -1)


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    found = {KEYS[name]: value for name, value in config.items() if name in KEYS and value is not None}
    found |= {"block_count": config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0)}
    found |= {"rope.freq_base": float(rope["rope_theta"])}
    found |= {"rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0))}
    found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if config.get("num_nextn_predict_layers"):
        found["nextn_predict_layers"] = config["num_nextn_predict_layers"]
    if config["model_type"] == "olmo3":
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    return found | _rope_metadata(rope, config)


def _rope_metadata(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "longrope":
        return {
            "rope.scaling.attn_factor": float(rope["attention_factor"]),
            "rope.scaling.original_context_length": config["original_max_position_embeddings"],
        }
    if rope["rope_type"] not in ("yarn", "linear"):
        return {}
    found: dict[str, Any] = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _rope_factors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the divisors of rope frequencies: longrope's, and those that Llama 3's scaling amounts to."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / waves
    low, high, factor = (rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        adders: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        adders[type(value)](key, value)


def add_tokenizer(writer: GGUFWriter, tokenizer: Any, vocab_size: int, pre: str = "gpt-2", **flags: bool) -> None:
    """Adds a byte-level BPE tokenizer, or one with SentencePiece's pieces."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    pieces, types = [], []
    for id_ in range(max(vocab_size, len(tokens))):
        kind = TokenType.UNUSED if id_ not in tokens else TokenType.NORMAL
        if id_ in added:
            kind = TokenType.CONTROL if added[id_]["special"] else TokenType.USER_DEFINED
        if kind is TokenType.NORMAL and re.fullmatch(r"<0x[0-9A-F]{2}>", tokens[id_]):
            kind = TokenType.BYTE
        pieces.append(tokens.get(id_, f"[PAD{id_}]"))
        types.append(kind)
    has_bytes = state["model"].get("byte_fallback")
    writer.add_tokenizer_model("llama" if has_bytes else "gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    if has_bytes:
        writer.add_token_scores([-float(id_) for id_ in range(len(pieces))])
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        id_ = getattr(tokenizer, f"{name}_token_id")
        if id_ is not None:
            getattr(writer, f"add_{name}_token_id")(id_)
    for name, flag in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
