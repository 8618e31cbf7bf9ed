"""Measures decoding of models whose layers keep states against dense ones of as many bytes, in turn, on CPU.

    python -m benchmarks.hybrids

For each model, the seconds of a decode step of the engine are compared with an ideal: the time of its bytes and
operations at the rates of memory and of matmuls, measured in the same rounds. Reading weights takes the longer of the
two times; states and pages, which overlap with no matmul, come on top. `r` is that ideal over the measured time, and
`of dense` the hybrid's `r` over the dense model's. Prints tables and appends them to
`benchmarks/results/hybrids.jsonl`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console

from benchmarks.cpu_kernels import fastest_s, read_rate
from benchmarks.host import word_tokenizer
from benchmarks.parts.tables import RESULTS, table_of
from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.deployment.deployment import DEFAULT_BUILD_DIR, Deployment, deploy
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.kernels.cpu import load_library
from penstock.engine.loading.checkpoint import random_model
from penstock.engine.models import FAMILIES, ModelConfig, num_parameters
from penstock.engine.models.config import DeltaNetConfig, MLPConfig
from penstock.engine.models.cpu.block import pack_blocks
from penstock.engine.models.cpu.panels import joined, pack_head
from penstock.engine.models.layers.linear import Linear
from penstock.tools.bench.machine import describe_machine
from penstock.tools.bench.report import append_result
from penstock.tools.plan.device.roofline import kv_sequence_bytes, step_flops

HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5_text", "vocab_size": 32_768, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "LFM2-350M": {
        "model_type": "lfm2", "vocab_size": 32_768, "hidden_size": 1024, "intermediate_size": 6656,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
}  # fmt: skip
"""Sizes as published, but with a smaller vocabulary; both models of a pair have the same head."""

ITEM_BYTES, PROMPT, STEPS = 2, 3, 48
TOGETHER = 2  # steps of one model before the other one's turn
_MATMUL = (1024, 4096)  # features in and out
_MATMULS = 24  # in a row: more bytes than caches hold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=HYBRIDS, default=list(HYBRIDS))
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 64])
    arguments = parser.parse_args()
    console, rows = Console(), []
    for name in arguments.models:
        rows += pair(name, arguments.sequences, arguments.rounds)
        console.print(table_of(name, rows[-2 * len(arguments.sequences) :], digits=3))
    append_result(RESULTS / "hybrids.jsonl", {"title": "hybrids", "machine": describe_machine(), "rows": rows})


def pair(name: str, counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Measures a hybrid and a dense model with as many parameters, a few steps of each in turn."""
    hybrid = FAMILIES[HYBRIDS[name]["model_type"]].config(dict(HYBRIDS[name]), "bfloat16")
    models = {"dense": dense_of(hybrid), name: hybrid}
    measured = {key: Measured(model, *engine_of(model, max(counts))) for key, model in models.items()}
    matmul, rates, rows = matmul_of(), Rates(), []
    rates.take(matmul)
    for count in counts:
        for _ in range(rounds):
            for one in measured.values():
                one.take(count)
        for one in measured.values():
            one.let_go(count)
        rates.take(matmul)
    for count in counts:
        shares = {key: one.ideal_s(count, rates) / one.step_s(count) for key, one in measured.items()}
        for key, one in measured.items():
            rows.append({
                "model": key, "sequences": count, "M parameters": round(num_parameters(one.model) / 1e6),
                "states, MB": round(one.state_bytes(count) / 1e6), "ms": round(one.step_s(count) * 1e3, 2),
                "ideal, ms": round(one.ideal_s(count, rates) * 1e3, 2), "r": round(shares[key], 3),
                "of dense": round(shares[key] / shares["dense"], 3),
                "GB/s": round(rates.bytes_per_s * 1e-9, 1), "GFLOP/s": round(rates.flops_per_s * 1e-9),
            })  # fmt: skip
    return rows


def dense_of(hybrid: ModelConfig) -> ModelConfig:
    """Returns a Qwen3 with as many layers, and a feed-forward that gives it as many parameters."""
    layers, hidden = hybrid.num_layers, hybrid.hidden_size
    fields = {
        "vocab_size": hybrid.vocab_size, "hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 128,
        "max_position_embeddings": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    smallest = FAMILIES["qwen3"].config(fields, "bfloat16")
    missing = num_parameters(hybrid) - num_parameters(smallest)
    inner = 64 + round(missing / (3 * hidden * layers) / 64) * 64
    return replace(smallest, blocks=tuple(replace(block, mlp=MLPConfig(inner)) for block in smallest.blocks))


def engine_of(model: ModelConfig, max_num_seqs: int) -> tuple[Engine, Deployment]:
    """Makes an engine with random weights, packed like a checkpoint's; one step per dispatch."""
    config = EngineConfig(
        max_num_seqs=max_num_seqs, max_batch_tokens=256, page_size=32, num_pages=3 * max_num_seqs + 1,
        max_model_len=64 + STEPS, prefix_caching=False, decode_steps=1, speculation="off",
    )  # fmt: skip
    deployment = deploy(config, model)
    library = load_library(DEFAULT_BUILD_DIR / "native")
    made = random_model(deployment.model, 0)
    pack_head(made, library)
    tokenizer = word_tokenizer(1000)
    return Engine(pack_blocks(made, library), tokenizer, GenerationDefaults((0,)), deployment), deployment


@dataclass
class Rates:
    """The best rates so far."""

    bytes_per_s: float = 0.0
    flops_per_s: float = 0.0

    def take(self, matmul: Any) -> None:
        self.bytes_per_s = max(self.bytes_per_s, read_rate())
        flops = 2 * 64 * _MATMUL[0] * _MATMUL[1] * _MATMULS
        self.flops_per_s = max(self.flops_per_s, flops / fastest_s(matmul, repeats=2, calls=1))


def matmul_of() -> Any:
    """Returns a function that multiplies 64 rows by several weights."""
    library = load_library(DEFAULT_BUILD_DIR / "native")
    linear = Linear.plain(*_MATMUL, bias=False, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
    graph, state = nnx.split(joined(library, linear))
    copies = [jax.tree.map(jnp.copy, state) for _ in range(_MATMULS)]

    def through(copies: list[nnx.State[Any, Any]], x: jax.Array) -> jax.Array:
        for own in copies:
            x += 0 * nnx.merge(graph, own)(x)[:, : x.shape[1]]
        return x

    x = jax.random.normal(jax.random.key(0), (64, _MATMUL[0]), "bfloat16")
    return partial(jax.jit(through), copies, x)


@dataclass
class Measured:
    """A model's steps, and the bytes and operations that they need."""

    model: ModelConfig
    engine: Engine
    deployment: Deployment
    seconds: dict[int, list[float]] = field(default_factory=dict)  # of decode steps, by sequences
    left: int = 0  # steps that the current sequences may still make

    def step_s(self, count: int) -> float:
        """Returns the lower quartile: others use the machine too."""
        return sorted(self.seconds[count])[len(self.seconds[count]) // 4]

    def take(self, count: int) -> None:
        """Times a few steps after an uncounted one: the step before that may have been the other model's."""
        if self.left <= TOGETHER:
            self.let_go(count)
            self._begin(count)
        self.engine.step()
        start = time.perf_counter()
        for _ in range(TOGETHER):
            self.engine.step()
        self.seconds.setdefault(count, []).append((time.perf_counter() - start) / TOGETHER)
        self.left -= TOGETHER + 1

    def _begin(self, count: int) -> None:
        before, self.left = self.engine.stats().generated_tokens_total, STEPS
        sampling = SamplingParams(max_tokens=STEPS + 12, temperature=0.0, ignore_eos=True)
        for number in range(count):
            self.engine.add(Request(f"{count}-{number}", (5,) * PROMPT, sampling))
        while self.engine.stats().generated_tokens_total < before + 4 * count:
            self.engine.step()
        self.engine.settle()

    def let_go(self, count: int) -> None:
        for number in range(count):
            self.engine.abort(f"{count}-{number}")
        while self.engine.has_work():
            self.engine.step()
        self.left = 0

    def state_bytes(self, count: int) -> int:
        """Returns state bytes read and written."""
        return 2 * count * self.deployment.state_bytes

    def ideal_s(self, count: int, rates: Rates) -> float:
        weights = num_parameters(self.model) * ITEM_BYTES  # the head is the embedding
        kept = self.state_bytes(count) + count * kv_sequence_bytes(self.model, "bfloat16", PROMPT + STEPS // 2)
        flops = step_flops(self.model, count, count, 0) + 6 * count * self._delta_sizes()
        return max(weights / rates.bytes_per_s, flops / rates.flops_per_s) + kept / rates.bytes_per_s

    def _delta_sizes(self) -> int:
        """Counts the elements of a sequence's matrices."""
        nets = [block.mixer for block in self.model.blocks if isinstance(block.mixer, DeltaNetConfig)]
        return sum(net.num_value_heads * net.key_dim * net.value_dim for net in nets)


if __name__ == "__main__":
    main()
