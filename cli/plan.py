"""Options of `penstock plan`. Its work is in `penstock.cli.shared.planning`, which needs the worker extra."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared.errors import require_worker_extra
from penstock.cli.shared.options import takes_settings
from penstock.worker.settings import Settings
from penstock.worker.settings_loading import SettingsError, flag

_SETTINGS = (
    "model", "dtype", "weights", "activations", "max_model_len", "max_num_seqs", "max_batch_tokens", "page_size",
    "num_pages", "kv_cache_dtype", "compile_cache_dir", "decode_steps", "attention", "expert_parallel",
    "prefix_caching", "prefill_share",
)  # fmt: skip


@takes_settings(_SETTINGS)
def plan(
    *,
    settings: Settings,
    topology: Annotated[str, typer.Option(help="Chip and shape of the slice, such as v5e:2x4, v6e:2x2, tpu7x:2x2x1.")],
    tensor: Annotated[
        int | None, typer.Option(help="Devices per copy of the model; none: all of the slice.", min=1)
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each sequence in the estimates.", min=1)] = 1024,
    trace: Annotated[
        Path | None, typer.Option(help="JSON Lines of arrivals and lengths, which a simulated fleet serves.")
    ] = None,
    slices: Annotated[int, typer.Option(help="Slices that serve the trace together.", min=1)] = 1,
    processes: Annotated[
        int | None, typer.Option(help="Processes that compile at once; none: one per processor, at most 8.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile a model for a slice of TPUs, without TPU or weights, and show what fits and how fast it could be.

    --model takes a preset (Qwen3-0.6B, Llama-3.1-8B, Qwen3-32B, Qwen3-30B-A3B, Mixtral-8x7B, Gemma-3-27B,
    Gemma-4-31B, Gemma-4-26B-A4B, Qwen3.6-27B, Qwen3.6-35B-A3B, Llama-3.3-70B, gpt-oss-20b, gpt-oss-120b), a
    checkpoint's folder, a GGUF file, or a config.json. Every function that a worker would compile is compiled, so
    what does not fit fails here.

    With --trace, each copy of the model then has the real scheduler on a virtual clock, which serves arrivals such as
    {"arrival_s": 0.35, "prompt_tokens": 812, "output_tokens": 120}, and the report shows throughput and latency.
    """
    require_worker_extra()
    if settings.model is None:
        raise SettingsError(f"no model is set: give {flag('model')} a preset, a folder or a config.json")
    if trace is None and slices > 1:
        raise SettingsError(f"--slices {slices} is for --trace: without one, one slice is planned")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # this machine's devices are not needed, and may be in use
    from penstock.cli.shared.planning import PlanOptions, run  # loads jax, which --help and a light install lack

    run(settings, PlanOptions(topology, tensor, context, trace, slices, processes), as_json=as_json)
