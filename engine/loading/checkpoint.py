"""Checkpoints: where they are, what they declare, and how their weights become a Decoder."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.formats.kv_cache import read_kv_cache_scheme
from penstock.engine.formats.tensor_mapping import Leaf
from penstock.engine.loading.declared import check_declared, undeclared
from penstock.engine.loading.files import CONFIG_FILE
from penstock.engine.loading.headers import refuse_names
from penstock.engine.loading.kv_scales import is_kv_scale, kv_scale_source, passed_over, with_kv_scales
from penstock.engine.loading.packed import PackedSource, is_packed, packed_weights
from penstock.engine.loading.rows import FusedRows
from penstock.engine.loading.source import Checkpoint, open_checkpoint
from penstock.engine.loading.weights import FLOAT_TYPES, AnySource, ParameterSource, Stored, WeightFiles
from penstock.engine.models import (
    FAMILIES,
    Decoder,
    ExpertsConfig,
    Family,
    ModelConfig,
    ParamPath,
    decoder_shapes,
    family_of,
    stacked_layers,
)
from penstock.engine.models.axes import KV_SCALES, logical_axes, row_axis
from penstock.engine.models.block import Block
from penstock.engine.models.hf.config import checked_dtype
from penstock.engine.progress import ReportProgress
from penstock.engine.sharding.experts import shard_experts
from penstock.engine.sharding.placement import Placement

_log = logging.getLogger(__name__)

_ONES = frozenset({"scale", "scalar", "expert_scale", *KV_SCALES})
"""Parameters that multiply: they are 1 in random models."""

HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # derived from config.json; stored by old checkpoints


def read_model_config(path: Path, dtype: str = "auto", weights: str = "auto") -> ModelConfig:
    """Reads what `config.json`, or the metadata of a GGUF file, declares, with weights and activations of `dtype`.

    `auto` keeps the checkpoint's own type, float16 included: the one in config.json, otherwise that of the embedding on
    disk. For a GGUF file with quantized weights it is bfloat16. Norms, softmax and logits are always computed in f32.
    `weights` other than `auto` says how the weights of an unquantized checkpoint are quantized while they are loaded.

    Raises:
        ConfigError: the model, or something it asks for, is not supported.
        CheckpointError: config.json is missing or malformed, or declares weights as quantized that are not.
    """
    checkpoint = open_checkpoint(path)
    family = family_of(checkpoint.fields)
    config = _declared(checkpoint, family, dtype)
    quantization, stored = checkpoint.format, _stored_if_readable(checkpoint)
    config = with_kv_scales(config, family.as_stored(stored.keys()), read_kv_cache_scheme(checkpoint.fields), stored)
    if weights == "auto" and quantization is None:
        return config
    packed = packed_weights(quantization, family, checkpoint.stored, weights)
    config = packed.of(config)
    check_declared(checkpoint.fields, packed, config)
    return config


def load_model(
    path: Path,
    config: ModelConfig,
    progress: ReportProgress | None = None,
    *,
    placement: Placement | None = None,
    stacked: bool = False,
    pack_head: Callable[[Decoder], None] | None = None,
    pack_block: Callable[[Block], Block] | None = None,
) -> Decoder:
    """Reads the weights, one parameter at a time, into a Decoder.

    They go to the default device; with `placement`, each device of its mesh reads only its own share. Parameters around
    the blocks come first. `pack_head` may then change them, which takes memory that the blocks do not need yet. Each
    block is replaced by what `pack_block` returns as soon as it is complete. The kernels that these two pack are numpy
    arrays, mapped if a file holds them as they are: packing reads them from there.

    Every tensor of the model must be there with its shape, and no other. Names, shapes and types are all checked before
    the first weight is read. Five kinds of extra tensors are ignored: rotary frequencies, an `lm_head.weight`
    that equals the embedding it is tied to, draft layers, what a family lists as outside the language model, and scales
    of a KV cache that is not kept in fp8.

    Raises:
        CheckpointError: a file or tensor is missing, unexpected, misshapen or of a type that is not a float.
    """
    checkpoint = open_checkpoint(path)
    checked = _checked(checkpoint, config, stacked=stacked)
    model: Decoder = nnx.merge(checked.graph, nnx.from_flat_state(checked.params))
    around = [source for source in checked.sources if source.path[0] != "blocks"]
    blocks = [source for source in checked.sources if source.path[0] == "blocks"]
    blocks.sort(key=lambda source: checked.stored[source.names[0]].file)  # one file at a time
    num_missing = Counter(int(source.path[1]) for source in blocks)  # parameters of each block
    with checkpoint.weights() as files:
        for name, leaf in checked.known.items():
            files.check(name, leaf)
        num_bytes = {source.path: source.num_bytes(checked.stored) for source in checked.sources}
        reading = _Reading(model, files, placement, num_bytes, progress)
        for source in around:
            reading.take(source, to_pack=pack_head is not None and source.path[0] == "head")
        if pack_head is not None:
            pack_head(model)
        for source in blocks:
            reading.take(source, to_pack=pack_block is not None)
            number = int(source.path[1])
            num_missing[number] -= 1
            if pack_block is not None and not num_missing[number]:
                model.blocks[number] = pack_block(model.blocks[number])
    return model if placement is None else shard_experts(model, placement)


@dataclass(slots=True)
class _Reading:
    """Reads parameters into a model, and reports how many bytes of them have been read."""

    model: Decoder
    files: WeightFiles
    placement: Placement | None
    num_bytes: Mapping[ParamPath, int]
    progress: ReportProgress | None
    num_bytes_read: int = 0

    def take(self, source: AnySource, *, to_pack: bool) -> None:
        if to_pack and isinstance(source, ParameterSource) and source.path[-1] == "kernel":
            _put(self.model, source.path, self.files.kernel(source))
        else:
            _put(self.model, source.path, self.files.array(source, self.placement))
        self.num_bytes_read += self.num_bytes[source.path]
        if self.progress is not None:
            self.progress(self.num_bytes_read, sum(self.num_bytes.values()), "weights")


def _put(model: Decoder, path: ParamPath, array: jax.Array | np.ndarray) -> None:
    holder: Any = model
    for name in path[:-1]:
        holder = holder[name] if isinstance(name, int) else getattr(holder, name)
    setattr(holder, str(path[-1]), nnx.Param(array))


def check_weights(path: Path, config: ModelConfig) -> int:
    """Checks what `load_model` checks before it reads the first weight. Returns the size of the weights in bytes.

    Raises:
        CheckpointError: as `load_model`.
    """
    checked = _checked(open_checkpoint(path), config)
    return sum(source.num_bytes(checked.stored) for source in checked.sources)


def random_model(
    config: ModelConfig, seed: int, *, placement: Placement | None = None, stacked: bool = False
) -> Decoder:
    """Returns a Decoder of this geometry with random weights, created on their devices: for benchmarks and tests."""
    graph, abstract = decoder_shapes(config, stacked=stacked)
    filled = {}
    for number, (path, param) in enumerate(abstract.items()):
        key = jax.random.fold_in(jax.random.key(seed), number)
        sharding = None if placement is None else _sharding(path, param, placement)
        filled[path] = param.replace(_initial(key, path[-1], param.shape, param.dtype, sharding))
    return _merged(graph, filled, placement)


def abstract_model(config: ModelConfig, placement: Placement, *, stacked: bool) -> Decoder:
    """Returns a Decoder of only shapes, each with its sharding: for compiling without weights."""
    graph, abstract = decoder_shapes(config, stacked=stacked)
    filled = {}
    for path, param in abstract.items():
        sharding = _sharding(path, param, placement)
        filled[path] = param.replace(jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding))
    return _merged(graph, filled, placement)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A checkpoint whose names, shapes and types match the model."""

    graph: nnx.GraphDef[Decoder]
    params: Mapping[Any, Any]  # their shapes and types, by path
    stored: Mapping[str, Stored]
    sources: Sequence[AnySource]  # of each parameter
    known: Mapping[str, Leaf]  # redundant tensors, whose contents are checked


def _checked(checkpoint: Checkpoint, config: ModelConfig, *, stacked: bool = False) -> _Checked:
    stored = checkpoint.stored
    family = FAMILIES[config.family].as_stored(stored.keys())
    _check_layers(checkpoint, family, config)
    graph, abstract = decoder_shapes(config, stacked=stacked)
    packed = packed_weights(checkpoint.format, family, stored, "auto") if config.is_packed else None
    sources: list[AnySource] = []
    for path in abstract:
        layers = _layers(path, config, stacked=stacked)
        if packed is not None and is_packed(path):
            sources.append(packed.source(path, layers, abstract, config))
        elif is_kv_scale(path):
            sources.append(kv_scale_source(family, path, layers, abstract[path].shape, config, stored))
        else:
            sources.append(_source(family, path, layers, abstract, config).as_found(stored))
    codes = [source for source in sources if isinstance(source, PackedSource) and source.path[-1] == "codes"]
    known = {} if packed is None else {name: leaf for source in codes for name, leaf in packed.known(source)}
    others = known.keys() | passed_over(family, config)
    others |= {name for layer, block in enumerate(config.blocks) for name in family.unused(layer, block)}
    if packed is not None:
        others |= {name for source in codes for name in packed.passed_over(source)}
    _check(checkpoint, sources, others, family, config)
    return _Checked(graph, abstract, stored, sources, known)


def _layers(path: ParamPath, config: ModelConfig, *, stacked: bool) -> list[ParamPath]:
    """Returns the paths that the parameter at `path` would have in a decoder that is not stacked."""
    if not stacked or path[0] != "blocks":
        return [path]
    return [("blocks", layer, *path[2:]) for layer in stacked_layers(config)[int(path[1])]]


def _source(
    family: Family, path: ParamPath, layers: Sequence[ParamPath], params: Mapping[ParamPath, Any], config: ModelConfig
) -> ParameterSource:
    param = params[path]
    padding = _padding(layers[0], param, config)
    names = [family.tensor_name(layer) for layer in layers]
    is_per_expert, is_stacked = "{}" in names[0], layers[0] is not path
    if is_per_expert:
        num_experts = param.shape[is_stacked] - padding[is_stacked]
        names = [name.format(expert) for name in names for expert in range(num_experts)]
    return ParameterSource(
        path=path,
        shape=tuple(map(sub, param.shape, padding)),
        dtype=param.dtype,
        names=tuple(names),
        num_spread=is_stacked + is_per_expert,
        copies=_copies(layers[0], param, config),
        head_dim=_head_dim(layers[0], config),
        rows=_rows(family, path, layers[0], params, config),
        is_plain=family.is_plain(path),
        may_be_plain=family.may_be_plain(path),
        padding=padding if any(padding) else (),
    )


def _padding(path: ParamPath, param: Any, config: ModelConfig) -> tuple[int, ...]:
    """Returns the padding along each axis, for a parameter of the layer in `path`."""
    mlp = config.blocks[int(path[1])].mlp if path[0] == "blocks" else None
    padded = {"vocab": config.vocab_padding, "experts": mlp.num_padding if isinstance(mlp, ExpertsConfig) else 0}
    return tuple(padded.get(axis or "", 0) for axis in logical_axes(path, len(param.shape)))


def _copies(layer: ParamPath, param: Any, config: ModelConfig) -> int:
    """Returns the number of copies of each KV head in a parameter of the layer in the path `layer`."""
    if "kv_heads" not in logical_axes(layer, len(param.shape)):
        return 1
    return config.blocks[int(layer[1])].attention.kv_copies


def _head_dim(layer: ParamPath, config: ModelConfig) -> int:
    """Returns the head_dim of the attention in the layer of `layer`; 1 if there is none."""
    block = config.blocks[int(layer[1])] if layer[0] == "blocks" else None
    return block.attention.head_dim if block is not None and block.has_attention else 1


def _rows(
    family: Family, path: ParamPath, layer: ParamPath, params: Mapping[ParamPath, Any], config: ModelConfig
) -> FusedRows | None:
    """Returns the rows of the parameter at `path` in a fused tensor, in the layer of the path `layer`; None if it is
    not fused.
    """
    fused = family.fused_with(path)
    if len(fused) == 1:
        return None
    axis = row_axis(path, len(params[path].shape))
    parts = {part: (*layer[:2], *part[2:]) for part in fused}
    sizes = [params[part].shape[axis] // _copies(of, params[part], config) for part, of in parts.items()]
    return FusedRows.of(sizes, fused.index(path), family.turns_of(layer, config.blocks), axis)


def _merged(graph: nnx.GraphDef[Decoder], filled: Mapping[Any, Any], placement: Placement | None) -> Decoder:
    model: Decoder = nnx.merge(graph, nnx.from_flat_state(filled))
    return model if placement is None else shard_experts(model, placement)


def _sharding(path: ParamPath, param: Any, placement: Placement) -> jax.sharding.Sharding:
    return placement.sharding(logical_axes(path, len(param.shape)), param.shape)


@partial(jax.jit, static_argnames=("leaf", "shape", "dtype", "sharding"))
def _initial(
    key: jax.Array, leaf: str, shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    if leaf in ("kernel", "embedding", "per_layer_embedding"):
        values = (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    else:
        values = jnp.ones(shape, dtype) if leaf in _ONES else jnp.zeros(shape, dtype)
    if sharding is not None:
        values = jax.lax.with_sharding_constraint(values, sharding)
    return values


def _declared(checkpoint: Checkpoint, family: Family, dtype: str) -> ModelConfig:
    fields = checkpoint.fields
    if dtype == "auto":
        declared = fields.get("dtype") or fields.get("torch_dtype") or _embedding_dtype(checkpoint, family)
        dtype = str(declared).removeprefix("torch.")
    try:
        return family.config(fields, checked_dtype(dtype))
    except ConfigError as error:  # families use the names that most checkpoints have
        raise ConfigError(str(error).replace(CONFIG_FILE, checkpoint.config_name)) from None


def _stored_if_readable(checkpoint: Checkpoint) -> Mapping[str, Stored]:
    """Returns the stored tensors, or none if they are unreadable: errors are left to the reader of the weights, which
    most of a config does not need.
    """
    try:
        return checkpoint.stored
    except CheckpointError:
        return {}


def _embedding_dtype(checkpoint: Checkpoint, family: Family) -> str:
    stored = checkpoint.stored
    name = family.as_stored(stored.keys()).tensor_name(("embedding",))
    if name not in stored:
        raise CheckpointError(
            f"{checkpoint.config_name} states no dtype, and the weights in {checkpoint.path} hold no {name}"
        )
    return FLOAT_TYPES.get(stored[name].kind, stored[name].kind)


def _check_layers(checkpoint: Checkpoint, family: Family, config: ModelConfig) -> None:
    """Checks that all layers are there, by one tensor each. It comes first, because building the structure of a
    thousand layers takes half a minute.
    """
    names = {
        family.tensor_name(("blocks", layer, "attention" if block.has_attention else "recurrence", "out", "kernel"))
        for layer, block in enumerate(config.blocks)
    }
    modules = {name.rpartition(".")[0] for name in checkpoint.stored}  # quantized modules have no `weight`
    lacking = {name for name in names if name.removesuffix(".weight") not in modules}
    refuse_names(lacking, f"{checkpoint.config_name} has num_hidden_layers = {config.num_layers}, the checkpoint lacks")


def _check(
    checkpoint: Checkpoint,
    sources: Sequence[AnySource],
    others: set[str],
    family: Family,
    config: ModelConfig,
) -> None:
    stored = checkpoint.stored
    expected = {name for source in sources for name in source.names}
    why = undeclared(checkpoint.fields, stored)
    refuse_names(expected - stored.keys(), f"{why}the checkpoint lacks tensors of the model")
    extra = {name for name in stored.keys() - expected - others if not HARMLESS.fullmatch(name)}
    extra -= _beside(extra, (*family.passed_over, *_draft_layers(family, config)))
    head, embedding = (family.tensor_name(path) for path in (("head", "kernel"), ("embedding",)))
    if config.tie_word_embeddings and head in extra:
        _check_tied_head(checkpoint, head, embedding)
        extra.remove(head)
    refuse_names(extra, f"{why}the checkpoint holds tensors that the model has no place for", stored)
    for source in sources:
        for name in source.names:
            _check_tensor(name, stored[name], source)


def _beside(names: set[str], prefixes: tuple[str, ...]) -> set[str]:
    """Returns the names of tensors of other parts than the text model."""
    found = {name for name in names if name.startswith(prefixes)}
    if found:
        whose = sorted({prefix for prefix in prefixes for name in found if name.startswith(prefix)})
        _log.info("%d tensors are not part of the text model and stay unread: %s", len(found), ", ".join(whose))
    return found


def _check_tensor(name: str, found: Stored, source: AnySource) -> None:
    if not source.accepts(found.shape):
        raise CheckpointError(
            f"tensor {name} has shape {list(found.shape)}, expected {list(source.stored_shape)}, in {found.file.name}"
        )
    if found.kind not in source.kinds:
        raise CheckpointError(
            f"tensor {name} is of type {found.kind}, expected one of {', '.join(source.kinds)}, in {found.file.name}"
        )


def _draft_layers(family: Family, config: ModelConfig) -> tuple[str, ...]:
    """Returns the name prefixes of the draft layers' tensors."""
    layers = range(config.num_layers, config.num_layers + config.num_draft_layers)
    return tuple(f"{family.places[0].body}.layers.{layer}." for layer in layers)


def _check_tied_head(checkpoint: Checkpoint, head: str, embedding: str) -> None:
    with checkpoint.weights() as files:
        same = np.array_equal(files.tensor(head)[:], files.tensor(embedding)[:])
    if not same:
        raise CheckpointError(
            f"{head} in {checkpoint.stored[head].file.name} differs from {embedding}, but config.json ties the two; "
            "set tie_word_embeddings to false if the head is its own"
        )
