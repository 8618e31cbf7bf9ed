"""Converts the presets to the formats of other engines, once each, beside the preset."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import ml_dtypes  # noqa: F401 - teaches numpy bfloat16
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from safetensors import safe_open
from safetensors.numpy import save_file

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_LINEAR = ("_proj.weight",)  # quantized by W8A8; not the router, the embedding or the head
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
_GGUF_TYPES = {
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "int8": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}


def lengthened(model: Path, num_positions: int) -> Path:
    """Returns the model with room for `num_positions` tokens: itself if it has that already."""
    if num_positions <= _config(model)["max_position_embeddings"]:
        return model

    def write(scratch: Path) -> None:
        for file in model.iterdir():
            os.link(file, scratch / file.name)
        (scratch / "config.json").unlink()
        _write_config(scratch, _config(model) | {"max_position_embeddings": num_positions})

    return _made(model.with_name(f"{model.name}-{num_positions}"), write)


def w8a8(model: Path) -> Path:
    """Writes compressed-tensors: int8 weights with a scale per output, activations quantized per token at run time."""

    def write(scratch: Path) -> None:
        for file in model.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, scratch / file.name)
        _write_config(scratch, _config(model) | {"quantization_config": _w8a8_scheme()})
        tensors = dict(_quantized(_tensors(model)))
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})

    return _made(model.with_name(f"{model.name}-w8a8"), write)


def gguf_file(model: Path, kind: str) -> Path:
    """Writes a GGUF file with matrices of `kind`: float32, bfloat16, or int8 (Q8_0)."""

    def write(scratch: Path) -> None:
        config = _config(model)
        writer = GGUFWriter(scratch / "model.gguf", config["model_type"].replace("_", ""))
        _write_gguf_config(writer, config, _GGUF_TYPES[kind][1])
        _write_gguf_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config["vocab_size"])
        for name, tensor in _stacked(_tensors(model)):
            is_matrix = tensor.ndim > 1 and not name.endswith("mlp.gate.weight")
            dtype = _GGUF_TYPES[kind][0] if is_matrix else GGMLQuantizationType.F32
            data = gguf.quants.quantize(tensor.astype(np.float32), dtype)
            writer.add_tensor(gguf_name(name), data, raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return _made(model.with_name(f"{model.name}-gguf-{kind}"), write) / "model.gguf"


def gguf_name(name: str) -> str:
    """Maps a name: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"


def _made(target: Path, write: Callable[[Path], None]) -> Path:
    if not target.is_dir():
        scratch = target.with_name(target.name + ".part")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        write(scratch)
        scratch.rename(target)
    return target


def _config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _tensors(model: Path) -> Iterator[tuple[str, Array]]:
    with safe_open(model / "model.safetensors", framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            yield name, file.get_tensor(name)


def _quantized(tensors: Iterator[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    for name, tensor in tensors:
        if not name.endswith(_LINEAR):
            yield name, tensor
            continue
        weight = tensor.astype(np.float32)
        scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(tensor.dtype)
        yield name, np.rint(weight / scale.astype(np.float32)).astype(np.int8)
        yield name + "_scale", scale


def _w8a8_scheme() -> dict[str, Any]:
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }  # fmt: skip


def _write_gguf_config(writer: GGUFWriter, config: Mapping[str, Any], file_type: LlamaFileType) -> None:
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _write_gguf_tokenizer(writer: GGUFWriter, tokenizer: Mapping[str, Any], vocab_size: int) -> None:
    """Writes the byte-level BPE. Nobody reads text, but no file loads without it."""
    ids = tokenizer["model"]["vocab"]
    by_id = {id_: token for token, id_ in ids.items()}
    tokens = [by_id.get(id_, f"[unused{id_}]") for id_ in range(vocab_size)]
    specials = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if id_ in specials else normal for id_ in range(vocab_size)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _stacked(tensors: Iterator[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    """Yields experts' matrices as one array per layer, the rest unchanged."""
    experts: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors:
        before, found, after = name.partition(".mlp.experts.")
        if not found:
            yield name, tensor
            continue
        number, part = after.split(".", 1)
        experts.setdefault(f"{before}.mlp.experts.{part}", {})[int(number)] = tensor
    for name, parts in experts.items():
        yield name, np.stack([parts[number] for number in sorted(parts)])
