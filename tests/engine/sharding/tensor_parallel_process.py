"""Run by devices.py in a process with eight host devices; prints one JSON object.

python tensor_parallel_process.py '{"NAME": ["CHECKPOINT", "LAYOUT,..."], ...}'

A LAYOUT is TENSOR or TENSORxEXPERT; one that the engine refuses gives `refused`, with the message. A NAME that begins
with int8 has int8 pages, in C++ where possible; one that begins with fp8 has fp8 pages, and one with w8a8 quantizes its
activations.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax

from penstock.engine import ConfigError, Engine, EngineConfig, Request, SamplingParams
from tests.engine.engines import SMALL, drive
from tests.engine.sharding.devices import keep_as_told


def main() -> None:
    keep_as_told()
    assert len(jax.devices()) == 8
    models = json.loads(sys.argv[1])
    found = {
        name: {layout: attempt(name, Path(directory), *sizes(layout)) for layout in layouts.split(",")}
        for name, (directory, layouts) in models.items()
    }
    json.dump(found, sys.stdout)


def sizes(layout: str) -> tuple[int, int]:
    tensor, _, expert = layout.partition("x")
    return int(tensor), int(expert or 1)


def attempt(name: str, directory: Path, tensor: int, expert: int) -> dict[str, Any]:
    try:
        return run(name, directory, tensor, expert)
    except ConfigError as error:
        return {"refused": str(error)}


def run(name: str, directory: Path, tensor: int, expert: int) -> dict[str, Any]:
    """Returns the tokens of a few requests, and how the engine is laid out on the devices."""
    kind = name.partition(" ")[0]
    kv_dtype = {"int8": "int8", "fp8": "float8_e4m3fn"}.get(kind, "unquantized")
    config = EngineConfig(
        max_num_seqs=SMALL.max_num_seqs,
        max_batch_tokens=SMALL.max_batch_tokens,
        max_model_len=SMALL.max_model_len,
        page_size=SMALL.page_size,
        num_pages=SMALL.num_pages,
        tensor_parallel=tensor,
        expert_parallel=expert,
        attention="auto" if kv_dtype == "int8" else "xla",
        matmul="xla",  # what several devices have; C++ rounds weights of bfloat16 otherwise
        kv_cache_dtype=kv_dtype,
        activations="int8" if kind == "w8a8" else "auto",
    )
    engine = Engine.from_checkpoint(directory, config)
    prompts = [list(range(5, 5 + length)) for length in (3, 9, 21)]
    requests = [
        Request(str(i), tuple(prompt), SamplingParams(max_tokens=12, temperature=0.0 if i else 0.8, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    hot = SamplingParams(max_tokens=12, temperature=100.0, seed=7, logprobs=3)  # any token is about as likely
    requests.append(Request("hot", (5, 6, 7), hot))
    results = drive(engine, requests)
    runner = engine._runner
    text = str(runner.compile_backbone(16).as_text())
    return {
        "tokens": [results[request.id, 0].token_ids for request in requests],
        "arithmetic": engine.describe().arithmetic,
        "logprobs": [token.logprob for token in results["hot", 0].logprobs],
        "all_reduces": len(re.findall(r"= [^=]+ all-reduce(?:-start)?\(", text)),
        "other_collectives": len(re.findall(r"(all-gather|reduce-scatter|collective-permute|all-to-all)\(", text)),
        "weight_shares": sorted({share(leaf) for leaf in runner._steps.params if leaf.ndim == 2}),
        "expert_shares": sorted({share(leaf) for leaf in runner._steps.params if leaf.ndim == 3}),
        "cache_shares": sorted({share(leaf) for leaf in jax.tree.leaves(runner._cache)}),
    }


def share(array: jax.Array) -> int:
    """Returns the number of parts into which an array is split."""
    return int(array.size // array.addressable_shards[0].data.size)


if __name__ == "__main__":
    main()
