"""Checks a TPU, and a model's placement on it. Nothing is compiled: `penstock plan` does that."""

from __future__ import annotations

import jax

from penstock.cli.checks import Finding
from penstock.engine.attention import check_page_table
from penstock.engine.attention.selection import SMEM_BYTES, SMEM_RESERVED_BYTES, page_table_bytes
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.cache_sizes import fitting
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.errors import EngineError
from penstock.engine.scheduling.memory.amounts import Amount
from penstock.tools.plan.device.weights import held_bytes
from penstock.tools.plan.models import planned_model

_GIB = 2**30


def check_tpu(model: str, config: EngineConfig) -> list[Finding]:
    """Reports HBM, the scalar-memory rule, the page size and why, and how much of the KV cache fits; nothing without a
    TPU.
    """
    device = jax.devices()[0]
    if device.platform != "tpu":
        return []
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    found = [Finding("TPU", "ok", f"{device.device_kind}, {limit / _GIB:.2f} GiB of HBM per device")]
    try:
        deployment = deploy(config, planned_model(model, config.dtype, config.weights))
        return [*found, *lie_of(deployment, config, limit)]
    except EngineError as error:
        return [*found, Finding("TPU layout", "fail", str(error), "change the setting that the message names")]


def lie_of(deployment: Deployment, config: EngineConfig, hbm_bytes: int) -> list[Finding]:
    """Reports a model's placement on devices with that much memory each."""
    pages_per_seq = -(-deployment.max_model_len // deployment.page_size)
    table = page_table_bytes(config.max_num_seqs, pages_per_seq)
    check_page_table(
        max_num_seqs=config.max_num_seqs, max_model_len=deployment.max_model_len, page_size=deployment.page_size
    )
    why = "as set" if config.page_size else "the smallest from 64 whose table of pages fits scalar memory"
    detail = (
        f"{deployment.page_size} tokens: {why}; the table takes {table} of {SMEM_BYTES - SMEM_RESERVED_BYTES} bytes"
    )
    num_devices, weights = config.num_devices, held_bytes(deployment.model, deployment.placement)
    free_bytes = max(0, int((hbm_bytes - weights) * 0.9))
    spec = fitting(deployment, free_bytes)
    states, pages = spec.num_states, Amount(spec.counts)
    tokens = deployment.needs.spans(pages) * deployment.page_size
    counted = " and ".join(map(str, pages.counts))
    kept = f"{counted} pages of {deployment.kv_dtype}" + (f" and {states} states" if states else "")
    fits = f"weights {weights / _GIB:.2f} GiB per device, then {kept}: {tokens} tokens at once"
    memory = Finding("TPU memory", "ok", fits)
    if min(pages.counts) < 2:
        memory = Finding("TPU memory", "fail", fits, "raise --tensor-parallel, or take a larger slice")
    attention = Finding(
        "TPU attention", "ok", f"{deployment.attention.name}, {num_devices} devices for one copy of the model"
    )
    return [Finding("TPU page size", "ok", detail), memory, attention]
