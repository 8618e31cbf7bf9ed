"""All-reduces in parts, one sent while the next is multiplied, give the numbers of whole ones."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from penstock.engine.formats.packing import Packing
from penstock.engine.loading.checkpoint import abstract_model
from penstock.engine.models import BlockConfig, ExpertsConfig, MLPConfig, NormConfig
from penstock.engine.models.residual_stream import ResidualStream
from penstock.engine.sharding.overlapped_sums import overlap
from penstock.engine.sharding.placement import place, split_model
from penstock.tools.plan import preset
from tests.engine.engines import TINY
from tests.engine.sharding.devices import said_by

pytestmark = pytest.mark.versions

DENSE = replace(TINY.blocks[0], mlp=MLPConfig(192))


def test_parts_compute_what_the_whole_computes() -> None:
    """A process has eight devices; overlap_process.py says how far steps in parts are from whole ones."""
    found = said_by("tests.engine.sharding.overlap_process")
    assert len(found) == 5
    for name, differences in found.items():
        most = 0.03 if name == "bfloat16" else 2e-6
        assert max(differences["hidden"], differences["pages"]) < most, name
    rounded = found["bfloat16"]  # at the same places in one part and in two
    assert rounded["first keys"] < 0.01 < 0.1 < rounded["first keys of the whole"]


@pytest.mark.parametrize(
    ("block", "hidden_size"),
    [
        (DENSE, 128 + 256),  # two parts would cut a tile
        (replace(DENSE, norm=NormConfig(1e-5, kind="layer")), 256),
        (replace(DENSE, norm_placement="after"), 256),
        (replace(DENSE, norm_placement="around"), 256),
        (replace(DENSE, parallel=True), 256),
        (replace(DENSE, mlp=ExpertsConfig(num_experts=4, num_chosen=2, intermediate_size=64)), 256),
        (replace(DENSE, packed=((("mlp", "down"), Packing("int8", 64)),)), 256),
    ],
)
def test_layers_that_are_not_two_norms_and_dense_matmuls_have_no_parts(block: BlockConfig, hidden_size: int) -> None:
    served = replace(TINY, blocks=(DENSE,) * 2, hidden_size=256)
    assert ResidualStream.serve(served)
    assert not ResidualStream.serve(replace(served, blocks=(DENSE, block), hidden_size=hidden_size))


@pytest.mark.parametrize(
    ("name", "tensor", "sizes"),
    [
        ("Llama-3.3-70B", 8, [128, 512, 1024]),  # 256 would move a tenth more bytes than its weights
        ("Llama-3.1-8B", 4, [512, 1024]),
        ("Llama-3.1-8B", 8, []),  # a device has too little to compute
        ("Llama-3.1-8B", 2, []),
        ("Mixtral-8x7B", 4, []),
    ],
)
def test_sums_travel_where_that_pays(name: str, tensor: int, sizes: list[int]) -> None:
    model = preset(name)
    assert model is not None
    placement = place(jax.devices()[:1] * tensor, tensor)
    decoder = abstract_model(split_model(model, tensor), placement, stacked=True)
    overlap(decoder, placement)
    assert [size for size in (16, 64, 128, 256, 512, 1024) if decoder.overlaps(size)] == sizes
