"""Compiles the functions of a step for devices that are not there, and analyses the result.

The results are kept in a folder, keyed by the compiled text and the versions of all code that analyses it. A plan that
differs from an earlier one in a few functions compiles only those.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import os
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from penstock.engine import kept_files
from penstock.engine.errors import ConfigError
from penstock.engine.execution import compilation
from penstock.engine.execution.compilation import no_kept_compilations, printed
from penstock.engine.execution.steps import LayerCaches, Step, Steps
from penstock.engine.models import LayerCache
from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.device.cycles import LayerCycles, layer_cycles
from penstock.tools.plan.device.hlo import HloModule, Traffic
from penstock.tools.plan.device.links import LinkTime, link_time

ALL_OPTIONS = "head, all options"
WRITING = ("backbone", "loop")
"""Kinds of functions that take the KV cache and return it."""

_FOLDER = "plans"


@dataclass(frozen=True, slots=True)
class Bucket:
    kind: str  # backbone, head, ALL_OPTIONS (the head with all sampling options), or loop: several decode steps
    size: int  # tokens, or sampled rows
    compile_s: float  # for a kept one, the time it took then
    compile_cpu_s: float  # of all threads of its process: independent of other load on the machine
    is_kept: bool  # from an earlier plan
    is_as_run: bool  # whether traffic, cycles and links are of the program that runs (`compilation.printed`)
    temporary_bytes: int
    output_bytes: int  # of results that alias no argument
    code_bytes: int
    aliased_bytes: int
    traffic: Traffic  # with greedy sampling; in ALL_OPTIONS, if one row asks for all options
    full_traffic: Traffic  # with the most expensive branches, of all rows
    layer_collectives: dict[str, float]  # per layer, in the loop over layers
    layer: LayerCycles | None  # per iteration of that loop, in a backbone
    links: LinkTime | None  # per run of a backbone or a loop

    @property
    def step_bytes(self) -> int:
        """Bytes that it takes on top of its arguments while it runs."""
        return self.temporary_bytes + self.output_bytes


@dataclass(frozen=True)
class Compiler:
    """Compiles the functions of a step for one chip."""

    chip: Chip
    topology: str
    device: jax.Device  # one of the devices
    num_devices: int  # of a replica
    steps: Steps
    cache: LayerCaches  # abstract
    num_page_kinds: int  # number of leading arrays, if those hold all layers
    cache_bytes: int  # of its pages, on each device
    decode_steps: int
    pattern_length: int  # layers in an iteration of the largest loop over them
    directory: Path | None  # for the results; None: not kept

    @property
    def _array_bytes(self) -> int:
        """Bytes of the pages' largest array on a device if that holds all layers, otherwise of all their arrays.

        With several kinds of pages, it is the kind whose largest array is smallest.
        """
        return min(map(_largest, self.cache[: self.num_page_kinds])) if self.steps.is_stacked else self.cache_bytes

    def compile(self, kind: str, size: int) -> Bucket:
        """Compiles one function, or returns the kept result. No other thread may compile: libtpu has crashed then.

        Raises:
            ConfigError: it does not fit the device's memory.
        """
        with no_kept_compilations():
            step = self._step(kind, size)
            lowered = step.lower()
            path = self._path(kind, size, lowered)
            return _recalled(path) or self._bucket(kind, size, step, lowered, path)

    def _step(self, kind: str, size: int) -> Step:
        if kind == "backbone":
            return self.steps.backbone(size, self.cache)
        if kind == "loop":
            return self.steps.loop(size, self.decode_steps, self.cache)
        return self.steps.head(size, is_extended=kind != "head")

    def _bucket(self, kind: str, size: int, step: Step, lowered: jax.stages.Lowered, path: Path | None) -> Bucket:
        num_tokens = step.num_tokens
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            compiled = self.steps.compile(step, lowered)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            message = f"the {kind} of {size} does not fit a {self.chip.name} device: {str(error)[:400]}"
            raise ConfigError(message) from error
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        memory: Any = compiled.memory_analysis()
        text, is_as_run = printed(lowered, compiled, self.device, overlaps=self.steps.overlaps(num_tokens))
        program = HloModule(text) if text else None
        is_stacked = kind == "backbone" and self.steps.is_stacked
        bucket = Bucket(
            kind=kind,
            size=size,
            compile_s=seconds,
            compile_cpu_s=cpu_seconds,
            is_kept=False,
            is_as_run=is_as_run,
            temporary_bytes=memory.temp_size_in_bytes,
            output_bytes=max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
            code_bytes=memory.generated_code_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            traffic=program.traffic(self._array_bytes, dearest=kind == ALL_OPTIONS) if program else Traffic(),
            full_traffic=program.traffic(self._array_bytes, dearest=True, longest=True) if program else Traffic(),
            layer_collectives=self._layer_collectives(kind, program) if program else {},
            layer=layer_cycles(program, self._array_bytes) if program and is_stacked else None,
            links=link_time(program, program.entry, self.chip, self.num_devices) if program and num_tokens else None,
        )
        _keep(path, bucket)
        return bucket

    def _layer_collectives(self, kind: str, program: HloModule) -> dict[str, float]:
        if kind not in WRITING:
            return {}
        loops = program.loop_traffic(self._array_bytes, depth=1 if kind == "backbone" else 2)  # steps, then layers
        busiest = max((loop.collectives for loop in loops), key=lambda counts: sum(counts.values()), default={})
        return {name: count / self.pattern_length for name, count in busiest.items()}

    def _path(self, kind: str, size: int, lowered: jax.stages.Lowered) -> Path | None:
        """Returns a path named after everything that a Bucket depends on."""
        if self.directory is None:
            return None
        facts = [kind, str(size), self.topology, str(self.cache_bytes), str(self.pattern_length), _versions()]
        facts += [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
        digest = hashlib.sha256("|".join(facts).encode())
        digest.update(str(lowered.as_text()).encode())
        return self.directory / _FOLDER / f"{digest.hexdigest()[:32]}.json"


def _largest(pages: LayerCache) -> int:
    """Returns the bytes of the largest of these arrays on a device."""
    leaves = jax.tree.leaves(pages)
    largest: int = max(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    return largest


def _recalled(path: Path | None) -> Bucket | None:
    """Returns what was kept; None if there is nothing readable."""
    if path is None:
        return None
    try:
        fields = json.loads(kept_files.recall(path) or b"")
        traffics = {name: Traffic(**fields.pop(name)) for name in ("traffic", "full_traffic")}
        layer, links = fields.pop("layer"), fields.pop("links")
        parts = {
            "layer": None if layer is None else LayerCycles(**layer),
            "links": None if links is None else LinkTime(**links),
        }
        return Bucket(**{**fields, **traffics, **parts, "is_kept": True})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _keep(path: Path | None, bucket: Bucket) -> None:
    """Writes the file atomically. An unwritable folder only costs the next plan its time."""
    if path is not None:
        kept_files.keep_if_possible(path, json.dumps(dataclasses.asdict(bucket)).encode())


def _versions() -> str:
    """Returns the versions of the compiler and of the code that sets its options and reads its output."""
    digest = hashlib.sha256(inspect.getsource(compilation).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"{jax.__version__} {version('libtpu')} {digest.hexdigest()}"
