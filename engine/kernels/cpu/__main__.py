"""`python -m penstock.engine.kernels.cpu`: builds kernels for every kind of processor into the installed package."""

from __future__ import annotations

import sys

from penstock.engine.kernels.cpu.compilation import NativeUnavailableError
from penstock.engine.kernels.cpu.shipping import build_all

if __name__ == "__main__":
    try:
        for library in build_all():
            sys.stdout.write(f"{library}\n")
    except NativeUnavailableError as error:
        sys.exit(str(error))
