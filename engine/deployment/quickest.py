"""Chooses the quickest arithmetic where `same_tokens` is off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.engine.arithmetic import arithmetic_of
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import Deployment
from penstock.engine.models import ModelConfig
from penstock.engine.models.config import MLPConfig
from penstock.engine.models.cpu.timing import is_xla_quicker, matmul_times_s, shares_of_xla
from penstock.engine.stats import EngineInfo

_MOST_FEATURES = 2048  # of the weights that are timed, in and out: enough to tell two kinds of kernels apart


def with_quickest(deployment: Deployment) -> Deployment:
    """Times the matmuls of the C++ kernels against XLA's, and leaves them to XLA if it is quicker. Attention stays with
    its kernel.

    Nothing is timed if `same_tokens` is on, if the settings name the matmul, or if XLA is known to be slower: it
    unpacks quantized weights, and multiplies by the weights of every expert.
    """
    config, library, sizes = deployment.config, deployment.matmul_library, _inner_sizes(deployment.model)
    if config.same_tokens or config.matmul != "auto" or library is None or deployment.model.is_packed or not sizes:
        return deployment
    rows = sorted({1, config.max_num_seqs, config.max_batch_tokens})
    shape = min(deployment.model.hidden_size, _MOST_FEATURES), min(max(sizes), _MOST_FEATURES)
    times_s = matmul_times_s(library, deployment.model.dtype, rows, shape)
    is_xla = is_xla_quicker(times_s)
    said = _said("xla" if is_xla else "native", times_s)
    return replace(deployment, matmul_library=None if is_xla else library, timed=(said,))


def with_loops(info: EngineInfo, loops: Mapping[int, int], config: EngineConfig) -> EngineInfo:
    """Adds the decode steps in one dispatch that were measured to be best, by row bucket. Names the new arithmetic."""
    several = tuple(sorted((rows, steps) for rows, steps in loops.items() if steps > 1))
    info = replace(info, loops=several)
    if not config.same_tokens:
        info = replace(info, timed=(*info.timed, _loops_said(several)))
    return replace(info, arithmetic=arithmetic_of(info, config))


def _inner_sizes(model: ModelConfig) -> list[int]:
    """Returns the feed-forwards' inner features; none if any has experts."""
    sizes = [block.mlp.intermediate_size for block in model.blocks if isinstance(block.mlp, MLPConfig)]
    return sizes if len(sizes) == len(model.blocks) else []


def _loops_said(several: tuple[tuple[int, int], ...]) -> str:
    if not several:
        return "1 decode step in a dispatch"
    most, steps = several[-1]
    return f"{steps} decode steps in a dispatch of up to {most} rows"


def _said(matmul: str, times_s: Mapping[int, tuple[float, float]]) -> str:
    shown = ", ".join(f"{share:.2f} for {rows}" for rows, share in shares_of_xla(times_s).items())
    return f"matmul {matmul} (C++ over XLA's time, by rows: {shown})"
