"""Tensor and expert parallelism: one mesh, and one mapping of logical axes to mesh axes.

Weights are split as in Megatron-LM (Shoeybi et al., arXiv 1909.08053): each device holds some of the heads and some of
the feed-forward's features, so a layer needs two all-reduces, one after attention and one after the feed-forward. The
KV cache is split over its heads; everything else is replicated.

Experts are divided over an axis of their own, and each expert's features over the tensor axis; heads and dense
feed-forwards are split over both axes together. Tokens stay where they are: each device computes what its experts add.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.engine.errors import ConfigError
from penstock.engine.formats.packing import Packing
from penstock.engine.models import BlockConfig, ExpertsConfig, ModelConfig
from penstock.engine.models.axes import Axes

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
REPLICA = (EXPERT, TENSOR)

RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vocab": REPLICA,
        "heads": REPLICA,
        "kv_heads": REPLICA,
        "per_head": REPLICA,
        "channels": REPLICA,
        "key_heads": REPLICA,
        "value_heads": REPLICA,
        "mlp": REPLICA,
        "experts": (EXPERT,),
        "expert_mlp": (TENSOR,),
        "embed": (),
        "layers": (),
    }
)

PADDED_TO = 128
"""Each device's share of a padded vocabulary is a multiple of this: the lanes of a TPU tile, to which memory is padded.
"""


@dataclass(frozen=True)
class Placement:
    """Where arrays go: a mesh of `data` x `tensor` devices, or `data` x `expert` x `tensor`; RULES say what is split.

    Along a `data` axis larger than 1 all arrays are replicated: a worker serves one replica, and the planner uses the
    axis for a slice that holds several.
    """

    mesh: Mesh

    @property
    def num_shares(self) -> int:
        """Number of devices of one replica."""
        return math.prod(self.mesh.shape[axis] for axis in self.replica)

    @property
    def replica(self) -> tuple[str, ...]:
        """The mesh axes that a replica is split over."""
        return tuple(axis for axis in REPLICA if axis in self.mesh.shape)

    @property
    def sums_beside(self) -> bool:
        """Whether SparseCores sum over devices next to the compute.

        TPU7x has SparseCores too, but libtpu cannot print what becomes of a program there, so the cost is unknown.
        """
        return bool(self.mesh.devices.flat[0].device_kind == "TPU v6 lite")

    def spec(self, axes: Axes) -> PartitionSpec:
        return PartitionSpec(*(self._split(axis) for axis in axes))

    def _split(self, axis: str | None) -> str | tuple[str, ...] | None:
        over = () if axis is None else tuple(name for name in RULES[axis] if name in self.mesh.shape)
        return over if len(over) > 1 else next(iter(over), None)

    def sharding(self, axes: Axes = (), shape: Sequence[int] = ()) -> NamedSharding:
        """Returns the sharding of an array with these logical axes; without axes, the array is replicated.

        With `shape`, an axis that cannot be split evenly stays whole: groups of weights share their scales.
        """
        fitting = (
            [None if n % self.ways(axis) else axis for axis, n in zip(axes, shape, strict=True)] if shape else axes
        )
        return NamedSharding(self.mesh, self.spec(tuple(fitting)))

    def ways(self, axis: str | None) -> int:
        """Returns the number of shares that an axis is split into."""
        return 1 if axis is None else math.prod(self.mesh.shape.get(name, 1) for name in RULES[axis])


def place(devices: Sequence[jax.Device], tensor: int, expert: int = 1) -> Placement:
    """Makes a mesh of `devices` for a model that `split_model` has laid out over `tensor * expert` of them."""
    grid = np.array(devices).reshape(-1, expert, tensor)
    return Placement(Mesh(grid, (DATA, EXPERT, TENSOR)) if expert > 1 else Mesh(grid[:, 0], (DATA, TENSOR)))


def split_model(model: ModelConfig, tensor: int, expert: int = 1, *, has_tiles: bool = False) -> ModelConfig:
    """Lays out `model` over `tensor * expert` devices.

    If there are too few KV heads, each is replicated. The vocabulary is padded if the devices do not divide it, or if
    they have tiles of memory and it is not a whole number of them; and the experts if `expert` does not divide them.

    Raises:
        ConfigError: heads or features cannot be split evenly, or there are fewer experts than groups of devices.
    """
    split = _Split(model, tensor, expert)
    if expert > 1:
        split.check_experts()
    for block in dict.fromkeys(model.blocks):
        split.check(block)
    blocks = tuple(split.spread(block) for block in model.blocks)
    return replace(
        model, blocks=blocks, vocab_padding=_vocab_padding(model.vocab_size, split.shares, has_tiles=has_tiles)
    )


@dataclass(frozen=True, slots=True)
class _Split:
    model: ModelConfig
    tensor: int
    expert: int

    @property
    def shares(self) -> int:
        return self.tensor * self.expert

    def check_experts(self) -> None:
        mixtures = [block.mlp for block in self.model.blocks if isinstance(block.mlp, ExpertsConfig)]
        if not mixtures:
            raise ConfigError(f"expert_parallel = {self.expert}, and the model has no experts")
        fewest = min(mixture.num_experts for mixture in mixtures)
        if self.expert > fewest:
            raise ConfigError(f"expert_parallel = {self.expert} is above the model's {fewest} experts")

    def check(self, block: BlockConfig) -> None:
        for name, count, shares in self._features(block):
            if count % shares:
                raise ConfigError(f"{self} does not divide the model's {count} {name}; {self._possible()} do")
        self._check_packed_experts(block)
        if not self._fits_kv_heads(block):
            kv_heads = block.attention.num_kv_heads
            raise ConfigError(
                f"{self} neither divides the model's {kv_heads} KV heads nor is a multiple of them; "
                f"{self._possible()} are possible"
            )

    def spread(self, block: BlockConfig) -> BlockConfig:
        """Gives each device at least one KV head, and all devices the same number of experts."""
        mlp, packed = block.mlp, block.packed
        if isinstance(mlp, ExpertsConfig):
            block = replace(block, mlp=replace(mlp, num_padding=-mlp.num_experts % self.expert))
        if not block.has_attention:
            return block
        attention = block.attention
        if self.shares > attention.num_kv_heads:
            copies = self.shares // attention.num_kv_heads
            attention = replace(attention, num_kv_heads=self.shares, kv_copies=copies * attention.kv_copies)
            packed = tuple(_scaled_by_row(path, packing) for path, packing in packed)
        return replace(block, mixer=attention, packed=packed)

    def _features(self, block: BlockConfig) -> Iterator[tuple[str, int, int]]:
        """Yields what must be split evenly, with its size and number of shares; KV heads may be replicated instead."""
        if block.has_attention:
            yield "attention heads", block.attention.num_heads, self.shares
        for array in block.states(self.model.dtype):
            yield from (
                (f"{axis.replace('_', ' ')} of a state", count, self.shares)
                for axis, count in zip(array.axes, array.shape, strict=True)
                if axis
            )
        mlp = block.mlp
        if not isinstance(mlp, ExpertsConfig):
            yield "feed-forward features", mlp.intermediate_size, self.shares
            return
        yield "features of an expert", mlp.intermediate_size, self.tensor
        if mlp.shared is not None:
            yield "features of the shared expert", mlp.shared.intermediate_size, self.shares

    def _possible(self) -> str:
        blocks = set(self.model.blocks)
        most = min(attention.num_heads for attention in self.model.attentions)
        numbers = [n for n in range(1, most + 1) if all(replace(self, tensor=n).fits(block) for block in blocks)]
        return ", ".join(map(str, numbers)) or "no others"

    def fits(self, block: BlockConfig) -> bool:
        return all(count % shares == 0 for _, count, shares in self._features(block)) and self._fits_kv_heads(block)

    def _fits_kv_heads(self, block: BlockConfig) -> bool:
        """Whether the KV heads can be divided or replicated evenly."""
        kv_heads = block.attention.num_kv_heads if block.has_attention else self.shares
        return kv_heads % self.shares == 0 or self.shares % kv_heads == 0

    def __str__(self) -> str:
        if self.expert == 1:
            return f"tensor_parallel = {self.tensor}"
        return f"tensor_parallel = {self.tensor} times expert_parallel = {self.expert}"

    def _check_packed_experts(self, block: BlockConfig) -> None:
        """Raises ConfigError if a device's share of an expert, which it unpacks alone, would cut groups or blocks."""
        for path, packing in block.packed:
            if self.tensor == 1 or path[:2] != ("mlp", "experts"):
                continue
            share = block.mlp.intermediate_size // self.tensor
            is_down = path[-1] == "down"
            size = max(packing.group, packing.super_group) if is_down else packing.rows  # 0: all features
            if (is_down and packing.has_order) or (size and share % size):
                raise ConfigError(
                    f"{self} cuts groups of the quantized experts: {share} features on each device, {packing}; "
                    "expert_parallel does not"
                )


def _scaled_by_row(path: tuple[str, ...], packing: Packing) -> tuple[tuple[str, ...], Packing]:
    """Gives KV weights scales by row, which can be copied along with a head: a block of rows may span several heads."""
    is_kv = path in (("attention", "k"), ("attention", "v"))
    return path, replace(packing, rows=1) if is_kv and packing.rows > 1 else packing


def _vocab_padding(vocab_size: int, shares: int, *, has_tiles: bool) -> int:
    """Returns what pads each share to whole tiles; 0 if there are no tiles and the devices divide the vocabulary.

    Without it, a TPU would copy the logits of a step into whole tiles for the kernel that samples them.
    """
    return -vocab_size % (shares * PADDED_TO) if has_tiles or vocab_size % shares else 0
