"""A checkpoint's folder in Hugging Face format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.formats.detection import read_format
from penstock.engine.formats.tensor_mapping import QuantizedFormat
from penstock.engine.loading.files import CONFIG_FILE, GENERATION_FILE, check_file, check_files, read_json, samples
from penstock.engine.loading.headers import stored_tensors
from penstock.engine.loading.weights import Stored, WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_IMMATERIAL = ("_name_or_path", "transformers_version")  # fields of config.json that say nothing of the model
_VOCABULARIES = ("tokenizer*.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")  # of transformers' classes
_SETTINGS = "tokenizer_config.json"
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")


class Folder:
    """A checkpoint's folder. Files are read on demand: what is needed depends on the question."""

    config_name = CONFIG_FILE

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def revision(self) -> str | None:
        named = self.path.resolve().name
        return named if self.path.parent.name == "snapshots" and _SNAPSHOT.fullmatch(named) else None

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        return read_json(self.path / CONFIG_FILE)

    @property
    def generation(self) -> Mapping[str, Any]:
        """The fields of generation_config.json; without the file, none."""
        return {} if self.generation_source is None else read_json(self.path / GENERATION_FILE)

    @property
    def generation_source(self) -> str | None:
        return GENERATION_FILE if (self.path / GENERATION_FILE).exists() else None

    @cached_property
    def stored(self) -> dict[str, Stored]:
        return stored_tensors(self.path)

    @property
    def format(self) -> QuantizedFormat | None:
        return read_format(self.fields)

    def weights(self) -> WeightFiles:
        return WeightFiles(self.stored)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Loads the tokenizer. Code in the checkpoint is never run.

        For a folder without a vocabulary, transformers makes up an empty one for some classes; here it is refused.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes long; a thread of its own may do it

        check_files(self.path)
        files = {file.name for pattern in _VOCABULARIES for file in self.path.glob(pattern)} - {_SETTINGS}
        lacking = f"{self.path} holds no tokenizer: there is no tokenizer.json, nor another file with its vocabulary"
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the parsers beneath raise all kinds, plain Exception included
            raise CheckpointError(
                f"no tokenizer could be loaded from {self.path}: {error}" if files else lacking
            ) from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                f"{type(tokenizer).__name__} in {self.path} is not a fast tokenizer; save one with a tokenizer.json"
            )
        if not files:
            raise CheckpointError(lacking)
        return tokenizer

    def contents(self) -> Iterator[bytes]:
        fields = {name: value for name, value in self.fields.items() if name not in _IMMATERIAL}
        yield json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()  # order and spaces do not matter
        for path in sorted(self.path.glob("*.safetensors")):
            check_file(path)
            yield f"\n{path.name} {path.stat().st_size}\n".encode()
            yield from samples(path)
