"""Models of the Hugging Face Hub: a repository, or one GGUF file of it, each perhaps at a revision."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.errors import CheckpointError, listed
from penstock.engine.loading.fetched import damaged_files
from penstock.engine.loading.files import CONFIG_FILE, GENERATION_FILE
from penstock.engine.loading.gguf.parts import names_of_parts
from penstock.engine.loading.headers import INDEX_FILE, NAMED_AT_MOST, WEIGHTS_FILE
from penstock.engine.loading.source import GGUF_SUFFIX

HUB_FILES = (
    CONFIG_FILE,
    GENERATION_FILE,
    WEIGHTS_FILE,
    INDEX_FILE,
    "model-*-of-*.safetensors",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)"
    rf"(?P<file>(/[\w.-]+)+{re.escape(GGUF_SUFFIX)})?"
    r"(@(?P<revision>[\w./-]+))?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """`owner/name[/FILE.gguf][@REVISION]`."""

    repository: str
    file: str | None  # None: the files of a checkpoint
    revision: str | None

    @property
    def patterns(self) -> list[str]:
        """The files to fetch: of a model in several GGUF files, all of them."""
        return list(HUB_FILES) if self.file is None else names_of_parts(self.file)


def hub_name(model: str) -> HubName | None:
    """Reads a name of the hub; None: it is none."""
    found = _NAME.fullmatch(model)
    if found is None:
        return None
    return HubName(found["repository"], found["file"] and found["file"][1:], found["revision"])


def fetch_from_hub(name: HubName) -> Path:
    """Returns the folder or the file of a model, whose missing files are fetched.

    Raises:
        CheckpointError: the hub could not deliver it.
    """
    folder = _fetched(name, name.patterns)
    if damaged := damaged_files(folder):
        folder = _fetched(name, damaged, is_again=True)
        if damaged := damaged_files(folder):
            raise CheckpointError(
                f"{', '.join(damaged[:NAMED_AT_MOST])} in {folder}: not what the hub delivered, and it could not be "
                "fetched again; delete it, or give another directory"
            )
    if not (folder / (name.file or CONFIG_FILE)).exists():
        raise CheckpointError(f"{name.repository} has no file {name.file or CONFIG_FILE}{_ggufs(name)}")
    return folder / name.file if name.file else folder


def _ggufs(name: HubName) -> str:
    """Returns the end of an error: the GGUF files of a repository, if it has any and the hub tells."""
    from huggingface_hub import list_repo_files  # as in `_fetched`

    try:
        names = list_repo_files(name.repository, revision=name.revision)
    except Exception:  # also those of the client's HTTP library; the error is told without them
        return ""
    files = [f"{name.repository}/{file}" for file in names if file.endswith(GGUF_SUFFIX)]
    return f"; each of its GGUF files can be named: {listed(files, NAMED_AT_MOST)}" if files else ""


def _fetched(name: HubName, files: Sequence[str], *, is_again: bool = False) -> Path:
    """Fetches files of a model; `is_again` replaces those that are there. Raises like `fetch_from_hub`."""
    from huggingface_hub import snapshot_download  # takes as long as numpy, and most starts fetch nothing

    try:
        return Path(
            snapshot_download(
                name.repository, revision=name.revision, allow_patterns=list(files), force_download=is_again
            )
        )
    except (OSError, ValueError) as error:  # all that the hub's client raises for network, access and names
        raise CheckpointError(
            f"{name.repository} is not a local directory, and the Hugging Face Hub did not deliver it; check the name "
            "and the network (a gated model needs HF_TOKEN), or download it and give the directory; "
            f"{'damaged: ' + ', '.join(files[:NAMED_AT_MOST]) + '; ' if is_again else ''}"
            f"{type(error).__name__}: {error}"
        ) from error
