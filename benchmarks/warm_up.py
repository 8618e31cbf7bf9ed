"""Measures the warm-up of a mixture of experts against a dense model with as many parameters, in turn.

    python -m benchmarks.warm_up --rounds 3

Medians of several rounds: seconds, and the process's CPU time, which other work on the machine distorts less. The first
round is not counted, as it includes one-time costs of the process. Appends to `benchmarks/results/warm_up.jsonl`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from rich.console import Console

from benchmarks.parts.tables import RESULTS, table_of
from penstock.engine import EngineConfig
from penstock.engine.deployment.cache_sizes import with_pages
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.execution.runner import Runner
from penstock.engine.execution.step_memory import StepMemory
from penstock.engine.execution.warm_up import warm_up
from penstock.engine.loading.checkpoint import random_model
from penstock.engine.models import FAMILIES, ModelConfig, num_parameters
from penstock.engine.models.cpu.block import pack_blocks
from penstock.engine.models.cpu.panels import pack_head
from penstock.tools.bench.presets import GEOMETRIES
from penstock.tools.bench.report import append_result

NUM_EXPERTS, NUM_CHOSEN = 16, 4
FORMS = ("native", "xla")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dense = [name for name, geometry in GEOMETRIES.items() if not geometry.num_experts]
    parser.add_argument("--model", choices=dense, default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = [row for form in FORMS for row in measured(arguments, form)]
    title = f"warm-up of {arguments.model} {arguments.dtype}, {arguments.rounds} rounds in turn"
    Console().print(table_of(title, rows))
    append_result(RESULTS / "warm_up.jsonl", {"title": title, "options": vars(arguments), "rows": rows})


def measured(arguments: argparse.Namespace, form: str) -> list[dict[str, Any]]:
    """Returns a row for the dense model and one for the mixture."""
    settings = EngineConfig(max_batch_tokens=arguments.max_batch_tokens, max_model_len=1024, matmul=form)
    deployments = {name: deploy(settings, model) for name, model in models_of(arguments.model, arguments.dtype).items()}
    rounds = [
        {name: warm_up_once(deployment) for name, deployment in deployments.items()}
        for _ in range(1 + arguments.rounds)
    ][1:]
    medians = {
        name: [statistics.median(part) for part in zip(*(found[name] for found in rounds), strict=True)]
        for name in deployments
    }
    of_dense = medians["dense"]
    return [
        {
            "matmul": form, "model": name, "parameters": num_parameters(deployments[name].model),
            "programs": programs, "s": round(wall_s, 2), "CPU s": round(cpu_s, 2),
            "times s": round(wall_s / of_dense[0], 2), "times CPU s": round(cpu_s / of_dense[1], 2),
        }
        for name, (wall_s, cpu_s, programs) in medians.items()
    ]  # fmt: skip


def models_of(name: str, dtype: str) -> dict[str, ModelConfig]:
    """Returns a dense geometry, and one with experts of the same total size."""
    geometry = GEOMETRIES[name]
    fields = {
        "vocab_size": geometry.vocab_size, "hidden_size": geometry.hidden, "intermediate_size": geometry.intermediate,
        "num_hidden_layers": geometry.layers, "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads, "head_dim": geometry.head_dim, "tie_word_embeddings": geometry.tied,
        "num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN,
        "moe_intermediate_size": geometry.intermediate // NUM_EXPERTS,
    }  # fmt: skip
    families = {"dense": "qwen3", f"{NUM_CHOSEN} of {NUM_EXPERTS} experts": "qwen3_moe"}
    return {title: FAMILIES[family].config(fields, dtype) for title, family in families.items()}


def warm_up_once(deployment: Deployment) -> tuple[float, float, int]:
    """Returns seconds, CPU seconds, and the number of compiled programs."""
    model = random_model(deployment.model, 0)
    if deployment.matmul_library is not None:
        pack_head(model, deployment.matmul_library)
        model = pack_blocks(model, deployment.matmul_library)
    spec = with_pages(deployment, deployment.free_bytes())
    runner = Runner(model, deployment.attention, spec, deployment.geometry(deployment.max_model_len))
    programs: set[str] = set()
    start, cpu_start = time.perf_counter(), time.process_time()
    warm_up(
        runner,
        lambda done, total, name: programs.add(name),
        decode_steps=None,
        prefill_share=0.4,
        memory=StepMemory(None),
    )
    return time.perf_counter() - start, time.process_time() - cpu_start, len(programs)


if __name__ == "__main__":
    main()
