"""The examples of a property are the same from run to run, whatever its process has imported before."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn() -> list[str]:
    texts: list[str] = []

    @settings(derandomize=True, database=None, max_examples=300)
    @given(st.text())
    def draw(text: str) -> None:
        texts.append(text)

    draw()
    return texts


def test_a_module_that_was_imported_changes_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    file = tmp_path.with_name("of_the_project") / "letters.py"  # Hypothesis passes over paths that begin with `test`
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(f"NAME_{each} = 'constant {each}'" for each in range(500)))
    spec = importlib.util.spec_from_file_location("letters_of_the_project", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "letters_of_the_project", module)
    assert drawn() == before
