"""The packages of the project: folders of the repository that `penstock/` has links to."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(sorted(path.name for path in (ROOT / "penstock").iterdir() if path.is_symlink()))


def process_path(tree: Path = ROOT) -> str:
    """Returns PYTHONPATH for processes that import the packages of `tree`, and find no torch."""
    return os.pathsep.join((str(ROOT / "tests/support/without_torch"), str(tree)))
