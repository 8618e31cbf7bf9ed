"""Offline throughput of the bare engine on the shared workload, with random weights.

    python -m benchmarks.engine --model tiny --dtype float32 --repeats 3

Prints a table and appends one JSON line per repeat to `benchmarks/results/engine.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.workload import Item, shared_workload
from engine import Engine, EngineConfig, Request, SamplingParams
from engine.checkpoint import random_model
from engine.generation_defaults import GenerationDefaults
from engine.models import ModelConfig, RopeConfig
from engine.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results" / "engine.jsonl"


def geometry(name: str, dtype: str) -> ModelConfig:
    """Qwen3 geometries of 31M and 474M parameters."""
    sizes = {
        "tiny": (8192, 384, 2304, 8, 6, 2, 64, False),
        "qwen06": (32768, 1024, 3072, 28, 16, 8, 128, True),
    }
    vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, tied = sizes[name]
    return ModelConfig(
        family="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=2048,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        tie_word_embeddings=tied,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=True,
        sliding_windows=(None,) * layers,
        dtype=dtype,
    )


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """One letter per token: what text costs is part of the measurement, what it says is not."""
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def run(engine: Engine, items: list[Item]) -> dict[str, float]:
    """Seconds and rates of one pass over `items`, all submitted at once."""
    start = time.perf_counter()
    for i, item in enumerate(items):
        params = SamplingParams(temperature=0.0, max_tokens=item.num_output, ignore_eos=True)
        engine.add(Request(str(i), item.prompt_token_ids, params))
    times: dict[str, list[float]] = {}
    before = engine.stats()
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            times.setdefault(output.request_id, []).extend([now] * len(output.token_ids))
    seconds = time.perf_counter() - start
    num_output = sum(map(len, times.values()))
    gaps = [gap for stamps in times.values() for gap in np.diff(stamps)]
    return {
        "seconds": round(seconds, 3),
        "output_tokens": num_output,
        "output_tokens_per_s": round(num_output / seconds, 1),
        "ttft_p50_ms": round(1e3 * float(np.median([stamps[0] - start for stamps in times.values()])), 1),
        "itl_p50_ms": round(1e3 * float(np.median(gaps)), 2),
        "itl_p99_ms": round(1e3 * float(np.percentile(gaps, 99)), 2),
        "steps": engine.stats().steps_total - before.steps_total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "qwen06"], default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--page-size", type=int, default=32)
    arguments = parser.parse_args()

    config = geometry(arguments.model, arguments.dtype)
    settings = EngineConfig(
        max_num_seqs=64,
        max_batch_tokens=arguments.max_batch_tokens,
        page_size=arguments.page_size,
        max_model_len=1024,
        prefix_caching=False,
    )
    engine = Engine(random_model(config, 0), word_tokenizer(config.vocab_size), GenerationDefaults(()), settings)
    start = time.perf_counter()
    engine.warm_up()
    warm_up_s = round(time.perf_counter() - start, 1)
    items = shared_workload(config.vocab_size, arguments.requests)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}"
    table = Table(
        title=f"{arguments.model} {arguments.dtype} on {machine}, jax {jax.__version__}, warm-up {warm_up_s} s"
    )
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        for repeat in range(arguments.repeats):
            result = run(engine, items)
            if not table.columns:
                for name in result:
                    table.add_column(name, justify="right")
            table.add_row(*map(str, result.values()))
            line = {
                **vars(arguments), "machine": machine, "jax": jax.__version__, "warm_up_s": warm_up_s,
                "repeat": repeat, "load_before": os.getloadavg()[0], **result,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
