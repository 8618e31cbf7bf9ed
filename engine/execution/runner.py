"""Runs packed steps on the device. Holds the weights, the KV cache and the compiled steps; knows no policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.engine.attention import AttentionBackend, KVCacheSpec
from penstock.engine.execution.compilation import CompileWatch, compiled
from penstock.engine.execution.decode_loop import decode_loop
from penstock.engine.execution.geometry import NUM_SAMPLING_WORDS, Geometry
from penstock.engine.execution.packing import Batch, neutral_options
from penstock.engine.execution.sampling import NEVER, Logprobs, are_sound, bits_of, extend, logprobs_of, sample
from penstock.engine.execution.unpacking import unpack_extended, unpack_sampling, unpack_step
from penstock.engine.models import Decoder, LayerCache
from penstock.engine.sharding import Placement, gathered
from penstock.engine.stats import ReportProgress

Cache = tuple[LayerCache, ...]
Params = list[jax.Array]
Rebuild = Callable[[Params], Decoder]


class InFlight:
    """A dispatched step, or several decode steps, whose tokens are on their way to the host."""

    def __init__(self, tokens: jax.Array | None, logprobs: Logprobs | None, num_rows: int, marker: jax.Array) -> None:
        self._tokens = tokens
        self._logprobs = logprobs
        self._num_rows = num_rows
        self._marker = marker  # an output of the step, for those that sample nothing
        for array in jax.tree.leaves((tokens, logprobs)):
            array.copy_to_host_async()

    def token_ids(self) -> list[list[int]]:
        """Waits for the step, and gives the token of each sampled row, for each of its steps.

        What failed on the device is raised here.
        """
        if self._tokens is None:
            self._marker.block_until_ready()
            return [[]]
        ids: list[list[int]] = np.atleast_2d(np.asarray(self._tokens))[:, : self._num_rows].tolist()
        return ids

    def logprobs(self) -> Logprobs | None:
        """As numpy arrays, one row per sampled row; None if no row asked for extended sampling."""
        return None if self._logprobs is None else jax.tree.map(np.asarray, self._logprobs)


@dataclass(frozen=True, slots=True)
class Started:
    """A step whose backbone is on its way; nothing is sampled yet."""

    batch: Batch
    rows: jax.Array  # [max_rows, hidden]
    sampling: jax.Array  # i32 [max_rows, words]


class Runner:
    """A model, its KV cache, and one compiled function per shape.

    A step is two calls: the backbone, compiled per token bucket, and the head with the sampler, compiled per bucket of
    sampled rows; so the number of compilations is the sum of the buckets, not the product.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        spec: KVCacheSpec,
        geometry: Geometry,
        placement: Placement | None = None,  # None: everything on the default device
    ) -> None:
        self._steps = Steps(model, attention, geometry, placement)
        self._params = self._steps.params
        self._placement = placement
        self._attention = attention
        self._spec = spec
        self._geometry = geometry
        self._backbones: dict[int, Any] = {}  # compiled, by token bucket
        self._heads: dict[tuple[int, bool], Any] = {}  # compiled, by (row bucket, extended)
        self._loops: dict[tuple[int, int], Any] = {}  # compiled, by (row bucket, steps)
        self._watch = CompileWatch()
        self.reset_cache()

    @property
    def compiles_after_warmup(self) -> int:
        """Compilations, of anything in this process, since `start_watch`."""
        return self._watch.count

    def reset_cache(self) -> None:
        """Starts over with an empty cache, after a failure that may have lost the old one."""
        self._cache = self._attention.init_cache(self._spec)
        self._last_tokens = jnp.zeros((self._geometry.max_rows,), jnp.int32)
        if self._placement is not None:
            self._last_tokens = jax.device_put(self._last_tokens, self._placement.sharding())

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def compile_steps(self, progress: ReportProgress | None = None) -> None:
        """Compiles every step there is, several at a time."""
        geometry = self._geometry
        jobs: dict[str, Callable[[], Any]] = {
            f"{num_tokens} tokens": partial(self._backbone, num_tokens) for num_tokens in geometry.token_buckets
        }
        for extended in (False, True):
            for num_rows in geometry.extended_row_buckets if extended else geometry.row_buckets:
                name = f"{num_rows} sampled rows{', all options' if extended else ''}"
                jobs[name] = partial(self._head, num_rows, extended)
        _run_side_by_side(jobs, progress)

    def compile_loops(self, steps_by_rows: Mapping[int, int], progress: ReportProgress | None = None) -> None:
        """Compiles dispatches of several decode steps."""
        jobs = {f"{n} rows, {steps} steps": partial(self._loop, n, steps) for n, steps in steps_by_rows.items()}
        _run_side_by_side(jobs, progress)

    def start_watch(self) -> None:
        """From here on, every compilation is counted."""
        self._watch.start()

    def dispatch(self, batch: Batch) -> InFlight:
        """Starts a step and returns at once. Steps run on the device in the order of these calls."""
        if batch.stops is not None:
            tokens = self._run_loop(batch.flat, batch.stops, batch.num_tokens, batch.num_steps)
            return InFlight(tokens, None, batch.num_sampled, tokens)
        return self.finish(self.start(batch))

    def start(self, batch: Batch) -> Started:
        """The first half of a step, up to the hidden states of the rows to sample; `finish` has to follow.

        What is to be sampled may depend on tokens of the step before, which the host reads in between.
        """
        rows, sampling = self._run_backbone(batch.flat, batch.num_tokens)
        return Started(batch, rows, sampling)

    def finish(self, started: Started, masks: np.ndarray | None = None) -> InFlight:
        """The second half: samples. `masks` are i32 `[num_sampled, mask_words]`, whose bits say which tokens a row may
        draw: all ones, which is -1, for a row that is not constrained.
        """
        batch = started.batch
        if not batch.num_sampled:
            return InFlight(None, None, 0, started.rows)
        logprobs = self._run_head(started, masks)
        return InFlight(self._last_tokens, logprobs, batch.num_sampled, started.rows)

    def compile_backbone(self, num_tokens: int) -> jax.stages.Compiled:
        """The step of a token bucket, compiled: also for looking at what it became."""
        return self._steps.compile(self._steps.backbone(num_tokens, self._cache))

    def _backbone(self, num_tokens: int) -> Any:
        if num_tokens not in self._backbones:
            self._backbones[num_tokens] = self.compile_backbone(num_tokens)
        return self._backbones[num_tokens]

    def _head(self, num_rows: int, extended: bool) -> Any:
        if (num_rows, extended) not in self._heads:
            lowered = self._steps.head(num_rows, is_extended=extended)
            self._heads[num_rows, extended] = self._steps.compile(lowered)
        return self._heads[num_rows, extended]

    def _loop(self, num_rows: int, num_steps: int) -> Any:
        if (num_rows, num_steps) not in self._loops:
            lowered = self._steps.loop(num_rows, num_steps, self._cache)
            self._loops[num_rows, num_steps] = self._steps.compile(lowered)
        return self._loops[num_rows, num_steps]

    def _run_loop(self, flat: np.ndarray, stops: np.ndarray, num_rows: int, num_steps: int) -> jax.Array:
        run = self._loop(num_rows, num_steps)
        tokens: jax.Array
        tokens, self._last_tokens, self._cache = run(self._params, self._cache, self._last_tokens, flat, stops)
        return tokens

    def _run_backbone(self, flat: np.ndarray, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        run = self._backbone(num_tokens)
        rows, sampling, self._cache = run(self._params, self._cache, self._last_tokens, flat)
        return rows, sampling

    def _run_head(self, started: Started, masks: np.ndarray | None) -> Logprobs | None:
        batch, geometry = started.batch, self._geometry
        num_rows, extended, padded = batch.num_rows, batch.extended, None
        if masks is not None and extended is None:
            num_rows = geometry.row_bucket(batch.num_sampled, extended=True)
            extended, _ = neutral_options(geometry, num_rows)
        if extended is not None:
            padded = np.full((num_rows, geometry.mask_words), -1, np.int32)
            if masks is not None:
                padded[: batch.num_sampled] = masks
        run = self._head(num_rows, extended is not None)
        logprobs: Logprobs | None
        inputs = (started.rows, started.sampling, self._last_tokens, extended, padded)
        self._last_tokens, logprobs = run(self._params, *inputs)
        return logprobs


def _run_side_by_side(jobs: Mapping[str, Callable[[], Any]], progress: ReportProgress | None) -> None:
    """On threads: compiling releases Python's lock most of the time."""
    if not jobs:
        return
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        running = {threads.submit(job): name for name, job in jobs.items()}
        for done, future in enumerate(as_completed(running)):
            future.result()
            if progress:
                progress(done + 1, len(jobs), running[future])


class Steps:
    """The functions of a step, lowered shape by shape, for a runner's arrays or for abstract ones."""

    def __init__(
        self, model: Decoder, attention: AttentionBackend, geometry: Geometry, placement: Placement | None = None
    ) -> None:
        graph, state = nnx.split(model)
        self.params, structure = jax.tree.flatten(state)  # plain arrays pass into a compiled call several times faster
        self._rebuild = partial(_rebuild, graph, structure)
        self._config = model.config
        self._attention = attention
        self._geometry = geometry
        self._placement = placement
        self._sharding = None if placement is None else placement.sharding()
        self._device = jax.devices()[0] if placement is None else placement.mesh.devices.flat[0]

    def backbone(self, num_tokens: int, cache: Cache) -> jax.stages.Lowered:
        """Of a token bucket; `cache` is donated."""
        step = partial(_compute_hidden, self._rebuild, self._attention, self._geometry, num_tokens)
        last_tokens = self._shape(self._geometry.max_rows)
        flat = self._shape(self._geometry.step_layout(num_tokens).size)
        shardings = None
        if self._sharding is not None:
            shardings = (self._sharding, self._sharding, jax.tree.map(lambda array: array.sharding, cache))
        jitted = jax.jit(step, donate_argnames=("cache",), out_shardings=shardings)
        return jitted.lower(self.params, cache, last_tokens, flat)

    def head(self, num_rows: int, *, is_extended: bool) -> jax.stages.Lowered:
        """Of a row bucket, with all sampling options or only those that every step has."""
        max_rows, model = self._geometry.max_rows, self._config
        step = jax.jit(
            partial(_sample_rows, self._rebuild, self._geometry, num_rows, self._placement),
            out_shardings=self._sharding,
        )
        return step.lower(
            self.params,
            self._shape(max_rows, model.hidden_size, dtype=model.dtype),
            self._shape(max_rows, NUM_SAMPLING_WORDS),
            self._shape(max_rows),
            self._shape(self._geometry.extended_layout(num_rows).size) if is_extended else None,
            self._shape(num_rows, self._geometry.mask_words) if is_extended else None,
        )

    def loop(self, num_rows: int, num_steps: int, cache: Cache) -> jax.stages.Lowered:
        """Several decode steps of a row bucket; `cache` is donated."""
        step = partial(_decode, self._rebuild, self._attention, self._geometry, num_rows, num_steps, self._placement)
        shardings = None
        if self._sharding is not None:
            shardings = (self._sharding, self._sharding, jax.tree.map(lambda array: array.sharding, cache))
        return jax.jit(step, donate_argnames=("cache",), out_shardings=shardings).lower(
            self.params,
            cache,
            self._shape(self._geometry.max_rows),
            self._shape(self._geometry.step_layout(num_rows).size),
            self._shape(self._geometry.stops_layout(num_rows).size),
        )

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        return compiled(lowered, self._device)

    def _shape(self, *shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)  # type: ignore[no-untyped-call]


def _rebuild(graph: nnx.GraphDef[Decoder], structure: jax.tree_util.PyTreeDef, params: Params) -> Decoder:
    return nnx.merge(graph, jax.tree.unflatten(structure, params))


def _compute_hidden(
    rebuild: Rebuild,
    attention: AttentionBackend,
    geometry: Geometry,
    num_tokens: int,
    params: Params,
    cache: Cache,
    last_tokens: jax.Array,  # i32 [max_rows]: what the step before sampled
    flat: jax.Array,  # i32: the packed step
) -> tuple[jax.Array, jax.Array, Cache]:
    """Hidden states `[max_rows, hidden]` of the tokens to sample after, their packed parameters, and the new cache."""
    inputs = unpack_step(geometry.step_layout(num_tokens), flat)
    token_ids = jnp.where(inputs.sources >= 0, last_tokens[inputs.sources], inputs.token_ids)
    hidden, cache = rebuild(params)(token_ids, inputs.positions, cache, partial(attention, batch=inputs.ragged))
    padding = ((0, geometry.max_rows - inputs.sampled_tokens.shape[0]), (0, 0))
    return jnp.pad(hidden[inputs.sampled_tokens], padding), jnp.pad(inputs.sampling, padding), cache


def _sample_rows(
    rebuild: Rebuild,
    geometry: Geometry,
    num_rows: int,
    placement: Placement | None,
    params: Params,
    rows: jax.Array,  # [max_rows, hidden]
    sampling: jax.Array,  # i32 [max_rows, words]
    last_tokens: jax.Array,  # i32 [max_rows]
    extended: jax.Array | None,  # i32, packed
    masks: jax.Array | None,  # i32 [num_rows, mask_words]
) -> tuple[jax.Array, Logprobs | None]:
    """Samples the first `num_rows` rows. Tokens are i32 `[max_rows]`, so that the next step has one shape for all."""
    logits = gathered(rebuild(params).logits(rows[:num_rows]), placement)
    is_sound = are_sound(logits)
    if extended is not None and masks is not None:
        logits = extend(logits, unpack_extended(geometry.extended_layout(num_rows), extended, last_tokens))
        logits = jnp.where(bits_of(masks, geometry.vocab_size), logits, NEVER)
    token_ids = sample(logits, unpack_sampling(sampling[:num_rows]), is_sound)
    logprobs = None if extended is None else logprobs_of(logits, token_ids)
    return jnp.pad(token_ids, (0, geometry.max_rows - num_rows)), logprobs


def _decode(
    rebuild: Rebuild,
    attention: AttentionBackend,
    geometry: Geometry,
    num_rows: int,
    num_steps: int,
    placement: Placement | None,
    params: Params,
    cache: Cache,
    last_tokens: jax.Array,
    flat: jax.Array,
    stops: jax.Array,
) -> tuple[jax.Array, jax.Array, Cache]:
    model = rebuild(params)
    return decode_loop(model, attention, geometry, num_rows, num_steps, placement, cache, last_tokens, flat, stops)
