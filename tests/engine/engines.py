"""Tiny engines for tests, and a loop that drives them while it checks every invariant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine import Engine, EngineConfig, EngineDriver, Output, Request, TokenLogprob
from penstock.engine.models import FAMILIES
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level

VOCAB_SIZE = 272  # the byte-level test tokenizer has 267; models pad theirs
EOS = 264  # <|end|>
SMALL = EngineConfig(max_num_seqs=4, max_batch_tokens=16, page_size=4, num_pages=64, max_model_len=96, decode_steps=1)

TINY = FAMILIES["qwen3"].config(
    {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 120,
        "tie_word_embeddings": True,
    },
    "float32",
)
"""A model for tests that need no checkpoint."""


def write_model(directory: Path, family: str = "qwen3", **config: Any) -> Path:
    """Writes a checkpoint with weights, tokenizer and chat template."""
    from tests.engine.checkpoints import write_checkpoint  # imports torch, which processes of tests are started without

    defaults: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "bos_token_id": None}
    if family == "qwen3":
        defaults["head_dim"] = 16
    write_checkpoint(directory, family, **{**defaults, **config})
    byte_level(chat_template=CHAT_TEMPLATE).save_pretrained(directory)
    return directory


@dataclass
class Result:
    """All outputs of one choice, joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached: int = 0

    def take(self, output: Output, first_offset: int) -> None:
        assert self.finish_reason is None, "an output after the end"
        assert output.offset == first_offset + len(self.token_ids)
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs or ()
        self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error
        self.num_cached = output.num_cached_tokens


Results = dict[tuple[str, int], Result]


def drive(
    engine: Engine,
    requests: Iterable[Request],
    *,
    before_step: Callable[[int], None] = lambda step: None,
    limit: int = 20_000,
) -> Results:
    """Runs `requests` to their ends; returns results by (id, index)."""
    starts: dict[tuple[str, int], int] = {}
    results: Results = {}
    for request in requests:
        engine.add(request)
        for index in range(request.n):
            starts[request.id, index] = len(request.generated[index]) if request.generated else 0
            results[request.id, index] = Result()
    for step in range(limit):
        if not engine.has_work():
            assert all(result.finish_reason for result in results.values())
            return results
        before_step(step)
        for output in engine.step():
            key = (output.request_id, output.index)
            results[key].take(output, starts[key])
        engine._scheduler.check()
    raise AssertionError(f"not done after {limit} steps")


def forget_prefixes(engine: Engine) -> None:
    """Empties the prefix cache, so that the next prompt is computed."""
    engine._pool.forget_contents()


def preempt_all(engine: Engine, chosen: Callable[[], bool] = lambda: True) -> None:
    """Preempts the running sequences, or those that `chosen` is true for, as a shortage of pages would."""
    for sequence in engine._scheduler.running:
        if chosen():
            engine._scheduler._preempt(sequence)


def all_pages_are_free(engine: Engine) -> bool:
    """Checks that no sequence holds a page; the prefix cache may."""
    stats = engine.stats()
    return stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def preempting(engine: Engine, every: int) -> Callable[[int], None]:
    """Returns a `before_step` for `drive` that preempts the last running sequence once in `every` steps."""

    def before_step(step: int) -> None:
        if step % every == every - 1 and engine._scheduler.running:
            engine._scheduler._preempt(engine._scheduler.running[-1])

    return before_step


async def outputs_of(driver: EngineDriver, request: Request) -> AsyncIterator[Output]:
    """Runs one request to its end; closing this early releases it."""
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    driver.submit(request, outputs.put_nowait)
    num_unfinished = request.n
    try:
        while num_unfinished:
            output = await outputs.get()
            num_unfinished -= output.finish_reason is not None
            yield output
    finally:
        if num_unfinished:
            driver.forget(request.id)
