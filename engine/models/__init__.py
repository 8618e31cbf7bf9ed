"""Models: the families whose checkpoints can be served, and the one decoder that computes all of them."""

from __future__ import annotations

from penstock.engine.models.attention_interface import (
    QKV,
    Attend,
    AttentionOptions,
    GroupCache,
    LayerCache,
    StackedCache,
)
from penstock.engine.models.axes import ParamPath
from penstock.engine.models.config import (
    AttentionConfig,
    BlockConfig,
    ClampedSwiGLU,
    ExpertsConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)
from penstock.engine.models.decoder import (
    Decoder,
    Overlap,
    WantedTokens,
)
from penstock.engine.models.families import FAMILIES, family_of
from penstock.engine.models.families.family import Family
from penstock.engine.models.layer_groups import LayerGroups, layer_groups
from penstock.engine.models.layer_scans import LayerRun, layer_runs, stacked_layers
from penstock.engine.models.shapes import (
    active_parameters,
    decoder_shapes,
    layer_shapes,
    matmul_parameters,
    num_parameters,
    outer_shapes,
)

__all__ = [
    "FAMILIES",
    "QKV",
    "Attend",
    "AttentionConfig",
    "AttentionOptions",
    "BlockConfig",
    "ClampedSwiGLU",
    "Decoder",
    "ExpertsConfig",
    "Family",
    "GroupCache",
    "LayerCache",
    "LayerGroups",
    "LayerRun",
    "MLPConfig",
    "ModelConfig",
    "NormConfig",
    "Overlap",
    "ParamPath",
    "RopeConfig",
    "StackedCache",
    "WantedTokens",
    "active_parameters",
    "decoder_shapes",
    "family_of",
    "layer_groups",
    "layer_runs",
    "layer_shapes",
    "matmul_parameters",
    "num_parameters",
    "outer_shapes",
    "stacked_layers",
]
