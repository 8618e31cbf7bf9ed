"""`python -m penstock.engine.native`: builds the kernels for every kind of processor into the installed package."""

from __future__ import annotations

import sys

from penstock.engine.native.compilation import NativeUnavailableError
from penstock.engine.native.shipping import build_all

if __name__ == "__main__":
    try:
        for library in build_all():
            sys.stdout.write(f"{library}\n")
    except NativeUnavailableError as error:
        sys.exit(str(error))
