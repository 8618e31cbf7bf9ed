"""A model in GGUF files, mostly a single one, as a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.formats.gguf import Gguf
from penstock.engine.formats.gguf_blocks import BLOCK_TYPES
from penstock.engine.formats.tensor_mapping import FLOAT_KINDS, QuantizedFormat
from penstock.engine.loading.files import GENERATION_FILE, read_json, samples
from penstock.engine.loading.gguf.architectures import architecture_of, config_fields
from penstock.engine.loading.gguf.names import LazyArray, View, views
from penstock.engine.loading.gguf.parts import read_parts
from penstock.engine.loading.gguf.tokenizer import end_token_ids, sampling_fields, tokenizer_of
from penstock.engine.loading.weights import Stored, WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_FACTORS = 2**12  # of rotary frequencies: more than half of the largest possible head
QUANTIZED_DTYPE = "bfloat16"  # of activations and floats, as the file states no type for the whole model


class GgufFile:
    """A checkpoint in one file, or in several beside each other, presented like a Hugging Face folder.

    Raises:
        CheckpointError: it cannot be read, or its description is inconsistent.
        ConfigError: it holds something that is not supported.
    """

    revision: str | None = None

    def __init__(self, path: Path) -> None:
        self._header = read_parts(path)
        self.path = self._header.file
        self.config_name = f"metadata of {self.path.name}"
        self._architecture = architecture_of(self._header)
        for name, tensor in self._header.tensors.items():
            if tensor.kind not in FLOAT_KINDS and tensor.kind not in BLOCK_TYPES:
                raise ConfigError(
                    f"{tensor.file.name}: tensor {name} is of type {tensor.kind}, which is not supported; "
                    f"supported are {', '.join((*FLOAT_KINDS, *BLOCK_TYPES))}"
                )

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        fields = config_fields(self._header, self._floats)
        return fields if self.format is None else {**fields, "dtype": QUANTIZED_DTYPE}

    @property
    def generation(self) -> Mapping[str, Any]:
        """The fields that the metadata state. Those of a generation_config.json beside the file override them."""
        fields = {**sampling_fields(self._header), "eos_token_id": list(end_token_ids(self._header))}
        if not self._beside.exists():
            return fields
        return fields | {name: value for name, value in read_json(self._beside).items() if value is not None}

    @property
    def generation_source(self) -> str:
        source = "metadata of the GGUF file"
        return f"{source} and {GENERATION_FILE} beside it" if self._beside.exists() else source

    @property
    def _beside(self) -> Path:
        return self.path.with_name(GENERATION_FILE)

    @cached_property
    def stored(self) -> dict[str, Stored]:
        return {name: Stored(view.tensor.file, view.shape, view.tensor.kind) for name, view in self._views.items()}

    @property
    def format(self) -> QuantizedFormat | None:
        return Gguf() if any(tensor.kind in BLOCK_TYPES for tensor in self._header.tensors.values()) else None

    def weights(self) -> WeightFiles:
        return _GgufWeights(self.stored, self._views)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tokenizer_of(self._header)

    def contents(self) -> Iterator[bytes]:
        """Yields what identifies the weights. Tokenizer and templates are left out, because they have digests of their
        own; so are the files' names.
        """
        yield json.dumps(self.fields, sort_keys=True, separators=(",", ":")).encode()
        first: dict[Path, int] = {}
        for name, tensor in self._header.tensors.items():
            yield f"\n{name} {tensor.kind} {tensor.shape}".encode()
            first[tensor.file] = min(tensor.start, first.get(tensor.file, tensor.start))
        for file, start in first.items():
            yield from samples(file, start)

    @cached_property
    def _views(self) -> Mapping[str, View]:
        return views(self._header, self._architecture, self.fields)

    def _floats(self, name: str) -> np.ndarray:
        tensor = self._header.tensors[name]
        if tensor.kind not in FLOAT_KINDS or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
            raise CheckpointError(
                f"{tensor.file.name}: tensor {name} must be at most {MAX_FACTORS} floats in a row, "
                f"not {list(tensor.shape)} of {tensor.kind}"
            )
        return View(tensor).array(_mapped(tensor.file))[:].astype(np.float32)


class _GgufWeights(WeightFiles):
    def __init__(self, stored: Mapping[str, Stored], of_names: Mapping[str, View]) -> None:
        super().__init__(stored)
        self._of_names = of_names
        self._data = {file: _mapped(file) for file in {each.file for each in stored.values()}}

    def tensor(self, name: str) -> LazyArray:
        view = self._of_names[name]
        return view.array(self._data[view.tensor.file])

    mapped = tensor


def _mapped(file: Path) -> np.ndarray:
    return np.memmap(file, np.uint8, "r")
