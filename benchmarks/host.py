"""Measures the host's part of a step: planning, packing, committing and detokenising, with a device that takes no time.

    python -m benchmarks.host

Every sequence decodes one token per step. Time is the engine thread's CPU time, so a busy machine distorts it little.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.parts.tables import RESULTS
from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.deployment.deployment import deploy
from penstock.engine.execution.packing import Batch
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.loading.checkpoint import random_model
from penstock.engine.models import FAMILIES, ModelConfig
from penstock.engine.text.tokenizer import Tokenizer
from penstock.tools.bench.report import append_result

VOCAB_SIZE = 1000


class InstantStep:
    """A step whose tokens are ready at once."""

    def __init__(self, num_sampled: int) -> None:
        self._tokens = [[7] * num_sampled]

    def token_ids(self) -> list[list[int]]:
        return self._tokens

    def logprobs(self) -> None:
        return None


class InstantRunner:
    compiles_after_warmup = 0

    def dispatch(self, batch: Batch) -> Any:
        return InstantStep(batch.num_sampled)


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """Makes a tokenizer with one word per token: text has its cost here, whatever it says."""
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def small_model(max_position: int) -> ModelConfig:
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": max_position,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return FAMILIES["qwen3"].config(fields, "float32")


def step_ms(num_seqs: int, num_prompt: int, steps: int) -> float:
    """Returns CPU ms of a decode step of `num_seqs` sequences after prompts of `num_prompt` tokens."""
    max_len = num_prompt + steps + 40
    config = EngineConfig(
        max_num_seqs=num_seqs,
        max_batch_tokens=8192,
        page_size=64,
        num_pages=num_seqs * (max_len // 64 + 2) + 1,
        max_model_len=max_len,
        prefix_caching=False,
        attention="xla",
    )
    deployment = deploy(config, small_model(max_len))
    model = random_model(deployment.model, 0)
    engine = Engine(model, word_tokenizer(VOCAB_SIZE), GenerationDefaults((0,)), deployment)
    engine._runner = InstantRunner()  # type: ignore[assignment]  # noqa: SLF001
    for i in range(num_seqs):
        engine.add(Request(str(i), (5,) * num_prompt, SamplingParams(max_tokens=steps + 30)))
    while engine.stats().generated_tokens_total < 2 * num_seqs:
        engine.step()
    start = time.thread_time()
    for _ in range(steps):
        engine.step()
    return 1e3 * (time.thread_time() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    prompts = (16, 512, 8192)
    table = Table("sequences", *(f"prompt {num_prompt}" for num_prompt in prompts), title="host CPU ms per step")
    rows = []
    for num_seqs in (1, 16, 64, 256, 1024):
        found = [
            round(step_ms(num_seqs, num_prompt, arguments.steps), 3) if num_seqs * num_prompt <= 1_100_000 else None
            for num_prompt in prompts
        ]
        table.add_row(str(num_seqs), *("-" if value is None else f"{value:.2f}" for value in found))
        rows.append({"sequences": num_seqs, **{str(n): value for n, value in zip(prompts, found, strict=True)}})
    Console().print(table)
    append_result(RESULTS / "host.jsonl", {"title": "host CPU ms per step, by prompt tokens", "rows": rows})


if __name__ == "__main__":
    main()
