"""Maps tensors of a GGUF file to those of a Hugging Face checkpoint, by the `gguf` library's map of names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.tensor_mapping import FLOAT_KINDS
from penstock.engine.loading.gguf.architectures import ROPE_FACTORS, Architecture
from penstock.engine.loading.gguf.header import GGUFHeader, TensorInfo
from penstock.engine.models import FAMILIES
from penstock.engine.models.families.family import LAYER_MODULES, Family

MAX_VIEWS = 2**20
_LAYER, _OF_LAYER = "blk.0.", re.compile(r"blk\.(\d+)\.(.+)")
_ROWS_OF_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_WITHOUT_FIRST_AXIS = "ffn_gate_inp_shexp.weight"  # of 1


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of a checkpoint in the file: a whole stored tensor, or one expert's part of it."""

    tensor: TensorInfo
    expert: int | None = None
    num_heads: int = 0  # heads whose rows have neighbouring features paired; 0: rows are in order
    less: float = 0.0  # amount that was added to the stored values, and is subtracted when they are read
    is_row: bool = False  # stored without the first axis, which is 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape; for blocks, that of their bytes."""
        shape = self._stored_shape
        return (1, *shape) if self.is_row else shape if self.expert is None else shape[1:]

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        tensor = self.tensor
        return tensor.shape if tensor.kind in FLOAT_KINDS else (*tensor.shape[:-1], tensor.row_bytes)

    def array(self, data: np.ndarray) -> LazyArray:
        """Returns the array in the mapped bytes of its file: nothing is read yet."""
        mine = data[self.tensor.start : self.tensor.start + self.tensor.num_bytes]
        all_of_it = mine.view(jnp.dtype(FLOAT_KINDS.get(self.tensor.kind, "uint8"))).reshape(self._stored_shape)
        values = all_of_it if self.expert is None else all_of_it[self.expert]
        return LazyArray(values[None] if self.is_row else values, _order(self.shape[0], self.num_heads), self.less)


@dataclass(frozen=True, slots=True)
class LazyArray:
    """An array that is read when it is indexed. Floats are copied."""

    values: np.ndarray
    order: np.ndarray | None  # where each row is stored
    less: float

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        rows = self.values
        if self.order is not None and index:
            rows, index = rows[self.order[index[0]]], (slice(None), *index[1:])
        if self.values.dtype == np.uint8:  # will be converted, which copies
            return np.asarray(rows[index])
        read = np.array(rows[index])
        return read - np.asarray(self.less, read.dtype) if self.less else read


def _order(num_rows: int, num_heads: int) -> np.ndarray | None:
    """Returns where each row is stored: llama.cpp rotates neighbouring features, so a head's rows alternate between its
    halves.
    """
    if not num_heads or num_rows % (2 * num_heads):  # refused later for its shape
        return None
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def views(header: GGUFHeader, architecture: Architecture, fields: Mapping[str, Any]) -> dict[str, View]:
    """Returns the views by their names in Hugging Face checkpoints; a tensor that the family has no name for keeps its
    own.

    Raises:
        CheckpointError: there are too many.
    """
    names = _names(header.architecture, FAMILIES[str(fields["model_type"])].split_experts())
    found: dict[str, View] = {}
    for name, tensor in header.tensors.items():
        if name in ROPE_FACTORS:
            continue
        found.update(_views_of(name, tensor, names, architecture, fields))
        if len(found) > MAX_VIEWS:
            raise CheckpointError(f"{header.file.name} has more than {MAX_VIEWS} tensors, each expert's counted")
    return found


def _views_of(
    name: str, tensor: TensorInfo, names: Mapping[str, str], architecture: Architecture, fields: Mapping[str, Any]
) -> Iterator[tuple[str, View]]:
    of_layer = _OF_LAYER.fullmatch(name)
    layer, stored = of_layer.groups() if of_layer else ("", name)
    known = names.get(stored)
    if known is None:
        yield name, View(tensor)
        return
    less = 1.0 if architecture.adds_one and stored.endswith("norm.weight") else 0.0
    known = f"model.layers.{layer}.{known}" if of_layer else known
    if "{}" in known:
        for expert in range(min(tensor.shape[0], MAX_VIEWS)):
            yield known.format(expert), View(tensor, expert)
        return
    heads = _ROWS_OF_HEADS.get(stored.rpartition(".")[0]) if architecture.permutes else None
    num_heads = fields[heads] if heads else 0
    is_row = stored == _WITHOUT_FIRST_AXIS and len(tensor.shape) == 1
    yield known, View(tensor, num_heads=num_heads, less=less, is_row=is_row)


def _names(architecture: str, family: Family) -> dict[str, str]:
    """Returns the names for a file's tensors; keys inside a layer are without its number. A `{}` stands for the number
    of an expert.
    """
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known = get_tensor_name_map(number, 1)
    modules = {**LAYER_MODULES, **family.own_modules}
    of_layer = [f"{module}.{leaf}" for module in set(modules.values()) for leaf in ("weight", "bias")]
    place = family.places[0]
    around = [place.embedding, f"{place.head}.weight", f"{place.body}.norm.weight"]
    whole = {_stored(name, known): name for name in around}
    layers = {
        _stored(f"model.layers.0.{name.replace('.{}', '')}", known): name
        for name in (*of_layer, *family.own_tensors.values())
    }
    return {name.removeprefix(_LAYER): to for name, to in {**whole, **layers}.items() if name}


def _stored(name: str, known: TensorNameMap) -> str:
    """Returns the name in the file, empty if there is none. The library does not handle `weight` and `bias`, which some
    of Hugging Face's names lack.
    """
    module, _, leaf = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
    stored = known.get_name(module)
    if stored is None and module.endswith("_bias"):
        stored, leaf = known.get_name(module.removesuffix("_bias")), "bias"
    return "" if stored is None else f"{stored}.{leaf}"
