"""The real engine on a device that only takes time, like an accelerator that shares no processor with the host."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.host import small_model, word_tokenizer
from penstock.engine import Engine, EngineConfig
from penstock.engine.deployment.deployment import deploy
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.packing import Batch
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.loading.checkpoint import random_model
from penstock.engine.scheduling.pace import Pace, StepTimes

PAGE_SIZE = 32
_UNEVEN = 0.1  # a step takes up to this share longer


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds of a step: a constant, per token of its bucket and per row of the head's."""

    base_s: float = 8e-3
    token_s: float = 0.15e-3
    row_s: float = 0.02e-3

    def step_s(self, num_tokens: int, num_rows: int) -> float:
        return self.base_s + self.token_s * num_tokens + self.row_s * num_rows


class PacedStep:
    """A step whose tokens are ready at a certain time."""

    def __init__(self, num_sampled: int, ready_s: float) -> None:
        self._tokens, self._ready_s = [[7] * num_sampled], ready_s

    def token_ids(self) -> list[list[int]]:
        time.sleep(max(0.0, self._ready_s - time.monotonic()))
        return self._tokens

    def logprobs(self) -> None:
        return None


class PacedRunner:
    """Stands in for the device: steps run one after the other, in the order of their dispatches."""

    compiles_after_warmup = 0

    def __init__(self, geometry: Geometry, device: Device) -> None:
        self.geometry = geometry
        self.slowness = 1.0  # factor by which steps take longer than expected
        self._device = device
        self._free_s = 0.0
        self._random = np.random.default_rng(0)

    def dispatch(self, batch: Batch) -> Any:
        step_s = self._device.step_s(batch.num_tokens, batch.num_rows) * (1 + _UNEVEN * self._random.random())
        step_s *= self.slowness
        self._free_s = max(self._free_s, time.monotonic()) + step_s
        return PacedStep(batch.num_sampled, self._free_s)


def paced_engine(
    max_num_seqs: int,
    max_batch_tokens: int,
    device: Device | None = None,
    *,
    max_model_len: int = 1024,
    num_pages: int | None = None,  # including page 0; None: enough for all sequences, without caching prefixes
) -> Engine:
    """Makes an engine as if warmed up, without speculation. Its runner is a `PacedRunner`."""
    device = device or Device()
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        page_size=PAGE_SIZE,
        num_pages=num_pages or max_num_seqs * max_model_len // PAGE_SIZE + 1,
        max_model_len=max_model_len,
        prefix_caching=num_pages is not None,
        speculation="off",
        decode_steps=1,
        attention="xla",
        matmul="xla",
    )
    deployment = deploy(config, small_model(max_model_len))
    vocab_size = deployment.model.vocab_size
    model = random_model(deployment.model, 0)
    engine = Engine(model, word_tokenizer(vocab_size), GenerationDefaults((0,)), deployment)
    geometry = engine._runner.geometry  # noqa: SLF001
    engine._runner = PacedRunner(geometry, device)  # type: ignore[assignment]  # noqa: SLF001
    prompt_s = {size: device.step_s(size, 16) for size in geometry.token_buckets}
    decode_s = {size: device.step_s(size, size) for size in geometry.row_buckets}
    engine._pace = Pace(StepTimes(prompt_s, decode_s), config.prefill_share)  # noqa: SLF001
    return engine
