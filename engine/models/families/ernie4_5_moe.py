"""ERNIE 4.5 with experts (Baidu, 2025): its dense blocks, and a router whose choice has a correction."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.families.ernie4_5 import ERNIE4_5
from penstock.engine.models.families.family import QWEN_EXPERTS, Family
from penstock.engine.models.families.glm4_moe import SHARED_EXPERTS
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts
from penstock.engine.models.hf.rope import read_neighbours_rope


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("use_bias", None, False)  # the head would have one, too
    config.refuse_unless("moe_norm_min", None, 1e-12)
    norm = read_norm(config)
    dense, experts = read_mlp(config), _experts(config)
    block = BlockConfig(read_attention(config, rope=read_neighbours_rope), dense, norm)
    blocks = [
        replace(each, mlp=experts) if _is_sparse(config, layer) else each
        for layer, each in enumerate(full_layers(config, block))
    ]
    return read_model(config, family=ERNIE4_5_MOE.model_type, dtype=dtype, blocks=blocks, norm=norm)


def _experts(config: HFConfig) -> ExpertsConfig:
    experts = read_experts(
        config, "moe_num_experts", chosen="moe_k", intermediate_size="moe_intermediate_size", normalized=True
    )
    num_shared = config.whole("moe_num_shared_experts")
    shared = MLPConfig(experts.intermediate_size * num_shared, experts.activation) if num_shared else None
    return replace(experts, has_correction=True, shared=shared)


def _is_sparse(config: HFConfig, layer: int) -> bool:
    last = config.get("moe_layer_end_index")
    is_within = config.whole("moe_layer_start_index") <= layer and (
        last == -1 or layer <= config.whole("moe_layer_end_index")
    )
    return is_within and (layer + 1) % config.integer("moe_layer_interval") == 0


ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={
        **ERNIE4_5.defaults,
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    configure=_configure,
    own_modules={**QWEN_EXPERTS, **SHARED_EXPERTS},
    own_tensors={("mlp", "correction"): "mlp.moe_statics.e_score_correction_bias"},
)
