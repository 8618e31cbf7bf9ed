"""dots.llm1 (rednote-hilab, arXiv 2506.05767): Qwen3's attention, and experts like those of GLM-4.5."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.glm4_moe import GLM4_MOE
from penstock.engine.models.hf.blocks import listed_layers, read_attention, read_mlp, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import dense_first, read_sigmoid_experts


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    has_bias, norm = config.flag("attention_bias"), read_norm(config)
    attention = read_attention(config, qkv_bias=has_bias, out_bias=has_bias, qk_norm=norm)
    mlps = dense_first(config, read_mlp(config), read_sigmoid_experts(config), config.whole("first_k_dense_replace"))
    blocks = [
        block
        for mlp, window in zip(mlps, _windows(config), strict=True)
        for block in sliding(BlockConfig(attention, mlp, norm), [window])
    ]
    return read_model(config, family=DOTS1.model_type, dtype=dtype, blocks=blocks, norm=norm)


def _windows(config: HFConfig) -> tuple[int | None, ...]:
    """Returns each layer's window. Without `layer_types` the layers from `max_window_layers` on slide."""
    window = config.optional_integer("sliding_window")
    first = config.whole("max_window_layers")
    return listed_layers(config, window, lambda layer: layer >= first)


DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    configure=_configure,
    own_modules=GLM4_MOE.own_modules,
    own_tensors=GLM4_MOE.own_tensors,
)
