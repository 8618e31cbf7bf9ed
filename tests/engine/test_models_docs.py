from __future__ import annotations

import re
from pathlib import Path

from penstock.engine.models import FAMILIES

DOCS = Path(__file__).parent.parent.parent / "docs" / "models.md"


def test_the_table_of_families_has_each_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", DOCS.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((family.model_type, family.architecture) for family in FAMILIES.values())
