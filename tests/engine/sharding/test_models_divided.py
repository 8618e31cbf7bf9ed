"""Each family gives the same tokens over several devices: heads, features, vocabulary and experts are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.models import FAMILIES
from tests.engine.checkpoints import OF_FAMILY
from tests.engine.engines import write_model
from tests.engine.sharding.devices import Runs, run_models
from tests.engine.whole import test_engine_parity

pytestmark = pytest.mark.slow

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1003}
FEATURES = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}


def _divided(family: str, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    has_experts = any("expert" in field for field in {**OF_FAMILY.get(family, {}), **config})
    return "1,2,1x2" if has_experts else "1,2", {"family": family, **config, **HEADS}


MODELS = {family: _divided(family, config) for family, config in test_engine_parity.MODELS.values()}
MODELS |= {
    name: _divided(family, config)
    for name, (family, config) in test_engine_parity.MODELS.items()
    if family == "gemma4_text"
}
"""Models with two KV heads and a vocabulary that two devices do not divide; a mixture also with its experts divided."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_models({name: (write(name, tmp_path_factory), layouts) for name, (layouts, _) in MODELS.items()})


def write(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = MODELS[name][1]
    even = {field: size for field, size in FEATURES.items() if field in config}
    return write_model(tmp_path_factory.mktemp(name), **{**config, **even})


@pytest.mark.parametrize(
    ("family", "layout"), [(name, layout) for name, (layouts, _) in MODELS.items() for layout in layouts.split(",")[1:]]
)
def test_several_devices_give_the_tokens_of_one(runs: Runs, family: str, layout: str) -> None:
    alone, together = runs[family]["1"], runs[family][layout]
    assert together["tokens"] == alone["tokens"]
    assert together["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)


def test_no_family_is_left_out() -> None:
    texts = {name for name, family in FAMILIES.items() if family.texts}  # their text part is another family
    assert {config["family"] for _, config in MODELS.values()} == FAMILIES.keys() - texts
