"""Measures prompt lookup end to end on a model that copies its prompt, with one edit.

    python -m benchmarks.copying

Trains a model of 10 million parameters first, for some minutes, and keeps it under `.cache/copying`. A prompt is two
words and a text of random words; the reply is the text with one word replaced by the other. Each round runs all prompts
one after the other on an engine without speculation, then on the same engine with it; the ratio is the median of the
rounds' times. Appends one JSON line to `benchmarks/results/copying.jsonl`.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from benchmarks.engine import COMPILE_CACHE
from benchmarks.parts.tables import RESULTS
from examples.demo_model.attention import PackedAttention
from examples.demo_model.config import CONFIG_JSON, QWEN3
from examples.demo_model.export import export
from examples.demo_model.tokenizer import END, build
from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.models.decoder import Decoder
from penstock.engine.speculation.drafter import Drafter
from penstock.engine.speculation.ngrams import NgramDrafter
from penstock.tools.bench.report import append_result

FOLDER = Path(".cache/copying")
SIZES = {**CONFIG_JSON, "hidden_size": 384, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 6}
MODEL = QWEN3.config(SIZES, "float32")
WORDS, SEPARATOR = range(16, 80), 8  # token ids
ROWS, LENGTH = 16, 96  # in each batch, and in every text, in words: copying over a single distance is learnt in minutes


def example(numbers: Random) -> tuple[list[int], list[int]]:
    """Draws a prompt, and the reply to it without its end."""
    words = numbers.choices(WORDS, k=LENGTH)
    old, new = numbers.choice(words), numbers.choice(WORDS)
    return [old, new, SEPARATOR, *words, SEPARATOR], [new if word == old else word for word in words]


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws token ids and targets, i32 `[ROWS, 2 * LENGTH + 4]`; only targets of replies count."""
    numbers = Random(step)
    tokens = np.zeros((ROWS, 2 * LENGTH + 5), np.int32)
    for row in range(ROWS):
        prompt, reply = example(numbers)
        tokens[row] = [*prompt, *reply, END]
    targets = tokens[:, 1:].copy()
    targets[:, : len(prompt) - 1] = -1
    return tokens[:, :-1], targets


def loss_of(graph: Any, params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    model = nnx.merge(graph, params)
    attend = PackedAttention((jnp.zeros_like(tokens),))
    positions = jnp.tile(jnp.arange(tokens.shape[1]), len(tokens))
    hidden, _ = model(tokens.reshape(-1), positions, (None,) * MODEL.num_layers, attend)
    wanted = targets.reshape(-1)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), jnp.maximum(wanted, 0))
    return jnp.sum(losses * (wanted >= 0)) / jnp.sum(wanted >= 0)


def train(num_steps: int, folder: Path) -> None:
    graph, params = nnx.split(Decoder(MODEL, rngs=nnx.Rngs(0)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.5e-3, 50, num_steps, 3e-5)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def advance(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(partial(loss_of, graph))(params, tokens, targets)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    console = Console()
    for step in range(num_steps):
        params, state, loss = advance(params, state, *batch(step))
        if step % 25 == 24:
            console.print(f"step {step + 1} of {num_steps}: loss {float(loss):.4f}", highlight=False)
    export(nnx.merge(graph, params), build(), folder, SIZES)


def run(engine: Engine, drafter: Drafter | None, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Runs all requests in turn; returns seconds and replies."""
    engine.speculate(drafter)
    replies: list[list[int]] = []
    start = time.perf_counter()
    for request in requests:
        engine.add(request)
        replies.append([])
        while engine.has_work():
            for output in engine.step():
                replies[-1] += output.token_ids
    return time.perf_counter() - start, replies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training-steps", type=int, default=200)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    arguments = parser.parse_args()
    if not (FOLDER / "config.json").exists():
        train(arguments.training_steps, FOLDER)
    settings = EngineConfig(dtype=arguments.dtype, prefix_caching=False, compile_cache_dir=COMPILE_CACHE)
    engine = Engine.from_checkpoint(FOLDER, settings)
    engine.warm_up()
    engine.settle()
    examples = [example(Random(-1 - number)) for number in range(arguments.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=2 * LENGTH)
    requests = [Request(f"r{number}", tuple(prompt), params) for number, (prompt, _) in enumerate(examples)]
    ratios = []
    for _ in range(arguments.rounds):
        plain_s, plain = run(engine, None, requests)
        before = engine.stats()
        seconds, replies = run(engine, NgramDrafter(), requests)
        after = engine.stats()
        if replies != plain:
            raise AssertionError("other tokens than without speculation")
        ratios.append(plain_s / seconds)
    right = sum(
        word == other
        for reply, (_, wanted) in zip(plain, examples, strict=True)
        for word, other in zip(reply, wanted, strict=False)
    )
    drafted = after.drafted_tokens_total - before.drafted_tokens_total
    accepted = after.accepted_tokens_total - before.accepted_tokens_total
    Console().print(
        f"{right} of {LENGTH * len(examples)} words right; {accepted} of {drafted} drafted tokens were right in "
        f"{sum(map(len, plain))}; {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    append_result(RESULTS / "copying.jsonl", {"arguments": vars(arguments), "ratios": ratios, "right": right})


if __name__ == "__main__":
    main()
