"""Opens a checkpoint: a folder in Hugging Face format, or GGUF files. Everything else only sees a Checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.tensor_mapping import QuantizedFormat
from penstock.engine.loading.files import CONFIG_FILE
from penstock.engine.loading.folder import Folder
from penstock.engine.loading.gguf.file import GgufFile
from penstock.engine.loading.gguf.parts import names_of_parts
from penstock.engine.loading.weights import Stored, WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GGUF_SUFFIX = ".gguf"


class Checkpoint(Protocol):
    """Description of a model before it is loaded, and access to its weights.

    All methods raise CheckpointError for files that are missing or damaged, and ConfigError for what is not supported.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config_name(self) -> str:
        """The name of `fields` in messages."""

    @property
    def revision(self) -> str | None:
        """The commit, for a model from the hub."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of config.json."""

    @property
    def generation(self) -> Mapping[str, Any]:
        """The fields of generation_config.json."""

    @property
    def generation_source(self) -> str | None:
        """Where these fields are stated; None: nowhere."""

    @property
    def stored(self) -> dict[str, Stored]:
        """The description of each tensor, by name."""

    @property
    def format(self) -> QuantizedFormat | None:
        """The format of quantized weights; None: they are not quantized."""

    def weights(self) -> WeightFiles: ...

    def tokenizer(self) -> PreTrainedTokenizerFast: ...

    def contents(self) -> Iterator[bytes]:
        """Yields what identifies the weights: little of them, whatever their size."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder, or a GGUF file with those that are parts of the same model.

    A folder without config.json may hold the GGUF files of one model.

    Raises:
        CheckpointError: it cannot be read, or the folder holds the GGUF files of several models and no config.json.
        ConfigError: a GGUF file holds something that is not supported.
    """
    if not path.is_dir():
        return GgufFile(path)
    files = [] if (path / CONFIG_FILE).exists() else sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if len(files) > 1 and {file.name for file in files} - set(names_of_parts(files[0].name)):
        raise CheckpointError(f"{path} holds {len(files)} GGUF files, {files[0].name} among them: name the one to load")
    return GgufFile(files[0]) if files else Folder(path)
