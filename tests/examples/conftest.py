"""Programs of the demo model, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.execution.compilation import keep_compilations


@pytest.fixture(scope="session", autouse=True)
def compiled_once(compile_cache: Path) -> None:
    keep_compilations(compile_cache)
