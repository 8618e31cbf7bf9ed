"""Every parameter of a decoder has logical axes, as many as it has dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.models import decoder_shapes
from penstock.engine.models.axes import logical_axes
from penstock.engine.models.config import DeltaNetConfig, ShortConvConfig
from tests.engine.engines import TINY

SIZES = {"vocab": 128, "embed": 64, "heads": 64, "kv_heads": 32, "per_head": 4, "mlp": 96, "channels": 40, "layers": 3}
SIZES |= {"key_heads": 60, "value_heads": 40}
PADDED = replace(TINY, vocab_padding=28)
BIASED = replace(
    PADDED,
    tie_word_embeddings=False,
    blocks=tuple(
        replace(
            block,
            mixer=replace(block.attention, qkv_bias=True, out_bias=True, sinks=True, has_gate=True),
            mlp=replace(block.mlp, bias=True),
        )
        for block in TINY.blocks
    ),
)
NORMED = replace(
    PADDED,
    blocks=tuple(
        replace(
            block,
            mixer=replace(block.attention, qk_norm=None, qk_projection_norm=block.norm),
            norm_placement="around",
        )
        for block in TINY.blocks
    ),
)
HYBRID = replace(
    PADDED,
    blocks=(*PADDED.blocks[:1] * 3, *[replace(PADDED.blocks[0], mixer=ShortConvConfig(40, 3, bias=True))] * 3),
)
DELTA_NETS = replace(
    PADDED,
    blocks=(
        *PADDED.blocks[:1] * 3,
        *[replace(PADDED.blocks[0], mixer=DeltaNetConfig(20, 40, 3, 1, 4, PADDED.norm))] * 3,
    ),
)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "config",
    [PADDED, BIASED, NORMED, HYBRID, DELTA_NETS],
    ids=["tied", "biased", "normed", "hybrid", "delta nets"],
)
def test_each_axis_has_the_size_that_its_name_means(config: Any, stacked: bool) -> None:
    _, shapes = decoder_shapes(config, stacked=stacked)
    assert shapes
    for path, param in shapes.items():
        axes = logical_axes(path, len(param.shape))
        assert len(axes) == len(param.shape), path
        for axis, size in zip(axes, param.shape, strict=True):
            assert axis is None or SIZES[axis] == size, path
