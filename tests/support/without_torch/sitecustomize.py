"""Hides torch from processes that tests start: Python imports a module of this name first.

transformers imports torch wherever it is installed, which takes a third of a worker's start. Only tests need torch;
users don't have it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class WithoutTorch(PathFinder):
    """Leaves no name in `sys.modules`, where scipy looks for torch."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname == "torch" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
