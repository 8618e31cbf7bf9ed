"""Penstock's own small model, for demonstrations and tests: 1.7 million parameters that add, count and spell.

`MODEL_DIR` is its Hugging Face checkpoint folder; the repository's `examples/demo_model/` made it.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""The checkpoint shipped with the package: config, weights, tokenizer, chat template and generation defaults."""

NAME = "demo"
"""What it is called where a model is named."""
