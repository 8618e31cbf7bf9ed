"""The packages of the project: folders of the repository that `penstock/` has links to."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(sorted(path.name for path in (ROOT / "penstock").iterdir() if path.is_symlink()))
