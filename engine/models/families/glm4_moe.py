"""GLM-4.5 and its successors (GLM-4.5 Team, arXiv 2508.06471): sigmoid router, shared experts, dense layers first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.engine.models.axes import ParamPath
from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import QWEN_EXPERTS, Family
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.hf.blocks import every_layer, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import dense_first, read_sigmoid_experts
from penstock.engine.models.hf.rope import read_partial_rope

SHARED_EXPERTS: Mapping[ParamPath, str] = MappingProxyType(
    {("mlp", "shared", part): f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
)


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    norm = read_norm(config)
    qk_norm = norm if config.flag("use_qk_norm") else None
    attention = read_attention(config, rope=read_partial_rope, qkv_bias=config.flag("attention_bias"), qk_norm=qk_norm)
    mlps = dense_first(config, read_mlp(config), read_sigmoid_experts(config), config.whole("first_k_dense_replace"))
    blocks = [BlockConfig(attention, mlp, norm) for mlp, _ in zip(mlps, every_layer(config, None), strict=True)]
    model = read_model(config, family=GLM4_MOE.model_type, dtype=dtype, blocks=blocks, norm=norm)
    num_draft_layers = max(config.whole(name) for name in ("num_nextn_predict_layers", "num_mtp_layers"))
    return replace(model, num_draft_layers=num_draft_layers)


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    configure=_configure,
    own_modules={
        **QWEN3.own_modules,
        **QWEN_EXPERTS,
        **SHARED_EXPERTS,
    },
    own_tensors={("mlp", "correction"): "mlp.gate.e_score_correction_bias"},
)
