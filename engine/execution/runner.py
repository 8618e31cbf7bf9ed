"""Runs packed steps on the device. Holds the weights, the KV cache and the compiled steps; knows no policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from penstock.engine.attention import AttentionBackend, CacheSpec
from penstock.engine.execution.compilation import CompileWatch
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.huge_pages import HugePages
from penstock.engine.execution.kept_steps import KeptSteps
from penstock.engine.execution.packing import Batch
from penstock.engine.execution.sampling.logprobs import Logprobs
from penstock.engine.execution.sampling.options import neutral_options
from penstock.engine.execution.sampling.sampling_state import sampling_state
from penstock.engine.execution.state_cache import init_states, state_arrays
from penstock.engine.execution.steps import Step, Steps
from penstock.engine.models import Decoder
from penstock.engine.processors import num_processors
from penstock.engine.progress import ReportProgress
from penstock.engine.sharding.placement import Placement


class InFlight:
    """A dispatched step, or several decode steps, whose tokens are being copied to the host."""

    def __init__(self, tokens: jax.Array | None, logprobs: Logprobs | None, num_rows: int, marker: jax.Array) -> None:
        self._tokens = tokens
        self._logprobs = logprobs
        self._num_rows = num_rows
        self._marker = marker  # an output of the step, to wait for if it samples nothing
        for array in jax.tree.leaves((tokens, logprobs)):
            array.copy_to_host_async()

    def token_ids(self) -> list[list[int]]:
        """Waits for the step; returns the token of each sampled row, for each of its steps.

        Raises what failed on the device.
        """
        if self._tokens is None:
            self._marker.block_until_ready()
            return [[]]
        ids: list[list[int]] = np.atleast_2d(np.asarray(self._tokens))[:, : self._num_rows].tolist()
        return ids

    def logprobs(self) -> list[Logprobs] | None:
        """Returns numpy arrays for each of its steps, one row per sampled row; None if no row asked for any."""
        if self._tokens is None or self._logprobs is None:
            return None
        arrays: Logprobs = jax.tree.map(np.asarray, self._logprobs)
        if self._tokens.ndim == 1:
            return [arrays]
        return [jax.tree.map(itemgetter(step), arrays) for step in range(len(self._tokens))]


@dataclass(frozen=True, slots=True)
class Started:
    """A step whose backbone is dispatched and which has not sampled yet."""

    batch: Batch
    rows: jax.Array  # [max_rows, hidden]
    sampling: jax.Array  # i32 [max_rows, words]


class Runner:
    """A model, its caches of pages and states, and one compiled function per shape.

    A step is two calls: the backbone, compiled per token bucket, and the head with the sampler, compiled per bucket of
    sampled rows. So the number of compilations is the sum of the buckets, not the product.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        spec: CacheSpec,
        geometry: Geometry,
        placement: Placement | None = None,  # None: everything on the default device
        kept: KeptSteps | None = None,  # None: steps are compiled and not kept
    ) -> None:
        self._steps = Steps(model, attention, geometry, placement)
        self._kept = kept or KeptSteps(None)
        self._params = self._steps.params
        self._placement = placement
        self._attention = attention
        self._spec = spec
        self._geometry = geometry
        self._state_arrays = state_arrays(model.config, spec.num_states, is_stacked=model.is_stacked)
        self._backbones: dict[int, Any] = {}  # compiled, by token bucket
        self._heads: dict[tuple[int, bool], Any] = {}  # compiled, by (row bucket, extended)
        self._fills: list[Any] = []  # compiled: one, or none yet
        self._loops: dict[tuple[int, int], Any] = {}  # compiled, by (row bucket, steps)
        self._neutral_options: dict[int, jax.Array] = {}  # by row bucket, like the masks
        self._open_masks: dict[int, jax.Array] = {}
        self._counts: dict[int, jax.Array] = {}  # by number
        self._watch = CompileWatch()
        self._huge_pages = HugePages()
        self._empty_cache()

    @property
    def compiles_after_warmup(self) -> int:
        """Number of compilations of anything in this process since `start_watch`."""
        return self._watch.count

    def reset_cache(self) -> None:
        """Starts over with an empty cache, after a failure that may have lost the old one."""
        self._empty_cache()
        self._huge_pages.hold(jax.tree.leaves(self._cache))

    def _empty_cache(self) -> None:
        pages = chain.from_iterable(map(self._attention.init_cache, self._spec.kinds))
        self._cache = (*pages, *init_states(self._state_arrays, self._placement))
        self._last_tokens = self._zeros((self._geometry.max_rows,), np.dtype(np.int32))
        self._state = sampling_state(self._geometry, self._zeros)

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def compile_steps(self, progress: ReportProgress | None = None) -> None:
        """Compiles every step, several at a time where that is safe."""
        geometry = self._geometry
        jobs: dict[str, Callable[[], Any]] = {
            f"{num_tokens} tokens": partial(self._backbone, num_tokens) for num_tokens in geometry.token_buckets
        }
        for extended in (False, True):
            for num_rows in geometry.extended_row_buckets if extended else geometry.row_buckets:
                name = f"{num_rows} sampled rows{', all options' if extended else ''}"
                jobs[name] = partial(self._head, num_rows, extended)
        jobs["sampling state"] = self._fill
        self._run_side_by_side(jobs, progress)

    def move_to_huge_pages(self, *, wait: bool) -> None:
        """Begins to move weights and KV cache; `wait` where timings that follow must be representative.

        It comes after `compile_steps`, as loading a program waits for a kernel that moves pages.
        """
        self._huge_pages.hold((*self._params, *jax.tree.leaves(self._cache)))
        if wait:
            self._huge_pages.wait()

    def compile_loops(self, steps_by_rows: Mapping[int, int], progress: ReportProgress | None = None) -> None:
        """Compiles dispatches of several decode steps."""
        jobs = {f"{n} rows, {steps} steps": partial(self._loop, n, steps) for n, steps in steps_by_rows.items()}
        self._run_side_by_side(jobs, progress)

    def _run_side_by_side(self, jobs: Mapping[str, Callable[[], Any]], progress: ReportProgress | None) -> None:
        """Runs jobs on threads: compiling releases Python's GIL most of the time.

        TPUs get one thread: libtpu has crashed when two compiled at once.
        """
        with ThreadPoolExecutor(1 if self._steps.devices[0].platform == "tpu" else num_processors()) as threads:
            running = {threads.submit(job): name for name, job in jobs.items()}
            for done, future in enumerate(as_completed(running)):
                future.result()
                if progress:
                    progress(done + 1, len(jobs), running[future])

    def start_watch(self) -> None:
        """Counts every compilation from here on."""
        self._watch.start()

    def dispatch(self, batch: Batch) -> InFlight:
        """Starts a step and returns at once. Steps run on the device in the order of these calls."""
        if batch.stops is not None:
            return self._run_loop(batch, batch.stops)
        return self.finish(self.start(batch))

    def start(self, batch: Batch) -> Started:
        """Runs the first half of a step, up to the hidden states of the rows to sample; `finish` must follow.

        Sampling may depend on tokens of the step before, which the host reads in between.
        """
        run = self._backbone(batch.num_tokens)
        rows, sampling, self._cache = run(self._params, self._cache, self._last_tokens, batch.flat)
        self._fill_slots(batch)
        return Started(batch, rows, sampling)

    def finish(self, started: Started, masks: np.ndarray | None = None) -> InFlight:
        """Runs the second half of a step: sampling.

        `masks` are i32 `[rows that sample, mask_words]`; their bits say which tokens a row may draw. A row without a
        constraint has all ones, which is -1.
        """
        batch = started.batch
        if not batch.num_sampled:
            return InFlight(None, None, 0, started.rows)
        if batch.options is None and masks is None:
            head = self._head(batch.num_rows, False)
            self._last_tokens = head(
                self._steps.head_params, started.rows, started.sampling, self._count(batch.num_sampled)
            )
            return InFlight(self._last_tokens, None, batch.num_sampled, started.rows)
        num_rows = self._geometry.row_bucket(batch.num_sampled, extended=True)
        head = self._head(num_rows, True)
        self._last_tokens, logprobs, self._state = head(
            self._steps.head_params,
            started.rows,
            started.sampling,
            self._count(batch.num_sampled),
            self._state,
            self._neutral(num_rows) if batch.options is None else batch.options.flat,
            self._masks(num_rows, batch, masks),
        )
        return InFlight(self._last_tokens, _asked_for(logprobs, batch), batch.num_sampled, started.rows)

    def compile_backbone(self, num_tokens: int) -> jax.stages.Compiled:
        """Returns the compiled step of a token bucket, also for inspection."""
        return self._compiled(self._steps.backbone(num_tokens, self._cache))

    def _backbone(self, num_tokens: int) -> Any:
        if num_tokens not in self._backbones:
            self._backbones[num_tokens] = self.compile_backbone(num_tokens)
        return self._backbones[num_tokens]

    def _head(self, num_rows: int, extended: bool) -> Any:
        if (num_rows, extended) not in self._heads:
            self._heads[num_rows, extended] = self._compiled(self._steps.head(num_rows, is_extended=extended))
        return self._heads[num_rows, extended]

    def _loop(self, num_rows: int, num_steps: int) -> Any:
        if (num_rows, num_steps) not in self._loops:
            self._loops[num_rows, num_steps] = self._compiled(self._steps.loop(num_rows, num_steps, self._cache))
        return self._loops[num_rows, num_steps]

    def _fill(self) -> Any:
        if not self._fills:
            self._fills.append(self._compiled(self._steps.fill()))
        return self._fills[0]

    def _compiled(self, step: Step) -> jax.stages.Compiled:
        return self._kept.compiled(self._steps, step)

    def _fill_slots(self, batch: Batch) -> None:
        for fill in batch.options.fills if batch.options is not None else ():
            self._state = self._fill()(self._state, fill.slot, fill.tokens, fill.bias)

    def _run_loop(self, batch: Batch, stops: np.ndarray) -> InFlight:
        num_rows = batch.num_tokens
        run = self._loop(num_rows, batch.num_steps)
        self._fill_slots(batch)
        options = self._neutral(num_rows) if batch.options is None else batch.options.flat
        tokens, logprobs, self._last_tokens, self._cache, self._state = run(
            self._params, self._cache, self._state, self._last_tokens, batch.flat, stops, options
        )
        return InFlight(tokens, _asked_for(logprobs, batch), batch.num_sampled, tokens)

    def _count(self, number: int) -> jax.Array:
        """Returns a number of rows as an array on the device, where it is kept: i32 `[1]`."""
        if number not in self._counts:
            self._counts[number] = self._put(np.array([number], np.int32))
        return self._counts[number]

    def _neutral(self, num_rows: int) -> jax.Array:
        if num_rows not in self._neutral_options:
            self._neutral_options[num_rows] = self._put(neutral_options(self._geometry, num_rows)[0])
        return self._neutral_options[num_rows]

    def _masks(self, num_rows: int, batch: Batch, masks: np.ndarray | None) -> jax.Array | np.ndarray:
        """Pads masks with rows that may draw everything. Masks without any constraint are kept on the device."""
        shape = (num_rows, self._geometry.mask_words)
        if masks is not None:
            padded = np.full(shape, -1, np.int32)
            padded[list(batch.places)] = masks
            return padded
        if num_rows not in self._open_masks:
            self._open_masks[num_rows] = self._put(np.full(shape, -1, np.int32))
        return self._open_masks[num_rows]

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
        return self._put(np.zeros(shape, dtype))

    def _put(self, values: np.ndarray) -> jax.Array:
        array: jax.Array = jax.device_put(values, None if self._placement is None else self._placement.sharding())
        return array


def _asked_for(logprobs: Logprobs, batch: Batch) -> Logprobs | None:
    return logprobs if batch.options is not None and batch.options.has_logprobs else None
