"""What tells one checkpoint from another: cheap digests, so that the workers of a queue can compare theirs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.loading.files import CONFIG_FILE, check_file, read_json

DIGEST_CHARS = 32
SAMPLES = 32  # of a weight file
SAMPLE_BYTES = 4096

_IMMATERIAL = ("_name_or_path", "transformers_version")  # what config.json has that says nothing of the model
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")

AS_STORED = "auto"


@dataclass(frozen=True, slots=True)
class Identity:
    """Of a checkpoint on disk. Equal digests mean equal contents."""

    revision: str | None  # the commit, of a model from the hub
    weights: str  # of config.json, of the names, sizes and samples of the weight files, and of how they are held
    tokenizer: str  # of what the tokenizer does, whatever its files say beside that
    template: str | None  # of the chat templates, if there is one

    def digest(self, chat_format: str | None) -> str:
        """Of all of it, and of how replies are read: workers with equal ones can continue each other's replies."""
        return _digest(json.dumps([self.weights, self.tokenizer, self.template, chat_format]))


def identify(directory: Path, templates: Mapping[str, str], token_rules: str, *, held_as: str = AS_STORED) -> Identity:
    """Reads little of the weights, whatever their size.

    Args:
        directory: of the checkpoint.
        templates: as in `Tokenizer.templates`.
        token_rules: as `Tokenizer.rules` gives them.
        held_as: the setting `weights`: quantized weights are others than those they are made of.

    Raises:
        CheckpointError: a file is missing, or is no file that can be read.
    """
    named = directory.resolve().name
    revision = named if directory.parent.name == "snapshots" and _SNAPSHOT.fullmatch(named) else None
    return Identity(
        revision=revision,
        weights=_weights(directory, held_as),
        tokenizer=_digest(token_rules),
        template=_digest(json.dumps(templates, sort_keys=True)) if templates else None,
    )


def _digest(text: str | bytes) -> str:
    """The first hex digits of SHA-256."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:DIGEST_CHARS]


def _weights(directory: Path, held_as: str) -> str:
    found = hashlib.sha256(_canonical(directory / CONFIG_FILE))
    for path in sorted(directory.glob("*.safetensors")):
        check_file(path)
        found.update(f"\n{path.name} {path.stat().st_size}\n".encode())
        for sample in _samples(path):
            found.update(sample)
    if held_as != AS_STORED:
        found.update(held_as.encode())
    return found.hexdigest()[:DIGEST_CHARS]


def _samples(path: Path) -> Iterator[bytes]:
    """Its beginning, where the names and shapes are, and places spread over all of it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for place in range(SAMPLES):
            file.seek(place * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def _canonical(path: Path) -> bytes:
    """JSON whose order and spaces mean nothing."""
    fields = {name: value for name, value in read_json(path).items() if name not in _IMMATERIAL}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
