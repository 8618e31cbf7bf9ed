"""How long steps of a planned replica take, from the compiler's output. Nothing here was measured.

A step padded to its bucket takes the longer of its roofline and of the compiler's expected cycles with kernels,
followed by its collectives, as in `roofline.py`:

- Bytes: those of the bucket's backbone and head, counted from their HLO; the pages that kernels move, for the contexts
  of the rows; the experts of a grouped matmul. A chunk of a prompt reads its context once, and writes its tokens. If
  the compiler cannot print a program, reading its weights once stands for the HLO. Rows are sampled with temperature
  and filters, as most checkpoints recommend. Rows in a loop of steps count as greedy ones, except for their exchange
  between devices.
- Cycles: those of the same programs.
- FLOPs: of all tokens and rows of the buckets, padding included, and of the keys that the real tokens see.

The host's share is processor time that `benchmarks.host` found on the machine of docs/performance.md.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.execution.geometry import Geometry
from penstock.engine.models import ModelConfig
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.pace import Pace, StepTimes
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.tools.plan.device.attention_schedule import AttentionSchedule
from penstock.tools.plan.device.kernel_work import KernelWork, Load
from penstock.tools.plan.device.roofline import (
    Programs,
    StepWork,
    attention_flops,
    collective_s,
    expert_load,
    kv_bytes_moved,
    kv_token_bytes,
    logits_s,
    step_flops,
)
from penstock.tools.plan.device.topology import devices_of
from penstock.tools.plan.device.weights import step_weight_bytes
from penstock.tools.plan.plan import Plan
from penstock.tools.plan.replica import Replica
from penstock.tools.plan.step_times import StepShape

HOST_STEP_S, HOST_ROW_S = 60e-6, 6e-6
"""Host time for a step and for each of its rows; half of it before the dispatch, half with the results."""


class PlannedSteps:
    """The `StepTiming` of one replica."""

    def __init__(self, plan: Plan, deployment: Deployment) -> None:
        """Prepares the timing; `deployment` is what `plan` was made from, with all of its buckets."""
        self.geometry: Geometry = deployment.geometry(plan.max_model_len)
        self._deployment, self._chip, self._loop_steps = deployment, plan.chip, plan.decode_steps
        self._model, self._devices = deployment.model, plan.tensor * plan.expert
        self._traffic = {
            (bucket.kind, bucket.size): bucket.full_traffic if bucket.kind == "head" else bucket.traffic
            for bucket in plan.buckets
        }
        self._links = {(bucket.kind, bucket.size): bucket.links for bucket in plan.buckets}
        self._features: Counter[int | None] = Counter()  # of all layers' heads, by the layers' windows
        for attention in self._model.attentions:
            self._features[attention.sliding_window] += attention.num_mixed
        self._token_bytes = kv_token_bytes(self._model, deployment.kv_dtype) // self._devices
        self._key_flops = attention_flops(self._model, 1) / self._devices
        self._schedule = AttentionSchedule(deployment, plan.chip)
        self._padded_flops = lru_cache(maxsize=None)(self._flops)
        self._step_programs = lru_cache(maxsize=None)(self._programs)
        self._experts = lru_cache(maxsize=None)(self._expert_load)
        self._kv_bytes = lru_cache(maxsize=None)(lambda context: kv_bytes_moved(deployment, context))

    def step_s(self, shape: StepShape) -> float:
        num_rows = self.geometry.row_bucket(shape.num_sampled) if shape.num_sampled else 0
        num_tokens = num_rows if shape.num_steps > 1 else self.geometry.token_bucket(shape.num_tokens)
        later = shape.num_steps // 2  # half-way through the steps, contexts are longer by this
        is_loop = shape.num_steps > 1
        chunks = [(start + later, count) for start, count in shape.chunks]
        pages = sum(self._kv_bytes(start) + (count - 1) * self._token_bytes for start, count in chunks)
        flops = self._key_flops * sum(self._mean_keys(*chunk) for chunk in chunks)
        attention = self._schedule.work(chunks, pages, flops)
        links_s = self._waited_s(num_tokens, is_loop)
        if num_rows:
            links_s += logits_s(self._model, num_rows, self._devices, self._chip, is_drawn=True)
        work = StepWork(
            programs=self._step_programs(num_tokens, num_rows, is_loop, shape.num_tokens, shape.num_sampled),
            attention=attention,
            experts=self._experts(num_tokens, shape.num_tokens, is_loop),
            flops=self._padded_flops(num_tokens, num_rows) + attention.flops,
            collective_s=links_s,
        )
        return shape.num_steps * work.time(self._chip).seconds

    def _waited_s(self, num_tokens: int, is_loop: bool) -> float:
        """Returns the wait for a step's collectives; their full time if the program is not known."""
        found = self._links.get(("loop" if is_loop else "backbone", num_tokens))
        if found is None:
            return collective_s(self._model, num_tokens, self._devices, self._chip)
        return found.waited_s / (self._loop_steps if is_loop else 1)

    def plan_s(self, shape: StepShape) -> float:
        return 0.5 * (HOST_STEP_S + HOST_ROW_S * len(shape.chunks))

    def commit_s(self, shape: StepShape) -> float:
        return 0.5 * (HOST_STEP_S + HOST_ROW_S * len(shape.chunks)) * shape.num_steps

    def pace(self, config: EngineConfig) -> Pace:
        """Returns what the warm-up of such a replica would find."""
        geometry = self.geometry
        prompt_s = {size: self.step_s(StepShape(((0, size),), 1)) for size in geometry.token_buckets}
        decode_s = {size: self.step_s(StepShape(((1, 1),) * size, size)) for size in geometry.row_buckets}
        count = geometry.token_buckets[0]
        context = max(1, geometry.max_model_len - count)
        longer_s = self.step_s(StepShape(((context, count),), 1)) - prompt_s[count]
        times = StepTimes(prompt_s, decode_s, max(0.0, longer_s) / (count * context))
        loops = dict.fromkeys(geometry.row_buckets, self._loop_steps) if self._loop_steps > 1 else {}
        return Pace(times, config.prefill_share, loops)

    def _programs(self, num_tokens: int, num_rows: int, is_loop: bool, num_computed: int, num_sampled: int) -> Programs:
        """Returns the programs of a step of so many tokens and rows, of which the last two are not padding."""
        weight_bytes = step_weight_bytes(self._model, num_tokens, self._deployment.placement)
        load = Load(num_computed, num_sampled, is_drawn=not is_loop)
        if is_loop:
            return Programs.of([self._traffic["loop", num_rows]], weight_bytes, self._chip, load, self._loop_steps)
        sizes = [("backbone", num_tokens), *([("head", num_rows)] if num_rows else [])]
        return Programs.of([self._traffic[size] for size in sizes], weight_bytes, self._chip, load)

    def _expert_load(self, size: int, num_tokens: int, is_loop: bool) -> KernelWork:
        """Returns the load of `num_tokens` tokens in a step of `size`."""
        traffic = self._traffic["loop" if is_loop else "backbone", size]
        return expert_load(self._deployment, self._chip, num_tokens, traffic, self._loop_steps if is_loop else 1)

    def _flops(self, num_tokens: int, num_rows: int) -> float:
        return step_flops(self._model, num_tokens, num_rows, 0) / self._devices

    def _mean_keys(self, start: int, count: int) -> float:
        """Returns the mean of keys that a chunk's tokens see, themselves included, over all layers' head features."""
        total = sum(features * keys_seen(window, start, count) for window, features in self._features.items())
        return total / self._features.total()


def planned_replicas(plan: Plan, model: ModelConfig, config: EngineConfig, slices: int = 1) -> list[Replica]:
    """Returns the replicas of `slices` slices of `plan`, which was made from this model and these settings."""
    deployment = deploy(config, model, devices_of(plan.topology))
    timing = PlannedSteps(plan, deployment)
    pace = timing.pace(config)
    return [_replica(plan, deployment, timing, pace) for _ in range(slices * plan.replicas)]


def _replica(plan: Plan, deployment: Deployment, timing: PlannedSteps, pace: Pace) -> Replica:
    config = deployment.config
    scheduler = Scheduler(
        PagePool(
            plan.pages.counts,
            plan.page_size,
            windows=plan.needs.windows,
            kinds=plan.needs.kinds,
            prefix_caching=config.prefix_caching,
            num_states=plan.num_states,
            state_interval=plan.state_interval,
        ),
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        max_model_len=plan.max_model_len,
        max_rows=timing.geometry.max_rows,
        length_rule=deployment.length_rule,
    )
    return Replica(scheduler, pace, timing, config.max_num_seqs)


def keys_seen(window: int | None, start: int, count: int) -> int:
    """Returns the keys seen by tokens `[start, start + count)` in a layer with that window."""
    if window is None:
        return count * start + count * (count + 1) // 2
    short = min(count, max(0, window - start))  # tokens that see less than a full window
    return short * start + short * (short + 1) // 2 + (count - short) * window
