from __future__ import annotations

import re

from models_page import DOCS, page

from penstock.engine.formats.gguf_blocks import BLOCK_TYPES
from penstock.engine.loading.gguf.architectures import ARCHITECTURES
from penstock.engine.models import FAMILIES


def test_the_table_of_families_has_each_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", DOCS.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((family.model_type, family.architecture) for family in FAMILIES.values())


def test_the_table_of_gguf_architectures_has_each_and_no_other() -> None:
    text = DOCS.read_text().split("### GGUF")[1]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\w+)(?:;.*)? \|$", text, re.MULTILINE))
    assert rows == {name: architecture.model_type for name, architecture in ARCHITECTURES.items()}


def test_all_types_of_blocks_are_named() -> None:
    text = DOCS.read_text().split("### GGUF")[1]
    assert [name for name in BLOCK_TYPES if not re.search(rf"\b{name}\b", text)] == []


def test_what_is_tested_is_what_the_tests_say() -> None:
    text = DOCS.read_text()
    assert page(text) == text, "write it with `make docs`"
