"""Quantized checkpoints: loaded packed, they compute what the same values unquantized do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import reference_logits
from quantized_checkpoints import write_quantized
from quantized_weights import SCHEMES
from test_models_parity import our_logits

GEOMETRY = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPT = [5, 9, 77, 3, 41, 8, 100]


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_same_values_unquantized(tmp_path: Path, name: str) -> None:
    quantized, plain = write_quantized(tmp_path, SCHEMES[name], "qwen2", **GEOMETRY)
    expected, found = reference_logits(plain, PROMPT), our_logits(quantized, PROMPT)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
