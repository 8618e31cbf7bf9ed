"""Cohere 2: Command R7B and Command A (Cohere, arXiv 2504.00698).

Attention and feed-forward read one LayerNorm, in parallel. Layers with a window rotate neighbouring features; those
with full attention have no positional encoding.
"""

from __future__ import annotations

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.cohere import cohere_block, cohere_model
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import listed_layers, sliding, without_positions
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    for name in ("use_parallel_block", "use_gated_activation"):
        config.refuse_unless(name, None, True)
    block, pattern = cohere_block(config), config.integer("sliding_window_pattern")
    windows = listed_layers(config, config.integer("sliding_window"), lambda layer: (layer + 1) % pattern != 0)
    blocks = [slid if slid.attention.sliding_window else without_positions(slid) for slid in sliding(block, windows)]
    return cohere_model(config, COHERE2.model_type, dtype, blocks)


COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
    configure=_configure,
)
