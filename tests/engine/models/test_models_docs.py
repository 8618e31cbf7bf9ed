from __future__ import annotations

import re

from penstock.engine.formats.gguf_blocks import BLOCK_TYPES
from penstock.engine.loading.gguf.architectures import ARCHITECTURES
from penstock.engine.models import FAMILIES
from tests.engine.loading import test_gguf_models
from tests.engine.models.models_page import DOCS, page


def test_each_gguf_architecture_is_tested() -> None:
    """The page says so of all of them."""
    tested = {FAMILIES[family].model_type for family, _, _ in test_gguf_models.CASES.values()}
    assert {architecture.model_type for architecture in ARCHITECTURES.values()} - tested == set()


def test_all_types_of_blocks_are_named() -> None:
    text = DOCS.read_text().split("### GGUF")[1]
    assert [name for name in BLOCK_TYPES if not re.search(rf"\b{name}\b", text)] == []


def test_what_is_tested_is_what_the_tests_say() -> None:
    text = DOCS.read_text()
    assert page(text) == text, "write it with `make docs`"
