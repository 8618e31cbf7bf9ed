"""Measures how much of a GPU the engine's steps use, against what the same card was just measured to do.

    python -m benchmarks.gpu          # Llama-3.1-8B's geometry in bf16, random weights
    python -m benchmarks.gpu peers    # the engine beside transformers' continuous batching, on the shared workload

The first measures how fast the card copies and how fast it multiplies in bf16, then whole steps of the engine's runner,
the head and greedy sampling included, dispatched as in the engine: the next before the last one's tokens are read.

- decode: weights and live KV over the time of a step, as a share of the copy rate; the bar is 0.80.
- prefill: FLOPs over the time of a step, as a share of the card's matmul rate; the bar is 0.60.

Prints a table and appends a line to `benchmarks/results/gpu.jsonl`; the second, to `peers.jsonl`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.parts.tables import RESULTS
from penstock.engine.attention import CacheSpec
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.packing import Batch
from penstock.engine.execution.runner import InFlight, Runner
from penstock.engine.loading.checkpoint import random_model
from penstock.engine.models import FAMILIES, ModelConfig
from penstock.engine.scheduling.memory.amounts import Amount
from penstock.installed import how_to_install
from penstock.tools.bench.report import append_result
from penstock.tools.plan import preset
from penstock.tools.plan.device.roofline import kv_token_bytes, step_flops
from penstock.tools.plan.device.weights import step_weight_bytes

RESULT = RESULTS / "gpu.jsonl"
NANO = "nano"
NANO_FIELDS = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
DECODE_BAR, PREFILL_BAR = 0.80, 0.60
_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Card:
    """Measured rates of a card."""

    copy_bytes_per_s: float  # read and written
    bf16_flops_per_s: float


@dataclass(frozen=True, slots=True)
class Figure:
    """Figures of one kind of step."""

    step: str  # decode or prefill
    sequences: int
    tokens: int  # in the step
    context: int  # tokens of each sequence, including those of the step
    step_ms: float
    rate: float  # bytes or FLOPs per second
    share: float  # of the card's rate
    bar: float


def main() -> None:
    arguments = parse_arguments()
    if arguments.part == "peers":
        run_peers(arguments)
        return
    refuse_without_gpu(jax.default_backend(), arguments)
    model = model_of(arguments.model, arguments.layers)
    card = measure_card(arguments.copy_mib, arguments.matmul, arguments.repeats)
    figures = measure_steps(
        model, card, arguments.batches, arguments.context, arguments.prompts, arguments.steps, arguments.repeats
    )
    Console().print(table(f"{arguments.model}, {jax.devices()[0].device_kind}", card, figures))
    record = {
        "options": {name: value for name, value in vars(arguments).items() if name != "results"},
        "device": describe_device(),
        "card": asdict(card),
        "rows": [asdict(figure) for figure in figures],
    }
    append_result(arguments.results, record)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["steps", "peers"], default="steps")
    parser.add_argument("--model", default="Llama-3.1-8B", help=f"a preset of `penstock plan`, or {NANO}")
    parser.add_argument("--layers", type=int, help="of them, for a card too small for all; shares hardly change")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64], help="sequences that decode")
    parser.add_argument("--context", type=int, default=1024, help="tokens that each of them has")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048], help="tokens of the step that prefills")
    parser.add_argument("--steps", type=int, default=50, help="timed together")
    parser.add_argument("--repeats", type=int, default=5, help="of all timings; the median counts")
    parser.add_argument("--copy-mib", type=int, default=4096, help="of the array that is copied")
    parser.add_argument("--matmul", type=int, default=8192, help="rows and columns of the matrices")
    parser.add_argument("--results", type=Path, default=RESULT)
    parser.add_argument("--any-device", action="store_true", help="to try this benchmark out: its figures mean nothing")
    return parser.parse_args()


def refuse_without_gpu(backend: str, arguments: argparse.Namespace) -> None:
    if backend != "gpu" and not arguments.any_device:
        raise SystemExit(
            f"this measures a GPU, and jax has a {backend} here: {how_to_install('worker,cuda')} on a machine "
            "with one (--any-device tries the benchmark out, with --model nano)"
        )


def model_of(name: str, num_layers: int | None) -> ModelConfig:
    model = FAMILIES["qwen3"].config(NANO_FIELDS, "bfloat16") if name == NANO else preset(name)
    if model is None:
        raise SystemExit(f"--model {name} is not a preset of `penstock plan`, and not {NANO}")
    return model if num_layers is None else model.first_layers(num_layers)


def describe_device() -> dict[str, Any]:
    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    return {
        "kind": device.device_kind,
        "platform": device.client.platform_version,
        "memory_bytes": memory.get("bytes_limit"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def measure_card(copy_mib: int, size: int, repeats: int) -> Card:
    """Times copies of a large array, and matmuls of large square matrices."""
    words = jnp.zeros(copy_mib * 2**18, jnp.uint32)
    change = jax.jit(lambda x: x ^ 1)  # not a plain copy, which XLA may leave out
    copy_s = median_s(lambda: change(words), 10, repeats)
    num_bytes = 2 * words.nbytes
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    multiply = jax.jit(lambda a, b: a @ b)
    multiply_s = median_s(lambda: multiply(a, b), 10, repeats)
    return Card(num_bytes / copy_s, 2.0 * size**3 / multiply_s)


def median_s(call: Callable[[], jax.Array], count: int, repeats: int) -> float:
    """Returns seconds per call, of `count` dispatched together: the median over repeats."""
    call().block_until_ready()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(count):
            last = call()
        last.block_until_ready()
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found)


def measure_steps(
    model: ModelConfig,
    card: Card,
    batches: list[int],
    context: int,
    prompts: list[int],
    steps: int,
    repeats: int,
) -> list[Figure]:
    config = EngineConfig(
        max_num_seqs=max(batches),
        max_batch_tokens=max(16, 1 << (max(*prompts, *batches) - 1).bit_length()),
        max_model_len=max(context, *prompts),
    )
    deployment = deploy(config, model)
    geometry = deployment.geometry(deployment.max_model_len)
    spec = deployment.cache_spec(Amount.of(max(batches) * geometry.pages_per_seq + 1))
    runner = loaded_runner(deployment, geometry, spec)
    figures = []
    for batch in batches:
        step = packed(geometry, [(1, context)] * batch)
        seconds = step_s(runner, step, steps, repeats)
        live = batch * context * kv_token_bytes(model, deployment.kv_dtype)
        rate = (step_weight_bytes(model, batch, None) + live) / seconds
        share = rate / card.copy_bytes_per_s
        figures.append(Figure("decode", batch, batch, context, 1e3 * seconds, rate, share, DECODE_BAR))
    for prompt in prompts:
        seconds = step_s(runner, packed(geometry, [(prompt, prompt)]), steps, repeats)
        rate = step_flops(model, prompt, 1, prompt * (prompt + 1) // 2) / seconds
        share = rate / card.bf16_flops_per_s
        figures.append(Figure("prefill", 1, prompt, prompt, 1e3 * seconds, rate, share, PREFILL_BAR))
    return figures


def loaded_runner(deployment: Deployment, geometry: Geometry, spec: CacheSpec) -> Runner:
    stacked = deployment.attention.is_stacked
    model = random_model(deployment.model, 0, placement=deployment.placement, stacked=stacked)
    return Runner(model, deployment.attention, spec, geometry, deployment.placement)


def packed(geometry: Geometry, rows: list[tuple[int, int]]) -> Batch:
    """Packs a step of sequences with (tokens of this step, tokens in total) each, on own pages, sampled greedily."""
    page_size = geometry.page_size
    num_real = sum(q_len for q_len, _ in rows)
    num_tokens = next(bucket for bucket in geometry.token_buckets if bucket >= num_real)
    flat, parts = geometry.step_layout(num_tokens).empty()
    rng = np.random.default_rng(0)
    parts["token_ids"][:num_real] = rng.integers(0, geometry.vocab_size, num_real)
    parts["sources"][:] = -1
    parts["num_seqs"][0] = len(rows)
    start = 0
    for i, (q_len, kv_len) in enumerate(rows):
        pages = 1 + i * geometry.pages_per_seq + np.arange(geometry.pages_per_seq)
        positions = np.arange(kv_len - q_len, kv_len)
        end = start + q_len
        parts["page_indices"][:, i] = pages
        parts["positions"][start:end] = positions
        parts["slots"][:, start:end] = pages[positions // page_size] * page_size + positions % page_size
        parts["kv_lens"][i], parts["cu_q_lens"][i + 1 :] = kv_len, end
        parts["sampled_tokens"][i] = end - 1
        start = end
    parts["num_sampled"][0] = len(rows)
    num_rows = next(bucket for bucket in geometry.row_buckets if bucket >= len(rows))
    return Batch(num_tokens, num_rows, 1, len(rows), flat, None, None)


def step_s(runner: Runner, batch: Batch, steps: int, repeats: int) -> float:
    """Returns the seconds of one step: the median over the repeats. Each is dispatched before the last one's tokens are
    read.
    """

    def run(count: int) -> None:
        last: InFlight | None = None
        for _ in range(count):
            current = runner.dispatch(batch)
            if last is not None:
                last.token_ids()
            last = current
        if last is not None:
            last.token_ids()

    run(_WARM_UP_STEPS)
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(steps)
        found.append((time.perf_counter() - start) / steps)
    return statistics.median(found)


def table(title: str, card: Card, figures: list[Figure]) -> Table:
    caption = f"copies {card.copy_bytes_per_s / 1e9:,.0f} GB/s, multiplies {card.bf16_flops_per_s / 1e12:,.1f} Tflop/s"
    found = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in ("step", "sequences", "tokens", "context", "ms", "rate", "share", "bar"):
        found.add_column(name, justify="left" if name == "step" else "right")
    for each in figures:
        unit = "GB/s" if each.step == "decode" else "Gflop/s"
        found.add_row(
            each.step, str(each.sequences), str(each.tokens), str(each.context), f"{each.step_ms:.3f}",
            f"{each.rate / 1e9:,.0f} {unit}", f"{each.share:.2f}", f"{each.bar:.2f}",
        )  # fmt: skip
    return found


def run_peers(arguments: argparse.Namespace) -> None:
    """Runs the peers in processes that share the card's memory. This process must not take any of it."""
    asked = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.default_backend())"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    refuse_without_gpu(asked.stdout.strip(), arguments)
    model, dtype = ("nano", "float32") if arguments.model == NANO else ("llama8", "bfloat16")
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45", **os.environ}
    command = [sys.executable, "-m", "benchmarks.peers.run", "--model", model, "--dtype", dtype]
    command += ["--peers", "transformers"]
    raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
