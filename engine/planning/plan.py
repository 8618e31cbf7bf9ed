"""What a model would be on a slice of TPUs: compiled for it bucket by bucket, with no TPU and no weights."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import jax

from penstock.engine.attention import KVCacheSpec, ShardedAttention
from penstock.engine.config import EngineConfig
from penstock.engine.deployment import SHARE_OF_FREE_MEMORY, Deployment, deploy, useful_pages, with_pages
from penstock.engine.errors import ConfigError
from penstock.engine.execution.compilation import no_kept_compilations, printed
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.steps import Steps
from penstock.engine.loading.checkpoint import abstract_model
from penstock.engine.models import ModelConfig, layer_runs
from penstock.engine.planning.chips import Chip
from penstock.engine.planning.hlo import Program, Traffic
from penstock.engine.planning.roofline import Step, decode_step, prefill_step
from penstock.engine.planning.topology import chip_of, devices_of
from penstock.engine.planning.weights import held_bytes, vocab_padding_bytes
from penstock.engine.scheduling.page_needs import PageNeeds
from penstock.engine.sharded_linears import prepare_for_tpu
from penstock.engine.stats import ReportProgress

ALL_OPTIONS = "head, all options"
WRITING = ("backbone", "loop")
"""Kinds of functions that take the KV cache and give it back."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One compiled function of a step."""

    kind: str  # backbone, head, ALL_OPTIONS (the head with all sampling options), or loop: several decode steps
    size: int  # tokens, or sampled rows
    compile_s: float
    compile_cpu_s: float  # of all threads: what does not change when others use the machine
    temporary_bytes: int
    aliased_bytes: int
    traffic: Traffic
    layer_collectives: dict[str, float]  # in the loop over layers, of each of them


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers are per device unless they say otherwise."""

    topology: str
    tensor: int
    expert: int
    replicas: int  # workers that the slice can hold
    chip: Chip
    attention: str
    model: ModelConfig
    kv_dtype: str  # of the pages
    decode_steps: int  # in one dispatch
    page_size: int
    page_bytes: int
    needs: PageNeeds  # of a sequence, in pages
    num_pages: int
    max_pages: int  # that all sequences together could fill
    max_model_len: int
    cache_bytes: int
    weight_bytes: int
    vocab_padding_bytes: int  # of them, where the devices do not divide the vocabulary
    sampling_bytes: int  # what sampling remembers of each batch slot
    buckets: tuple[Bucket, ...]
    decode: tuple[Step, ...]
    prefill: Step

    @property
    def temporary_bytes(self) -> int:
        return max((bucket.temporary_bytes for bucket in self.buckets), default=0)

    @property
    def used_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.sampling_bytes + self.temporary_bytes

    @property
    def num_tokens(self) -> int:
        """That the pages of one replica hold together, while no window has passed any."""
        return (self.num_pages - 1) // self.needs.num_groups * self.page_size

    def sequence_bytes(self, num_tokens: int) -> int:
        """Of the pages that a decoding sequence of so many tokens holds, where windows have passed the others."""
        return self.needs.most(num_tokens, 1) * self.page_bytes

    def num_sequences(self, num_tokens: int) -> int:
        """Of that length, whose pages are there at once."""
        return (self.num_pages - 1) // self.needs.most(num_tokens, 1)

    @property
    def compile_s(self) -> float:
        return sum(bucket.compile_s for bucket in self.buckets)

    @property
    def compile_cpu_s(self) -> float:
        return sum(bucket.compile_cpu_s for bucket in self.buckets)

    @property
    def cache_is_aliased(self) -> bool:
        """In every step, and copied in none."""
        steps = [bucket for bucket in self.buckets if bucket.kind in WRITING]
        return all(b.aliased_bytes >= self.cache_bytes and b.traffic.cache_copies == 0 for b in steps)


def plan(
    model: ModelConfig,
    topology: str,
    config: EngineConfig,
    *,
    context: int = 1024,
    only: frozenset[int] | None = None,
    progress: ReportProgress | None = None,
) -> Plan:
    """Compiles every bucket of `config` for `topology`, and estimates what a step costs.

    `context` is the length of the sequences in the estimates. `only` restricts the token buckets.

    Raises:
        ConfigError: libtpu is missing, the topology is unknown, the model cannot be split over `tensor_parallel`
            devices, or it does not fit; the message says by how much.
    """
    chip, devices = chip_of(topology), devices_of(topology)
    if len(devices) % config.num_devices:
        raise ConfigError(f"{config.parallelism} does not divide the {len(devices)} devices of {topology}")
    deployment = deploy(config, model, devices)
    layout = _lay_out(deployment, config, chip)
    with no_kept_compilations():  # jax cannot read back what was compiled for devices that are not there
        buckets = layout.buckets(only, progress)
    return Plan(
        topology=topology,
        tensor=config.tensor_parallel,
        expert=config.expert_parallel,
        replicas=len(devices) // config.num_devices,
        chip=chip,
        attention=deployment.attention.name,
        model=deployment.model,
        kv_dtype=deployment.kv_dtype,
        decode_steps=layout.decode_steps,
        page_size=layout.spec.page_size,
        page_bytes=deployment.page_bytes,
        needs=deployment.needs,
        num_pages=layout.spec.num_pages,
        max_pages=useful_pages(replace(deployment, max_model_len=layout.geometry.max_model_len)),
        max_model_len=layout.geometry.max_model_len,
        cache_bytes=layout.cache_bytes,
        weight_bytes=layout.weight_bytes,
        vocab_padding_bytes=vocab_padding_bytes(deployment.model, deployment.placement),
        sampling_bytes=deployment.sampling_bytes,
        buckets=buckets,
        decode=_decode_steps(deployment, buckets, chip, context, config),
        prefill=prefill_step(deployment, chip, max(layout.geometry.token_buckets)),
    )


@dataclass(frozen=True)
class _Layout:
    """A deployment with its pages, ready to be compiled."""

    chip: Chip
    device: jax.Device  # one of them
    spec: KVCacheSpec
    geometry: Geometry
    steps: Steps
    cache: Any  # abstract
    cache_bytes: int  # on each device
    weight_bytes: int  # likewise
    decode_steps: int
    pattern_length: int  # layers in an iteration of the largest loop over them

    def buckets(self, only: frozenset[int] | None, progress: ReportProgress | None) -> tuple[Bucket, ...]:
        """What a worker compiles when it starts; `only` buckets of these sizes."""
        kinds, made = _kinds(self.geometry, self.decode_steps, only), []
        for done, (kind, size) in enumerate(kinds):
            if progress is not None:
                progress(done, len(kinds), f"{kind} of {size}")
            made.append(self.bucket(kind, size))
        return tuple(made)

    def bucket(self, kind: str, size: int) -> Bucket:
        """Compiles one function, and looks at what it became."""
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            lowered = self._lower(kind, size)
            compiled = self.steps.compile(lowered)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            message = f"the {kind} of {size} does not fit a {self.chip.name} device: {str(error)[:400]}"
            raise ConfigError(message) from error
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        memory: Any = compiled.memory_analysis()
        # Nothing here is made of all options.
        text = "" if kind == ALL_OPTIONS else printed(lowered, compiled, self.device)
        program = Program(text) if text else None
        return Bucket(
            kind=kind,
            size=size,
            compile_s=seconds,
            compile_cpu_s=cpu_seconds,
            temporary_bytes=memory.temp_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            traffic=program.traffic(self.cache_bytes) if program else Traffic(),
            layer_collectives=self._layer_collectives(kind, program) if program else {},
        )

    def _lower(self, kind: str, size: int) -> jax.stages.Lowered:
        if kind == "backbone":
            return self.steps.backbone(size, self.cache)
        if kind == "loop":
            return self.steps.loop(size, self.decode_steps, self.cache)
        return self.steps.head(size, is_extended=kind != "head")

    def _layer_collectives(self, kind: str, program: Program) -> dict[str, float]:
        if kind not in WRITING:
            return {}
        loops = program.loop_traffic(self.cache_bytes, depth=1 if kind == "backbone" else 2)  # steps, then layers
        busiest = max((loop.collectives for loop in loops), key=lambda counts: sum(counts.values()), default={})
        return {name: count / self.pattern_length for name, count in busiest.items()}


def _lay_out(deployment: Deployment, config: EngineConfig, chip: Chip) -> _Layout:
    """Raises ConfigError if weights and pages do not fit."""
    placement, attention = deployment.placement, deployment.attention
    if placement is None or not isinstance(attention, ShardedAttention):
        raise TypeError("a deployment on given devices has a placement")  # deploy promises it
    weight_bytes = held_bytes(deployment.model, placement)
    free = int((chip.hbm_bytes - weight_bytes - deployment.sampling_bytes) * SHARE_OF_FREE_MEMORY)
    if free < 2 * deployment.page_bytes:
        raise ConfigError(
            f"the weights take {weight_bytes} bytes of the {chip.hbm_bytes} that a {chip.name} device has, which "
            f"leaves nothing for pages: raise tensor_parallel above {config.tensor_parallel}, or take a larger slice"
        )
    spec = with_pages(deployment, free)
    geometry = deployment.geometry(deployment.needs.longest(spec.num_pages - 1, deployment.max_model_len))
    model = abstract_model(deployment.model, placement, stacked=attention.is_stacked)
    return _Layout(
        chip=chip,
        device=placement.mesh.devices.flat[0],
        spec=spec,
        geometry=geometry,
        steps=Steps(prepare_for_tpu(model, placement), attention, geometry, placement),
        cache=attention.abstract_cache(spec),
        cache_bytes=spec.num_pages * deployment.page_bytes,
        weight_bytes=weight_bytes,
        decode_steps=deployment.decode_steps or 1,
        pattern_length=max((len(run.pattern) for run in layer_runs(deployment.model) if run.repeats > 1), default=1),
    )


def _kinds(geometry: Geometry, decode_steps: int, only: frozenset[int] | None) -> list[tuple[str, int]]:
    """What a worker compiles when it starts."""
    sizes = [
        ("backbone", geometry.token_buckets),
        ("head", geometry.row_buckets),
        (ALL_OPTIONS, geometry.extended_row_buckets),
        ("loop", geometry.row_buckets if decode_steps > 1 else ()),
    ]
    return [(kind, size) for kind, buckets in sizes for size in buckets if only is None or size in only]


def _decode_steps(
    deployment: Deployment, buckets: tuple[Bucket, ...], chip: Chip, context: int, config: EngineConfig
) -> tuple[Step, ...]:
    found = {(bucket.kind, bucket.size): bucket for bucket in buckets}
    heads = [size for kind, size in found if kind == "head"]
    steps = []
    for batch in sorted({1, 32, 64, 128, config.max_num_seqs}):
        if batch > config.max_num_seqs:
            continue
        size = max(16, 1 << (batch - 1).bit_length())
        backbone = found.get(("backbone", size))
        head = found.get(("head", min((h for h in heads if h >= size), default=0)))
        if backbone is None or head is None:
            continue
        if backbone.traffic.hbm_bytes and head.traffic.hbm_bytes:
            steps.append(decode_step(deployment, chip, batch, context, backbone.traffic, head.traffic))
    return tuple(steps)
