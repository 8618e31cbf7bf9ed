"""The real engine on a device that only takes time, as an accelerator does that shares no processor with the host."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.host import small_model, word_tokenizer
from penstock.engine import Engine, EngineConfig
from penstock.engine.deployment import deploy
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.packing import Batch
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.loading.checkpoint import random_model
from penstock.engine.scheduling.pace import Pace, StepTimes

STEP_S, TOKEN_S, ROW_S = 8e-3, 0.15e-3, 0.02e-3
"""Of a step, of each token of its bucket and of each row of the head's."""
_UNEVEN = 0.1  # a step takes up to so much longer
_MAX_LEN = 1024


class PacedStep:
    """A step whose tokens are there at a certain time."""

    def __init__(self, num_sampled: int, ready_s: float) -> None:
        self._tokens, self._ready_s = [[7] * num_sampled], ready_s

    def token_ids(self) -> list[list[int]]:
        time.sleep(max(0.0, self._ready_s - time.monotonic()))
        return self._tokens

    def logprobs(self) -> None:
        return None


class PacedRunner:
    """Stands for the device: steps run one after the other, in the order of their dispatches."""

    compiles_after_warmup = 0

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._free_s = 0.0
        self._random = np.random.default_rng(0)

    def dispatch(self, batch: Batch) -> Any:
        step_s = _step_s(batch.num_tokens, batch.num_rows) * (1 + _UNEVEN * self._random.random())
        self._free_s = max(self._free_s, time.monotonic()) + step_s
        return PacedStep(batch.num_sampled, self._free_s)


def paced_engine(max_num_seqs: int, max_batch_tokens: int) -> Engine:
    """Warmed up, as it were; nobody speculates."""
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        page_size=32,
        num_pages=max_num_seqs * _MAX_LEN // 32 + 1,
        max_model_len=_MAX_LEN,
        prefix_caching=False,
        speculation="off",
        decode_steps=1,
        attention="xla",
        matmul="xla",
    )
    deployment = deploy(config, small_model(_MAX_LEN))
    vocab_size = deployment.model.vocab_size
    model = random_model(deployment.model, 0)
    engine = Engine(model, word_tokenizer(vocab_size), GenerationDefaults((0,)), deployment)
    geometry = engine._runner.geometry  # noqa: SLF001
    engine._runner = PacedRunner(geometry)  # type: ignore[assignment]  # noqa: SLF001
    prompt_s = {size: _step_s(size, 16) for size in geometry.token_buckets}
    decode_s = {size: _step_s(size, size) for size in geometry.row_buckets}
    engine._pace = Pace(StepTimes(prompt_s, decode_s), config.prefill_share)  # noqa: SLF001
    return engine


def _step_s(num_tokens: int, num_rows: int) -> float:
    return STEP_S + TOKEN_S * num_tokens + ROW_S * num_rows
