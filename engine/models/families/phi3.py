"""Phi-3 and Phi-4 (Abdin et al., arXiv 2404.14219 and 2412.08905): Llama's blocks, with fused tensors."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig, RopeConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import every_layer, read_attention, read_mlp, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.rope import flat_rope_table, read_partial_rope


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):  # Phi-4-mini's config.json has them, all false
        config.refuse_unless(name, None, False)
    window = config.optional_integer("sliding_window")
    norm = read_norm(config)
    block = BlockConfig(read_attention(config, rope=_rope), read_mlp(config), norm)
    blocks = sliding(block, every_layer(config, window))
    return read_model(config, family=PHI3.model_type, dtype=dtype, blocks=blocks, norm=norm)


def _rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rope. Early checkpoints call longrope `su` or `yarn`."""
    table = flat_rope_table(config)
    if (table.get("rope_type") or table.get("type")) in ("su", "yarn"):
        renamed = {"rope_scaling": {**table, "rope_type": "longrope"}}
        config = HFConfig({**config.fields, **renamed}, config.defaults)
    return read_partial_rope(config, head_dim)


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    configure=_configure,
    own_modules={
        ("attention", "q"): "self_attn.qkv_proj",
        ("attention", "k"): "self_attn.qkv_proj",
        ("attention", "v"): "self_attn.qkv_proj",
        ("mlp", "gate"): "mlp.gate_up_proj",
        ("mlp", "up"): "mlp.gate_up_proj",
    },
)
