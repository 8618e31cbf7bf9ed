"""Digests of model files, as names and packages state them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from penstock.engine.errors import CheckpointError

_FRAGMENT = re.compile(r"sha256=([0-9a-f]{64})")


def stated_digest(fragment: str, name: str, *, is_one_file: bool) -> str | None:
    """Returns the digest that a URL's fragment states; None: there is no fragment.

    Args:
        fragment: what comes after `#`.
        name: the model's in messages.
        is_one_file: whether the model is a single file: others have no digest.

    Raises:
        CheckpointError: the fragment is not the digest of a file.
    """
    found = _FRAGMENT.fullmatch(fragment)
    if fragment and found is None:
        raise CheckpointError(f"the fragment of {name} is not sha256= with 64 hex digits")
    if found is not None and not is_one_file:
        raise CheckpointError(f"{name} is not a single file, and sha256= is the digest of one; leave it out")
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
