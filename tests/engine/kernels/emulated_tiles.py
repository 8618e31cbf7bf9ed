"""Runs pytest with the arguments in a process whose C++ kernels multiply by emulated tiles."""

from __future__ import annotations

import sys
from unittest.mock import patch

import pytest

from penstock.engine.deployment.deployment import DEFAULT_BUILD_DIR
from penstock.engine.kernels.cpu import NativeLibrary
from penstock.engine.kernels.cpu.processor_kinds import ProcessorKind

EMULATED = ProcessorKind("emulated tiles", ("-DPENSTOCK_TILES=2",), frozenset())


def main() -> int:
    library = NativeLibrary(DEFAULT_BUILD_DIR / "native")
    with patch("penstock.engine.kernels.cpu.compilation.kinds_here", lambda: (EMULATED,)):
        library.load_for("matmul", "native")  # once for the process
        assert library.instructions == "TDPBF16PS, emulated"
        return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
