"""OLMo 3 (arXiv 2512.13961): OLMo 2 with a window in three of four layers, whose rope is never scaled."""

from __future__ import annotations

from functools import partial

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.olmo2 import OLMO2_DEFAULTS, OLMO2_MODULES, olmo2_block, olmo2_norm
from penstock.engine.models.hf.blocks import blocks_by_type, read_model
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.rope import FULL, SLIDING, read_rope_of


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    full, local = (olmo2_block(config, partial(read_rope_of, layer_type)) for layer_type in (FULL, SLIDING))
    blocks = blocks_by_type(config, full, local, full_every=4)
    return read_model(config, family=OLMO3.model_type, dtype=dtype, blocks=blocks, norm=olmo2_norm(config))


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={
        **OLMO2_DEFAULTS,
        "sliding_window": 4096,
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 500_000.0,  # whatever rope_theta is, as in transformers
    },
    configure=_configure,
    own_modules=OLMO2_MODULES,
)
