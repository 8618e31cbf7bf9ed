"""Digests of model files, as names and packages state them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from penstock.engine.errors import CheckpointError

_FRAGMENT = re.compile(r"sha256=([0-9a-f]{64})")


def stated_digest(fragment: str) -> str | None:
    """Returns the digest that a URL's fragment states; None: it states none."""
    found = _FRAGMENT.fullmatch(fragment)
    return None if found is None else found[1]


def check_digest(file: Path, wanted: str, name: str) -> None:
    """Passes if a file has this digest, and deletes it otherwise.

    Raises:
        CheckpointError: it has another one. The message names the file by `name`.
        OSError: it can't be read.
    """
    with file.open("rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != wanted:
        file.unlink()
        raise CheckpointError(f"{name} has the digest {found}, not {wanted}")
