"""K-EXAONE (LG AI Research, arXiv 2601.01739): EXAONE 4's attention after norms, and experts as DeepSeek-V3's."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.exaone4 import EXAONE4, exaone4_blocks
from penstock.engine.models.families.family import QWEN_EXPERTS, Family
from penstock.engine.models.families.glm4_moe import SHARED_EXPERTS
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.hf.blocks import read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_sigmoid_experts, typed_layers


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    experts = read_sigmoid_experts(config, "num_experts", num_shared="num_shared_experts")
    mlps = typed_layers(config, read_mlp(config), experts, config.whole("first_k_dense_replace"))
    blocks = [
        replace(block, mlp=mlp, norm_placement="before")
        for block, mlp in zip(exaone4_blocks(config), mlps, strict=True)
    ]
    norm = read_norm(config)
    return read_model(config, family=EXAONE_MOE.model_type, dtype=dtype, blocks=blocks, norm=norm)


EXAONE_MOE = Family(
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    defaults={
        **EXAONE4.defaults,
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    configure=_configure,
    own_modules={**QWEN3.own_modules, **QWEN_EXPERTS, **SHARED_EXPERTS},
    own_tensors={("mlp", "correction"): "mlp.e_score_correction_bias"},
    passed_over=("mtp.",),
)
