"""How a model is laid out on devices: which attention, which mesh, which pages. For an engine, and for planning one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax

from penstock.engine.attention import (
    AttentionBackend,
    CacheArray,
    KVCacheSpec,
    ShardedAttention,
    attention_for,
    check_page_table,
    page_size_for,
)
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling_state import state_bytes
from penstock.engine.execution.state_cache import slot_bytes
from penstock.engine.length_rule import LengthRule
from penstock.engine.models import BlockConfig, LayerGroups, ModelConfig, layer_groups, num_parameters
from penstock.engine.models.attend import KV_SCALES_DTYPE
from penstock.engine.models.config import Packed
from penstock.engine.models.packed import can_pack
from penstock.engine.native import NativeLibrary
from penstock.engine.scheduling.page_needs import PageNeeds
from penstock.engine.sharding import Placement, place, split_model
from penstock.engine.stats import EngineInfo

DEFAULT_BUILD_DIR = Path.home() / ".cache" / "penstock"

_SHARE_OF_FREE_MEMORY = 0.9  # for the KV cache at most, where its size is not set
_SHARE_OF_STATES = 0.25  # that states kept for prefixes take beside the pages of these prefixes, at most
_COPIES_OF_LOGITS = 7  # that sampling with all options has at once, at most: what compiling it for TPUs showed
_MANY = 10**6
_DEFAULT_KV_CACHE_BYTES = 2**30  # where it is unknown how much memory is free


@dataclass(frozen=True)
class Deployment:
    """What follows from a model, the settings and the platform before anything is loaded."""

    config: EngineConfig
    devices: tuple[jax.Device, ...]  # of one replica, or of all that a slice holds
    model: ModelConfig  # as it is laid out: KV heads may be held several times
    attention: AttentionBackend
    placement: Placement | None  # None: everything on one device
    page_size: int
    max_model_len: int
    kv_dtype: str
    matmul_library: ctypes.CDLL | None  # the kernels that weights are packed for; None leaves matmuls to XLA
    fallback: str | None  # why the C++ kernels that `auto` asks for cannot be had; None where nothing is missing

    @property
    def platform(self) -> str:
        name: str = self.devices[0].platform
        return name

    @property
    def matmul(self) -> str:
        """As the setting names it."""
        return "xla" if self.matmul_library is None else "native"

    @property
    def unpacks_in_pieces(self) -> bool:
        """Of quantized weights; devices that share a model each unpack their shares."""
        return self.platform == "cpu" and self.placement is None and self.model.is_packed

    @property
    def groups(self) -> LayerGroups:
        """Of layers, each of which has pages of its own."""
        return layer_groups(self.model)

    @property
    def needs(self) -> PageNeeds:
        """What a sequence needs of them."""
        return PageNeeds(self.page_size, self.groups.windows)

    def cache_spec(self, num_pages: int, num_states: int = 0) -> KVCacheSpec:
        return KVCacheSpec(
            num_layers=self.groups.size,
            num_pages=num_pages,
            page_size=self.page_size,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            dtype=self.kv_dtype,
            num_states=num_states,
        )

    @property
    def state_bytes(self) -> int:
        """Of one sequence's states in all layers, on each device; 0 where no layer keeps any."""
        return slot_bytes(self.model, self.placement)

    @property
    def state_interval(self) -> int:
        """Pages, at whose end a state is kept for the prefix cache: so many that it takes a small share beside them."""
        return max(1, math.ceil(self.state_bytes / (_SHARE_OF_STATES * self.needs.num_groups * self.page_bytes)))

    def kept_states(self, num_pages: int) -> int:
        """States behind prefixes that so many pages may hold."""
        if not self.state_bytes or not self.config.prefix_caching:
            return 0
        return num_pages // (self.needs.num_groups * self.state_interval)

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers of a group, on each device, with all that its layout pads."""
        arrays: list[CacheArray] = jax.tree.leaves(self.attention.cache_arrays(self.cache_spec(1)))
        split = 1 if self.placement is None else self.placement.num_shares
        return sum(array.num_bytes for array in arrays) // split

    @property
    def sampling_bytes(self) -> int:
        """Of what sampling remembers of each batch slot, on each device."""
        return state_bytes(self.geometry(self.max_model_len))

    def free_bytes(self) -> int:
        """For the KV cache, on each device, once the weights are there."""
        stats = self.devices[0].memory_stats()
        if not stats or "bytes_limit" not in stats:
            return _DEFAULT_KV_CACHE_BYTES
        return self.kv_bytes(stats["bytes_limit"] - stats["bytes_in_use"])

    def kv_bytes(self, free_bytes: int) -> int:
        """What the KV cache may have of memory that is free on each device with the weights in it."""
        free = free_bytes - self.sampling_bytes
        return max(0, min(int(free * _SHARE_OF_FREE_MEMORY), free - self.logits_bytes))

    @property
    def logits_bytes(self) -> int:
        """Of what the largest head needs beside its arguments, on each device, at most."""
        geometry = self.geometry(self.max_model_len)
        rows = -(-geometry.max_rows // (1 if self.placement is None else self.placement.num_shares))
        return _COPIES_OF_LOGITS * rows * self.model.vocab_rows * 4

    def describe(self, spec: KVCacheSpec) -> EngineInfo:
        """Of an engine with a cache of this size."""
        num_pages = spec.num_pages - 1
        split = 1 if self.placement is None else self.placement.num_shares
        return EngineInfo(
            num_parameters=num_parameters(self.model),
            dtype=self.model.dtype,
            kv_dtype=self.kv_dtype,
            kv_cache_tokens=num_pages // self.needs.num_groups * spec.page_size,
            kv_cache_bytes=spec.num_pages * self.page_bytes * split,
            num_state_slots=max(0, spec.num_states - 1),
            state_cache_bytes=spec.num_states * self.state_bytes * split,
            max_model_len=self.needs.longest(num_pages, self.max_model_len),
            platform=self.platform,
            device_kind=self.devices[0].device_kind,
            num_devices=len(self.devices),
            attention=self.attention.name,
            matmul=self.matmul,
            fallback=self.fallback,
            vocab_size=self.model.vocab_size,
        )

    @property
    def decode_steps(self) -> int | None:
        """In one dispatch; None where warm-up is to measure what is quicker.

        On TPU one unless set: the next step is dispatched while one runs, so the device does not wait for the host, and
        each shape of several steps takes long to compile.
        """
        return 1 if self.config.decode_steps is None and self.platform == "tpu" else self.config.decode_steps

    @property
    def length_rule(self) -> LengthRule | None:
        """The model's, if a sequence can be so long that it matters."""
        rule = self.model.length_rule
        return rule if rule is not None and self.max_model_len > rule.original else None

    def geometry(self, max_model_len: int) -> Geometry:
        return Geometry(
            max_num_seqs=self.config.max_num_seqs,
            max_batch_tokens=self.config.max_batch_tokens,
            max_model_len=max_model_len,
            page_size=self.page_size,
            vocab_size=self.model.vocab_size,
            num_groups=self.needs.num_groups,
            few_shapes=self.platform == "tpu",
            has_lengths=self.length_rule is not None,
            has_states=self.model.has_states,
        )


def deploy(config: EngineConfig, model: ModelConfig, devices: Sequence[jax.Device] | None = None) -> Deployment:
    """`model` on `devices`: this process's by default, of which it takes the first that one copy needs.

    Raises:
        ConfigError: the model cannot be split so, there are too few devices, the page table is too large, or no weights
            are in int8 where activations are to be.
    """
    is_abstract = devices is not None  # arrays without memory need a place that says whose they would be
    if devices is None:
        devices = _first(jax.devices(), config)
    platform = devices[0].platform
    max_model_len = config.max_model_len or model.max_position
    model = split_model(_with_activations(model, config.activations), config.tensor_parallel, config.expert_parallel)
    model = _with_windows_that_matter(model, max_model_len)
    native = NativeLibrary((config.compile_cache_dir or DEFAULT_BUILD_DIR) / "native")
    attention = _attention(config, platform, model, native)
    placement = None
    if is_abstract or len(devices) > 1:
        placement = place(devices, config.tensor_parallel, config.expert_parallel)
    if placement is not None:
        attention = ShardedAttention(attention, placement)
    kv_dtype = attention.cache_dtype(model.dtype)
    model = model if kv_dtype == KV_SCALES_DTYPE else _without_kv_scales(model)
    page_size = config.page_size or page_size_for(
        platform, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, kv_dtype=kv_dtype
    )
    if platform == "tpu" and attention.is_stacked:
        check_page_table(max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, page_size=page_size)
    library = _matmul_library(config, platform, model, native, is_stacked=attention.is_stacked)
    return Deployment(
        config=config,
        devices=tuple(devices),
        model=model,
        attention=attention,
        placement=placement,
        page_size=page_size,
        max_model_len=max_model_len,
        kv_dtype=kv_dtype,
        matmul_library=library,
        fallback=native.missing,
    )


def _attention(config: EngineConfig, platform: str, model: ModelConfig, native: NativeLibrary) -> AttentionBackend:
    """Where nothing is said of its pages, they are of the checkpoint's type, if the implementation has that."""
    setting = config.kv_cache_dtype
    chosen = partial(
        attention_for,
        config.attention,
        platform,
        model.dtype,
        native,
        head_dim=model.head_dim,
        has_sinks=any(attention.sinks for attention in model.attentions),
    )
    attention = chosen(kv_dtype=None if setting in ("auto", "unquantized") else setting)
    if setting == "auto" and model.kv_dtype in attention.quantized_dtypes:
        return chosen(kv_dtype=model.kv_dtype)
    return attention


def _without_kv_scales(model: ModelConfig) -> ModelConfig:
    blocks = tuple(block.with_attention(has_kv_scales=False) for block in model.blocks)
    return replace(model, blocks=blocks)


def _with_activations(model: ModelConfig, setting: str) -> ModelConfig:
    if setting == "auto":
        return model
    packings = [
        packing for packed in (model.packed, *(block.packed for block in model.blocks)) for _, packing in packed
    ]
    if all(packing.code != "int8" for packing in packings):
        held = ", ".join(sorted({packing.code for packing in packings})) or model.dtype
        raise ConfigError(f"activations = {setting} is for weights in int8, and these are in {held}")

    def multiplied(packed: Packed) -> Packed:
        return tuple((path, replace(packing, has_int8_activations=packing.code == "int8")) for path, packing in packed)

    blocks = tuple(replace(block, packed=multiplied(block.packed)) for block in model.blocks)
    return replace(model, blocks=blocks, packed=multiplied(model.packed))


def _with_windows_that_matter(model: ModelConfig, max_model_len: int) -> ModelConfig:
    """Without those that no sequence outgrows: such layers are like those that see everything."""

    def seen(block: BlockConfig) -> BlockConfig:
        window = block.attention.sliding_window if block.has_attention else None
        if window is None or window < max_model_len:
            return block
        return block.with_attention(sliding_window=None)

    return replace(model, blocks=tuple(map(seen, model.blocks)))


def _matmul_library(
    config: EngineConfig, platform: str, model: ModelConfig, native: NativeLibrary, *, is_stacked: bool
) -> ctypes.CDLL | None:
    setting, num_devices = config.matmul, config.num_devices
    fits = platform == "cpu" and num_devices == 1 and not is_stacked and can_pack(model)
    if setting == "xla" or (setting == "auto" and not fits):
        return None
    if not fits:
        raise ConfigError(
            f"matmul 'native' is for one CPU device and float32, or bfloat16 with even sizes; not for {model.dtype} on "
            f"{num_devices} {platform} device(s)"
        )
    return native.load_for("matmul", setting)


def with_pages(deployment: Deployment, free_bytes: int) -> KVCacheSpec:
    """As many pages, and slots for states, as are asked for, or as memory has, but never more than all sequences
    together could fill.

    Raises:
        ConfigError: that is not even one page for each group of layers, beside page 0.
    """
    config, needs = deployment.config, deployment.needs
    fewest = 1 + needs.num_groups
    spec = fitting(deployment, config.kv_cache_bytes or free_bytes)
    if spec.num_pages >= fewest:
        return spec
    if config.num_pages is not None:
        raise ConfigError(
            f"num_pages must be {fewest} or more, not {config.num_pages}: the model has {needs.num_groups} groups of "
            "layers with pages of their own, and page 0 only takes padding"
        )
    states = f"; {spec.num_states} states have {spec.num_states * deployment.state_bytes}" if spec.num_states else ""
    held = f"; logits of max_num_seqs {config.max_num_seqs} keep {deployment.logits_bytes} bytes for themselves"
    raise ConfigError(
        f"the KV cache holds {spec.num_pages} pages of {deployment.page_bytes} bytes, and needs {fewest} at least"
        + states
        + ("" if config.kv_cache_bytes else held)
    )


def fitting(deployment: Deployment, num_bytes: int) -> KVCacheSpec:
    """What so much memory holds, unless settings say how many: a state for each sequence that may run, as far as half
    of it goes; and of the rest pages, with the states of prefixes that these may hold.

    Raises:
        ConfigError: slots are asked for, and the model keeps no states.
    """
    config, asked = deployment.config, _asked_states(deployment)
    running = _running_states(deployment, num_bytes) if asked is None else asked
    kept_bytes = deployment.state_bytes * deployment.kept_states(_MANY) / _MANY if asked is None else 0.0
    num_pages = config.num_pages
    if num_pages is None:
        affordable = int((num_bytes - running * deployment.state_bytes) / (deployment.page_bytes + kept_bytes))
        num_pages = max(0, min(affordable, useful_pages(deployment)))
    return deployment.cache_spec(num_pages, running + (deployment.kept_states(num_pages) if asked is None else 0))


def _asked_states(deployment: Deployment) -> int | None:
    """Slots, slot 0 included, where their number is given; None where it is not.

    Raises:
        ConfigError: it is given for a model that keeps no states.
    """
    asked = deployment.config.state_slots
    if not deployment.model.has_states:
        if asked is not None:
            raise ConfigError(f"state_slots = {asked}, and no layer of the model keeps a state")
        return 0
    return None if asked is None else 1 + asked


def _running_states(deployment: Deployment, num_bytes: int) -> int:
    """Slots for sequences that run, and slot 0."""
    most = 1 + deployment.config.max_num_seqs
    if deployment.config.num_pages is not None:  # then memory is what is asked for
        return most
    return max(2, min(most, num_bytes // 2 // deployment.state_bytes))


def useful_pages(deployment: Deployment) -> int:
    """That all sequences together could fill, and page 0."""
    config = deployment.config
    return config.max_num_seqs * deployment.needs.most(deployment.max_model_len, config.max_batch_tokens) + 1


def _first(devices: Sequence[jax.Device], config: EngineConfig) -> Sequence[jax.Device]:
    if config.num_devices > len(devices):
        raise ConfigError(f"{config.parallelism}, and there are {len(devices)} {devices[0].platform} devices")
    return devices[: config.num_devices]
