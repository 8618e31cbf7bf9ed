"""How a model is laid out on devices: attention, mesh and pages. Used by the engine and the planner."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from pathlib import Path

import jax

from penstock.engine.attention import (
    AttentionBackend,
    CacheArray,
    CacheSpec,
    KVCacheSpec,
    ShardedAttention,
    attention_for,
    check_page_table,
    kv_head_bytes,
    page_size_for,
)
from penstock.engine.config import RAW_LOGPROBS, EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling.sampling_state import state_bytes
from penstock.engine.execution.state_cache import slot_bytes
from penstock.engine.formats.packing import INTEGERS
from penstock.engine.kernels.cpu import NativeLibrary
from penstock.engine.length_rule import LengthRule
from penstock.engine.loading.files import expanded
from penstock.engine.models import BlockConfig, LayerGroups, ModelConfig, layer_groups, num_parameters
from penstock.engine.models.attention_interface import KV_SCALES_DTYPE
from penstock.engine.models.config import PackedMatmuls
from penstock.engine.models.cpu.panels import can_pack
from penstock.engine.progress import ReportProgress, silent
from penstock.engine.scheduling.memory.amounts import Amount
from penstock.engine.scheduling.memory.page_needs import PageNeeds
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.sharding.placement import Placement, place, split_model
from penstock.engine.stats import DeviceMemory, EngineInfo

DEFAULT_BUILD_DIR = expanded("~/.cache/penstock")

_SHARE_OF_FREE_MEMORY = 0.9  # upper bound for the KV cache when its size is not set
_SHARE_OF_STATES = 0.25  # most that prefix states take, relative to the pages of these prefixes
_COPIES_OF_LOGITS = 7  # most copies that sampling with all options holds at once, from compiling it for TPUs
_DEFAULT_KV_CACHE_BYTES = 2**30  # used when the free memory is unknown


@dataclass(frozen=True)
class Deployment:
    """Everything that follows from a model, the settings and the platform before anything is loaded."""

    config: EngineConfig
    devices: tuple[jax.Device, ...]  # of one replica, or of all replicas in a slice
    model: ModelConfig  # as laid out: KV heads may be replicated
    attention: AttentionBackend
    placement: Placement | None  # None: everything on one device
    page_size: int
    max_model_len: int
    kv_dtype: str
    matmul_library: ctypes.CDLL | None  # kernels that the weights are packed for; None leaves matmuls to XLA
    fallback: str | None  # why the C++ kernels of `auto` are unavailable; None if nothing is missing
    instructions: str | None  # with which the C++ kernels in use multiply bf16; None: no such kernels are used
    unkept: str | None = None  # why compiled programs cannot be cached; None if they are, or should not be
    timed: tuple[str, ...] = ()  # what was chosen by times measured at the start (`quickest`)

    @property
    def platform(self) -> str:
        name: str = self.devices[0].platform
        return name

    @property
    def matmul(self) -> str:
        """The matmul setting's value."""
        return "xla" if self.matmul_library is None else "native"

    @property
    def unpacks_in_pieces(self) -> bool:
        """Whether quantized weights are unpacked in pieces; devices that share a model unpack only their shares."""
        return self.platform == "cpu" and self.placement is None and self.model.is_packed

    @property
    def groups(self) -> LayerGroups:
        """The groups of layers; each group has pages of its own."""
        return layer_groups(self.model)

    @property
    def needs(self) -> PageNeeds:
        """The pages that a sequence needs in each group."""
        return PageNeeds(self.page_size, self.groups.windows, self.groups.kinds)

    def cache_spec(self, num_pages: Amount, num_states: int = 0) -> CacheSpec:
        """Returns the cache for these counts; `num_pages` includes page 0 of each kind."""
        kinds = tuple(
            KVCacheSpec(
                num_layers=kind.size,
                num_pages=count,
                page_size=self.page_size,
                num_kv_heads=kind.num_kv_heads,
                head_dim=kind.head_dim,
                dtype=self.kv_dtype,
            )
            for kind, count in zip(self.groups.page_kinds, num_pages.counts, strict=True)
        )
        return CacheSpec(kinds, num_states)

    def page_pool(self, spec: CacheSpec) -> PagePool:
        """Returns the accounts of the pages and state slots of `spec`, all free."""
        return PagePool(
            spec.counts,
            spec.page_size,
            windows=self.needs.windows,
            kinds=self.needs.kinds,
            prefix_caching=self.config.prefix_caching,
            num_states=spec.num_states,
            state_interval=self.state_interval,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states in all layers, on each device; 0 if no layer keeps any."""
        return slot_bytes(self.model, self.placement)

    @property
    def state_interval(self) -> int:
        """Number of pages between states kept for the prefix cache, so that states take a small share of the memory."""
        span = sum(self.kind_bytes[kind] for kind in self.groups.kinds)  # bytes of one page's tokens in all groups
        return max(1, math.ceil(self.state_bytes / (_SHARE_OF_STATES * span)))

    def kept_states(self, num_pages: Amount) -> int:
        """Returns the number of states for the prefixes that `num_pages` may hold."""
        if not self.state_bytes or not self.config.prefix_caching:
            return 0
        return self.needs.spans(num_pages) // self.state_interval

    @property
    def kind_bytes(self) -> tuple[int, ...]:
        """Bytes of one page of each kind, in all layers of a group, on each device, including its layout's padding."""
        split = 1 if self.placement is None else self.placement.num_shares
        ones = self.cache_spec(Amount((1,) * len(self.groups.page_kinds))).kinds
        arrays: list[list[CacheArray]] = [jax.tree.leaves(self.attention.cache_arrays(one)) for one in ones]
        return tuple(sum(array.num_bytes for array in of_kind) // split for of_kind in arrays)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of every kind together."""
        return sum(self.kind_bytes)

    @property
    def page_padding(self) -> float:
        """Share of the pages that is padding: on a TPU, heads of more than 64 features take multiples of 128."""
        split = 1 if self.placement is None else self.placement.num_shares
        useful = sum(
            2 * kind.size * kind.num_kv_heads * kv_head_bytes(kind.head_dim, self.kv_dtype)
            for kind in self.groups.page_kinds
        )
        return max(0.0, 1 - useful * self.page_size / (self.page_bytes * split))

    def pages_bytes(self, num_pages: Amount) -> int:
        """Returns the bytes of `num_pages` on each device."""
        return sum(map(mul, num_pages.counts, self.kind_bytes))

    @property
    def sampling_bytes(self) -> int:
        """Bytes that sampling keeps for all batch slots, on each device."""
        return state_bytes(self.geometry(self.max_model_len))

    def free_bytes(self) -> int:
        """Returns the bytes available to the KV cache on each device once the weights are loaded."""
        stats = self.devices[0].memory_stats()
        if not stats or "bytes_limit" not in stats:
            return _DEFAULT_KV_CACHE_BYTES
        return self.kv_bytes(stats["bytes_limit"] - stats["bytes_in_use"])

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        """Returns the memory of this process's devices whose runtime counts it."""
        found = []
        for device in self.devices:
            stats = device.memory_stats() if device.process_index == jax.process_index() else None
            if stats and "bytes_limit" in stats:
                used = stats["bytes_in_use"]
                peak = stats.get("peak_bytes_in_use", used)
                found.append(DeviceMemory(device.id, used, peak, stats["bytes_limit"]))
        return tuple(found)

    def kv_bytes(self, free_bytes: int) -> int:
        """Returns the part of `free_bytes`, free on each device once weights are loaded, that the KV cache may take."""
        free = free_bytes - self.sampling_bytes
        return max(0, min(int(free * _SHARE_OF_FREE_MEMORY), free - self.logits_bytes))

    @property
    def logits_bytes(self) -> int:
        """Upper bound of the bytes that the largest head needs on each device on top of its arguments."""
        geometry = self.geometry(self.max_model_len)
        rows = -(-geometry.max_rows // (1 if self.placement is None else self.placement.num_shares))
        return _COPIES_OF_LOGITS * rows * self.model.vocab_rows * 4

    def describe(self, spec: CacheSpec) -> EngineInfo:
        """Describes an engine with a cache of this size."""
        num_pages = usable(spec)
        split = 1 if self.placement is None else self.placement.num_shares
        return EngineInfo(
            num_parameters=num_parameters(self.model),
            dtype=self.model.dtype,
            kv_dtype=self.kv_dtype,
            kv_cache_tokens=self.needs.spans(num_pages) * spec.page_size,
            kv_cache_bytes=self.pages_bytes(Amount(spec.counts)) * split,
            num_state_slots=max(0, spec.num_states - 1),
            state_cache_bytes=spec.num_states * self.state_bytes * split,
            max_model_len=self.needs.longest(num_pages, self.max_model_len),
            platform=self.platform,
            device_kind=self.devices[0].device_kind,
            num_devices=len(self.devices),
            attention=self.attention.name,
            matmul=self.matmul,
            fallback=self.fallback,
            instructions=self.instructions,
            exceeded_len=self.model.max_position if self.max_model_len > self.model.max_position else None,
            page_padding=round(self.page_padding, 3),
            unkept=self.unkept,
            timed=self.timed,
            vocab_size=self.model.vocab_size,
        )

    def decode_steps(self, *, is_invariant: bool) -> int | None:
        """Returns the decode steps in one dispatch; None if warm-up is to measure which number is fastest.

        It measures only where the number changes no bit of the results, or `same_tokens` is off. So a busy machine does
        not choose another arithmetic than an idle one. The default on TPU is always one: the next step is dispatched
        while one runs, so the device does not wait for the host, and each shape of several steps takes long to compile.
        """
        is_measured = self.platform != "tpu" and (is_invariant or not self.config.same_tokens)
        return 1 if self.config.decode_steps is None and not is_measured else self.config.decode_steps

    @property
    def length_rule(self) -> LengthRule | None:
        """The model's length rule, if sequences can be long enough for it to matter."""
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
            raw_logprobs=self.config.logprobs_mode == RAW_LOGPROBS,
        )


def deploy(
    config: EngineConfig,
    model: ModelConfig,
    devices: Sequence[jax.Device] | None = None,
    progress: ReportProgress = silent,
) -> Deployment:
    """Lays out `model` on `devices`. The default is the first of this process's devices, as many as one copy needs.
    `progress` is called if kernels have to be compiled.

    Raises:
        ConfigError: the model cannot be split this way, there are too few devices, the page table is too large, or int8
            activations are asked for and no weights are in int8 or int4.
    """
    is_abstract = devices is not None  # abstract arrays need a placement that names their devices
    if devices is None:
        devices = _first(jax.devices(), config)
    platform = devices[0].platform
    max_model_len = config.max_model_len or model.max_position
    model = _with_activations(model, config.activations)
    model = split_model(model, config.tensor_parallel, config.expert_parallel, has_tiles=platform == "tpu")
    model = _with_windows_that_matter(model, max_model_len)
    native = NativeLibrary(native_build_dir(config.compile_cache_dir), progress)
    attention = _attention(config, devices[0], model, native)
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
        instructions=native.instructions,
    )


def native_build_dir(compile_cache_dir: Path | None) -> Path | None:
    """Returns the folder for native builds; None if the user has no home folder."""
    directory = compile_cache_dir or DEFAULT_BUILD_DIR
    return None if directory.parts[:1] == ("~",) else directory / "native"


def _attention(config: EngineConfig, device: jax.Device, model: ModelConfig, native: NativeLibrary) -> AttentionBackend:
    """Chooses the implementation. By default pages have the checkpoint's type, if the implementation supports it."""
    setting = config.kv_cache_dtype
    chosen = partial(
        attention_for,
        config.attention,
        device.platform,
        model.dtype,
        native,
        device_kind=device.device_kind,
        head_dim=max(attention.head_dim for attention in model.attentions),
        has_sinks=any(attention.sinks for attention in model.attentions),
        shares_kv=not all(attention.has_kv for attention in model.attentions),
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
    if all(packing.code not in INTEGERS for packing in packings):
        held = ", ".join(sorted({packing.code for packing in packings})) or model.dtype
        raise ConfigError(f"activations = {setting} is for weights in {' or '.join(INTEGERS)}, and these are in {held}")

    def multiplied(packed: PackedMatmuls) -> PackedMatmuls:
        return tuple(
            (path, replace(packing, has_int8_activations=packing.code in INTEGERS)) for path, packing in packed
        )

    blocks = tuple(replace(block, packed=multiplied(block.packed)) for block in model.blocks)
    return replace(model, blocks=blocks, packed=multiplied(model.packed))


def _with_windows_that_matter(model: ModelConfig, max_model_len: int) -> ModelConfig:
    """Removes windows that no sequence outgrows: these layers then count as full attention."""

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
            f"matmul 'native' is for one CPU device and, in bfloat16, even sizes; not for {model.dtype} on "
            f"{num_devices} {platform} device(s)"
        )
    return native.load_for("matmul", setting)


def usable(spec: CacheSpec) -> Amount:
    """Returns the number of pages without page 0 of each kind, which is never handed out."""
    return Amount(tuple(count - 1 for count in spec.counts))


def _first(devices: Sequence[jax.Device], config: EngineConfig) -> Sequence[jax.Device]:
    if config.num_devices > len(devices):
        raise ConfigError(f"{config.parallelism}, and there are {len(devices)} {devices[0].platform} devices")
    return devices[: config.num_devices]
