"""Gemma 4 (Google, 2026; as `transformers` has it): full layers have heads of their own number and size.

Compared with Gemma 3, full layers have larger heads, of which a quarter rotates, and may take their values from the
matmul for keys. Values are normed without weights, scores are not scaled, norms' weights are stored as they are, and
each layer ends with a factor. The small models have per-token vectors for each layer, and their last layers read the
keys and values of an earlier layer of the same type. Mixtures run beside the feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.config import (
    AttentionConfig,
    BlockConfig,
    ExpertsConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    PerLayerConfig,
    PerLayerTable,
)
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.gemma2 import NORMS_AROUND
from penstock.engine.models.families.text_part import text_part
from penstock.engine.models.hf.blocks import listed_layers, read_activation, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts
from penstock.engine.models.hf.rope import FULL, SLIDING, read_proportional_rope_of

_FULL_EVERY = 6  # layers, if `layer_types` is left out
_ROPES: Mapping[str, Any] = MappingProxyType(
    {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    }
)


@dataclass(frozen=True, slots=True)
class _Heads:
    """The KV heads of the layers of one type."""

    size: int
    num_kv: int


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("use_bidirectional_attention", None, "vision")  # text only attends to what is before it
    norm = replace(read_norm(config), scales_in_f32=True)
    types = _layer_types(config)
    sources = _kv_layers(config, types)
    heads = _heads_by_type(config, types)
    blocks = [_block(config, norm, types, layer, sources[layer], heads) for layer in range(len(types))]
    model = read_model(
        config, family=GEMMA4_TEXT.model_type, dtype=dtype, blocks=blocks, norm=norm, is_read="per_layer_config"
    )
    return replace(
        model,
        embedding_scale=_rounded(model.hidden_size**0.5, dtype),
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
        per_layer=_table(config, norm, dtype, len(types)),
    )


def _layer_types(config: HFConfig) -> Sequence[str]:
    """Returns the layers' types. The last layer is full whatever `layer_types` says, as in transformers."""
    windows = listed_layers(config, 1, lambda layer: (layer + 1) % _FULL_EVERY != 0)
    return [*(FULL if window is None else SLIDING for window in windows[:-1]), FULL]


def _kv_layers(config: HFConfig, types: Sequence[str]) -> list[int | None]:
    """Returns, for each layer that reads another's keys and values, that layer: the last of its type that has
    its own.
    """
    num_own = len(types) - config.whole("num_kv_shared_layers")
    last = {kind: layer for layer, kind in enumerate(types[: max(0, num_own)])}
    if last.keys() != set(types):
        raise ConfigError(
            f"config.json: num_kv_shared_layers = {shown(config.get('num_kv_shared_layers'))} of {len(types)} layers "
            "leaves a type of layers without keys and values"
        )
    return [None if layer < num_own else last[kind] for layer, kind in enumerate(types)]


def _heads_by_type(config: HFConfig, types: Sequence[str]) -> dict[str, _Heads]:
    """Reads the KV heads of each type. If `per_layer_config` is present, as transformers 5 writes it, only it says how
    layers differ.
    """
    usual = _Heads(config.integer("head_dim"), config.integer("num_key_value_heads"))
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        num_full = config.get("num_global_key_value_heads") if config.flag("attention_k_eq_v") else None
        full = _Heads(
            config.integer("global_head_dim"),
            usual.num_kv if num_full is None else config.integer("num_global_key_value_heads"),
        )
        return {SLIDING: usual, FULL: full}
    found: dict[str, set[_Heads]] = {}
    for layer, kind in enumerate(types):
        found.setdefault(kind, set()).add(_heads_of(by_layer, layer, usual))
    if any(len(heads) > 1 for heads in found.values()):
        raise ConfigError("config.json: per_layer_config must say the same of all layers of one type")
    return {kind: heads for kind, (heads,) in found.items()}


def _heads_of(by_layer: Any, layer: int, usual: _Heads) -> _Heads:
    own = by_layer.get(str(layer), {}) if isinstance(by_layer, dict) else None
    if not isinstance(own, dict) or own.keys() - {"head_dim", "num_key_value_heads"}:
        raise ConfigError(
            f"config.json: per_layer_config must be a table of head_dim and num_key_value_heads by layer, not "
            f"{shown(by_layer)}"
        )
    table = HFConfig(own, {})
    return _Heads(table.integer("head_dim", usual.size), table.integer("num_key_value_heads", usual.num_kv))


def _block(
    config: HFConfig,
    norm: NormConfig,
    types: Sequence[str],
    layer: int,
    kv_layer: int | None,
    heads: Mapping[str, _Heads],
) -> BlockConfig:
    kind = types[layer]
    is_full, own = kind == FULL, heads[kind]
    has_bias, num_heads = config.flag("attention_bias"), config.integer("num_attention_heads")
    if num_heads % own.num_kv:
        raise ConfigError(
            f"config.json: num_attention_heads = {num_heads} is not a multiple of the {own.num_kv} KV heads of a layer"
        )
    if own.size % 2:
        raise ConfigError(f"config.json: a head of {own.size} features is odd; rotary positions need an even number")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=own.num_kv,
        head_dim=own.size,
        rope=read_proportional_rope_of(kind, config, own.size),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=norm,
        v_norm=replace(norm, has_weights=False),
        has_v=not (is_full and config.flag("attention_k_eq_v")),
        sliding_window=None if is_full else config.integer("sliding_window"),
        scale=1.0,
        kv_layer=kv_layer,
    )
    size = config.whole("hidden_size_per_layer_input")
    return BlockConfig(
        attention,
        _feed_forward(config, norm, is_wide=config.flag("use_double_wide_mlp") and kv_layer is not None),
        norm,
        norm_placement="around",
        per_layer=PerLayerConfig(size, read_activation(config, "hidden_activation")) if size else None,
        has_scalar=True,
    )


def _feed_forward(config: HFConfig, norm: NormConfig, *, is_wide: bool) -> MLPConfig | ExpertsConfig:
    mlp = read_mlp(config, activation="hidden_activation")
    mlp = replace(mlp, intermediate_size=mlp.intermediate_size * (2 if is_wide else 1))
    if not config.flag("enable_moe_block"):
        return mlp
    experts = read_experts(
        config,
        "num_experts",
        chosen="top_k_experts",
        intermediate_size="moe_intermediate_size",
        activation="hidden_activation",
        normalized=True,
    )
    return replace(
        experts,
        shared=mlp,
        beside=norm,
        has_expert_scales=True,
    )


def _table(config: HFConfig, norm: NormConfig, dtype: str, num_layers: int) -> PerLayerTable | None:
    size = config.whole("hidden_size_per_layer_input")
    if not size:
        return None
    config.refuse_unless("vocab_size_per_layer_input", config.get("vocab_size"))
    return PerLayerTable(
        num_layers=num_layers,
        size=size,
        norm=norm,
        scale=_rounded(size**0.5, dtype),
        projection_scale=config.integer("hidden_size") ** -0.5,
        sum_scale=2**-0.5,
    )


def _rounded(scale: float, dtype: str) -> float:
    """Rounds a scale of embeddings to the model's type, as transformers does."""
    return float(jnp.dtype(dtype).type(scale))


def _configure_unified(config: HFConfig, dtype: str) -> ModelConfig:
    return replace(_configure(config, dtype), family=GEMMA4_UNIFIED_TEXT.model_type)


GEMMA4_TEXT = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": dict(_ROPES),
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
    },
    configure=_configure,
    own_modules={
        **NORMS_AROUND,
        ("attention", "q_norm"): "self_attn.q_norm",
        ("attention", "k_norm"): "self_attn.k_norm",
        ("per_layer", "gate"): "per_layer_input_gate",
        ("per_layer", "projection"): "per_layer_projection",
        ("per_layer", "norm"): "post_per_layer_input_norm",
        ("mlp", "shared", "gate"): "mlp.gate_proj",
        ("mlp", "shared", "up"): "mlp.up_proj",
        ("mlp", "shared", "down"): "mlp.down_proj",
        ("mlp", "router"): "router.proj",
        ("mlp", "branches", "norm"): "pre_feedforward_layernorm_2",
        ("mlp", "branches", "out_norm"): "post_feedforward_layernorm_2",
        ("mlp", "branches", "shared_out_norm"): "post_feedforward_layernorm_1",
    },
    own_tensors={
        ("scalar",): "layer_scalar",
        ("mlp", "branches", "router_norm", "scale"): "router.scale",
        ("mlp", "expert_scale"): "router.per_expert_scale",
        ("mlp", "experts", "gate", "kernel"): "experts.gate_up_proj",
        ("mlp", "experts", "up", "kernel"): "experts.gate_up_proj",
        ("mlp", "experts", "down", "kernel"): "experts.down_proj",
    },
)

GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    defaults={
        **GEMMA4_TEXT.defaults,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
    },
    configure=_configure_unified,
)
GEMMA4 = text_part(
    "gemma4",
    GEMMA4_TEXT,
    architecture="Gemma4ForConditionalGeneration",
    parts=("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
)
GEMMA4_UNIFIED = text_part(
    "gemma4_unified",
    GEMMA4_UNIFIED_TEXT,
    architecture="Gemma4UnifiedForConditionalGeneration",
    parts=("vision_embedder.", "embed_vision.", "embed_audio."),
)
