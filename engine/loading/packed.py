"""Quantized weights of a checkpoint: which ones there are, how they are held, and where their arrays come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Any

import jax.numpy as jnp
import numpy as np

from penstock.engine.errors import ConfigError
from penstock.engine.formats.online import OnlineQuantization
from penstock.engine.formats.packing import LEAVES, PLANES, Packing, leaf_shapes
from penstock.engine.formats.tensor_mapping import ConfiguredFormat, Index, Leaf, QuantizedFormat
from penstock.engine.loading.rows import FusedRows, stored_part
from penstock.engine.models import Family, ModelConfig, ParamPath, layer_shapes
from penstock.engine.models.config import ExpertsConfig, PackedMatmuls

ROUTERS = frozenset({"router", "shared_gate"})
# Matmuls that a setting never quantizes: they are small, or suffer most from rounding.
UNQUANTIZED = ROUTERS | {"head", "embedding", "beta", "decay"}
AROUND = ("embedding", "head")  # outside the blocks, with a row for each token

_Kernels = tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class PackedSource:
    """The source of an array of a packed weight: a Leaf of one module, or of a module for each place of its
    first axes.
    """

    path: ParamPath
    shape: tuple[int, ...]  # without padding
    dtype: jnp.dtype
    packing: Packing
    num_in: int
    leaf: Leaf
    modules: tuple[str, ...]
    num_spread: int  # number of leading axes that are spread over modules
    whole: tuple[int, ...]  # the shape of a module's tensor, with each KV head once
    copies: int = 1  # number of times that each KV head is repeated
    head_dim: int = 1
    rows: FusedRows | None = None  # in a fused tensor; None: all
    padding: tuple[int, ...] = ()  # number of zeros after it along each axis, which no file has; (): none

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return tuple(map(add, self.shape, self.padding)) if self.padding else self.shape

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{module}{self.leaf.tensor}" for module in self.modules)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (*self._lead, *self.leaf.stored_shape)

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.leaf.kinds

    def accepts(self, shape: tuple[int, ...]) -> bool:
        lead = self._lead
        return shape[: len(lead)] == lead and self.leaf.accepts(shape[len(lead) :])

    @property
    def cut(self) -> tuple[int, int]:
        """The axis of one tensor's share along which pieces are least scattered in a file, and the multiple that their
        sizes need.
        """
        num_dims = len(self.shape) - self.num_spread
        if not self.leaf.block:
            return 0, self.shape[self.num_spread]
        if num_dims > len(self.leaf.block):  # experts in one tensor
            return 0, 1
        axis = num_dims - 1 if self.leaf.is_transposed else 0
        return axis, self.leaf.block[axis]

    def num_bytes(self, stored: object) -> int:
        """Returns the bytes as held: several of these may be parts of one tensor."""
        del stored
        return math.prod(self.shape) * int(jnp.dtype(self.dtype).itemsize)

    def read(self, tensor: Callable[[Index], np.ndarray], index: Index) -> np.ndarray:
        """Reads what `index`, without the spread axes, selects; `tensor` reads a part of the stored one."""
        index, cut = self._stored_index(index)
        index, own = self._fused_index(index)
        array = self.leaf.read(tensor, self.whole, index)
        if own is not None:
            array = array.take(own, -2)
        if self.copies > 1:
            heads = array.reshape(-1, self.head_dim, array.shape[-1])
            array = np.repeat(heads, self.copies, axis=0).reshape(-1, array.shape[-1])[cut]
        return array

    @property
    def _lead(self) -> tuple[int, ...]:
        """The axes of stored tensors before those of a weight: that of experts in one tensor."""
        return self.whole[: len(self.whole) - self._num_dims]

    @property
    def _num_dims(self) -> int:
        return 1 if self.path[-1] == "group_of" else 2

    def _stored_index(self, index: Index) -> tuple[Index, slice]:
        if self.copies == 1:
            return index, slice(None)
        rows, cut = stored_part(index[-2], self.shape[-2], self.copies, self.head_dim)
        return (*index[:-2], rows, index[-1]), cut

    def _fused_index(self, index: Index) -> tuple[Index, np.ndarray | None]:
        if self.rows is None or self.whole == self.shape[self.num_spread :] or self._num_dims == 1:
            return index, None
        rows, own = self.rows.stored(slice(*index[-2].indices(self.shape[-2] // self.copies)))
        return (*index[:-2], rows, index[-1]), own


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The quantized weights of a checkpoint: what its files hold for them."""

    format: QuantizedFormat
    family: Family  # as stored
    stored: Mapping[str, Any]  # headers
    left: frozenset[str] = frozenset()  # matmuls that are not quantized, by the last part of their paths

    @property
    def is_own(self) -> bool:
        """Whether weights are quantized while loading, from an unquantized checkpoint."""
        return isinstance(self.format, OnlineQuantization)

    def of(self, config: ModelConfig) -> ModelConfig:
        """Returns `config` with the packings of its matmuls.

        Raises:
            CheckpointError: a weight is stored in a way that its format does not allow.
            ConfigError: a weight cannot be divided into groups.
        """

        def packing_of(module: str, _: int) -> Packing | None:
            return self.format.packing(module, self.stored)

        return _with_packings(config, self.family, packing_of, self.left)

    def module(self, path: ParamPath) -> str:
        """Returns the checkpoint's name of the module at `path`."""
        return _module(self.family, path)

    def source(
        self, path: ParamPath, layers: Sequence[ParamPath], params: Mapping[ParamPath, Any], config: ModelConfig
    ) -> PackedSource:
        """Returns the source of the array at `path`, which belongs to all of `layers`.

        Raises:
            ConfigError: it is some rows of a stored weight, and shares a scale with other rows.
        """
        packing, param, leaf = _packing_of(layers[0], config), params[path], str(path[-1])
        padding = _padding(layers[0], param, config)
        shape = tuple(map(sub, param.shape, padding))
        modules = [self.module(layer[:-1]) for layer in layers]
        is_per_expert = "{}" in modules[0]
        num_spread = (layers[0] is not path) + is_per_expert
        if is_per_expert:
            modules = [name.format(expert) for name in modules for expert in range(shape[num_spread - 1])]
        kernel = (*path[:-1], "kernel")
        parts = [(*part[:-1], "codes") for part in self.family.fused_with(kernel)]
        sizes = [_num_out(params[part].shape, (*layers[0][:2], *part[2:]), config) for part in parts]
        place = parts.index((*path[:-1], "codes"))
        turns = self.family.turns_of((*layers[0][:-1], "kernel"), config.blocks)
        of_fused = FusedRows.of(sizes, place, turns) if len(parts) > 1 else None
        num_in = params[(*path[:-1], "codes")].shape[-1] * 8 // PLANES[packing.code][0]
        rows = packing.rows if leaf == "scales" else 1
        if rows > 1 and of_fused is not None:
            of_fused = of_fused.counted_in_blocks(rows)
            if of_fused is None:
                raise ConfigError(
                    f"{modules[0]}: a block of {rows} rows has a scale that is not of one of {sizes} rows alone"
                )
        one, _ = leaf_shapes(packing, sum(sizes), num_in)[leaf]
        found = self.format.leaves(modules[0], self.stored, packing, sum(sizes), num_in)[leaf]
        return PackedSource(
            path=path,
            shape=shape,
            dtype=param.dtype,
            packing=packing,
            num_in=num_in,
            leaf=found.transposed() if self.is_own and self.family.is_plain(kernel) else found,
            modules=tuple(modules),
            num_spread=num_spread,
            whole=(*shape[num_spread : len(shape) - len(one)], *one),
            copies=_copies(layers[0], config) if len(one) == 2 and rows == 1 else 1,
            head_dim=config.blocks[int(layers[0][1])].attention.head_dim if _is_of_kv(layers[0]) else 1,
            rows=of_fused if rows else None,
            padding=padding if any(padding) else (),
        )

    def known(self, source: PackedSource) -> Iterator[tuple[str, Leaf]]:
        """Yields the redundant tensors of the modules of `source`, which holds codes.

        What they must hold is known without them, and is checked.
        """
        num_out, num_in = source.whole[-2], source.num_in
        for module in source.modules:
            for leaf in self.format.checks(source.packing, num_out, num_in):
                name = f"{module}{leaf.tensor}"
                if name in self.stored:
                    yield name, leaf

    def passed_over(self, source: PackedSource) -> set[str]:
        return {f"{module}{suffix}" for module in source.modules for suffix in self.format.passed_over}


def packed_weights(
    quantization: QuantizedFormat | None, family: Family, stored: Mapping[str, Any], weights: str
) -> PackedWeights:
    """Returns the weights in the format of `stored`, or, if they have none, as the setting `weights` says.

    Raises:
        ConfigError: both are given.
    """
    _refuse_both(quantization, weights)
    family = family.as_stored(stored.keys())
    if quantization is None:
        return PackedWeights(OnlineQuantization(None if weights == "auto" else weights), family, stored, UNQUANTIZED)
    return PackedWeights(quantization, family, stored)


def expected_packings(
    quantization: ConfiguredFormat | None, family: Family, config: ModelConfig, weights: str
) -> ModelConfig:
    """Returns `config` with the most likely packings of its matmuls, from config.json alone; routers have none.

    Raises:
        ConfigError: `quantization` and the setting `weights` are both given, or a weight cannot be divided into groups.
    """
    _refuse_both(quantization, weights)
    if quantization is None and weights == "auto":
        return config
    chosen: ConfiguredFormat = OnlineQuantization(weights) if quantization is None else quantization
    left = UNQUANTIZED if quantization is None else ROUTERS | {"embedding"}
    return _with_packings(config, family, lambda module, num_in: chosen.expected(module, num_in, config.dtype), left)


def _refuse_both(quantization: QuantizedFormat | None, weights: str) -> None:
    if quantization is not None and weights != "auto":
        raise ConfigError(f"weights = {weights} is for checkpoints that are not quantized, and this one is: set auto")


def _module(family: Family, path: ParamPath) -> str:
    at = path if path == ("embedding",) else (*path, "kernel")
    return family.tensor_name(at).removesuffix(".weight")


def _with_packings(
    config: ModelConfig, family: Family, packing_of: Callable[[str, int], Packing | None], left: frozenset[str]
) -> ModelConfig:
    """Returns `config` with the result of `packing_of` for each matmul, by its module and input features, except those
    in `left`.
    """

    def packed(at: ParamPath, kernels: _Kernels) -> PackedMatmuls:
        found = []
        for path, shape in kernels:
            module = _module(family, (*at, *path)).format(0)
            packing = None if path[-1] in left else packing_of(module, shape[-2])
            if packing is not None:
                _check_fits(module, packing, shape)
                found.append((path, packing))
        return tuple(found)

    blocks = tuple(
        replace(block, packed=packed(("blocks", layer), kernels_of(layer_shapes(block, config))))
        for layer, block in enumerate(config.blocks)
    )
    names = ("embedding",) if config.tie_word_embeddings else AROUND
    around = tuple(((name,), (config.hidden_size, config.vocab_size)) for name in names)
    return replace(config, blocks=blocks, packed=packed((), around))


def is_packed(path: ParamPath) -> bool:
    return path[-1] in LEAVES


def _packing_of(path: ParamPath, config: ModelConfig) -> Packing:
    if path[0] != "blocks":
        return dict(config.packed)[tuple(map(str, path[:-1]))]
    return dict(config.blocks[int(path[1])].packed)[tuple(map(str, path[2:-1]))]


def _num_out(codes: tuple[int, ...], path: ParamPath, config: ModelConfig) -> int:
    """Returns the number of stored output features."""
    return config.vocab_size if path[0] in AROUND else codes[-2] // _copies(path, config)


def _padding(path: ParamPath, param: Any, config: ModelConfig) -> tuple[int, ...]:
    """Returns the padding along each axis, for an array of the layer in `path`."""
    zeros = [0] * len(param.shape)
    if path[0] in AROUND and path[-1] != "group_of":
        packing = _packing_of(path, config)
        stored = packing.num_row_groups(config.vocab_size) if path[-1] == "scales" else config.vocab_size
        zeros[-2] = param.shape[-2] - stored
    mlp = config.blocks[int(path[1])].mlp if path[0] == "blocks" else None
    if isinstance(mlp, ExpertsConfig) and path[2:4] == ("mlp", "experts"):
        zeros[-2 if path[-1] == "group_of" else -3] = mlp.num_padding
    return tuple(zeros)


def _copies(path: ParamPath, config: ModelConfig) -> int:
    return config.blocks[int(path[1])].attention.kv_copies if _is_of_kv(path) else 1


def _is_of_kv(path: ParamPath) -> bool:
    return path[0] == "blocks" and path[2:-1] in (("attention", "k"), ("attention", "v"))


def _check_fits(module: str, packing: Packing, shape: tuple[int, ...]) -> None:
    try:
        leaf_shapes(packing, shape[-1], shape[-2])
    except ConfigError as error:
        raise ConfigError(f"{module}: {error}") from None


def kernels_of(shapes: Mapping[ParamPath, Any]) -> _Kernels:
    """Returns the matmuls among parameters, by path, and their shapes: `[in, out]`, or `[experts, in, out]`."""
    return tuple((tuple(map(str, path[:-1])), leaf.shape) for path, leaf in shapes.items() if path[-1] == "kernel")
