"""Qwen3-VL (Bai et al., arXiv 2511.21631): a Qwen3, dense or with experts, beside a vision tower.

Rotary positions have three axes. A text moves all of them together, so they are those of a Qwen3. The vision tower adds
nothing to the first layers where there is no image.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.family import FUSED_EXPERTS
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.families.qwen3_moe import QWEN3_MOE
from penstock.engine.models.families.text_part import text_part
from penstock.engine.models.hf.config import HFConfig

_DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_act": "silu",
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}
_WINDOWS = ("use_sliding_window", "sliding_window", "layer_types")


def _configure_moe(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("norm_topk_prob", True)  # transformers ignores it
    return QWEN3_MOE.configure(config, dtype)


QWEN3_VL = text_part(
    "qwen3_vl",
    replace(
        QWEN3,
        model_type="qwen3_vl_text",
        defaults={
            **_DEFAULTS,
            "hidden_size": 4096,
            "intermediate_size": 22_016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
    ),
    architecture="Qwen3VLForConditionalGeneration",
    parts=("visual.",),
    ignored=_WINDOWS,
)
QWEN3_VL_MOE = text_part(
    "qwen3_vl_moe",
    replace(
        QWEN3_MOE,
        model_type="qwen3_vl_moe_text",
        defaults={
            **_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": True,
        },
        configure=_configure_moe,
        own_tensors=FUSED_EXPERTS,
        # Published ones are stored as held here; those that transformers writes are transposed.
        plain_or_not=frozenset({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
    ),
    architecture="Qwen3VLMoeForConditionalGeneration",
    parts=("visual.",),
    ignored=_WINDOWS,
)
