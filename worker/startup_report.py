"""Introduces a worker once its model is loaded: as one event of the log, and as a table for people."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.engine.stats import EngineInfo
from penstock.protocol.version import __version__

STARTED = "worker_started"
NO_COMPILER_HINT = "this worker is several times as slow as it could be: install a C++ compiler (apt install g++)"


def describe(
    model: str,
    info: EngineInfo | None,
    *,
    queue: str,
    worker: str,
    redis: str,
    health: str | None,
    arithmetic: str | None = None,
) -> dict[str, Any]:
    """Returns the fields of the event.

    Args:
        model: its name.
        info: the engine's; None: unknown.
        queue: the one that it serves.
        worker: its name.
        redis: the address, without a password.
        health: host and port; None without a health server.
        arithmetic: as the card names it; None: unknown.
    """
    engine: dict[str, Any] = {}
    if info is not None:
        engine = {
            "parameters": info.num_parameters, "dtype": info.dtype, "device": device_of(info),
            "attention": info.attention, "matmul": info.matmul, "kv_cache_tokens": info.kv_cache_tokens,
            "kv_cache_bytes": info.kv_cache_bytes, "kv_dtype": info.kv_dtype, "max_model_len": info.max_model_len,
        }  # fmt: skip
        if info.instructions is not None:
            engine["instructions"] = info.instructions
        if arithmetic is not None:
            engine |= {"arithmetic": arithmetic, "batch_invariant": info.batch_invariant}
        if info.timed:
            engine["timed"] = list(info.timed)
        if info.num_state_slots:
            engine |= {"state_slots": info.num_state_slots, "state_cache_bytes": info.state_cache_bytes}
    return {
        "model": model, **engine, "queue": queue, "worker": worker, "redis": redis, "health": health,
        "version": __version__,
    }  # fmt: skip


def as_table(fields: Mapping[str, Any]) -> str:
    """Formats the event for people, one field a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, title, form in _ROWS:
        if fields.get(name) is not None:
            table.add_row(Text(title, "bold"), form(fields))
    text = io.StringIO()
    Console(file=text, width=200, highlight=False, emoji=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def device_of(info: EngineInfo) -> str:
    """Names what an engine runs on, such as `cpu` or `4 x tpu (TPU v5e)`."""
    name = info.platform if info.device_kind.lower() == info.platform else f"{info.platform} ({info.device_kind})"
    return name if info.num_devices == 1 else f"{info.num_devices} x {name}"


def _plain(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda fields: str(fields[name])


def _model(fields: Mapping[str, Any]) -> str:
    if "parameters" not in fields:
        return str(fields["model"])
    return f"{fields['model']}, {_short(fields['parameters'])} parameters, {fields['dtype']}"


def _kv_cache(fields: Mapping[str, Any]) -> str:
    size = f"{fields['kv_cache_bytes'] / 2**20:,.0f} MiB of {fields['kv_dtype']}"
    return f"{fields['kv_cache_tokens']:,} tokens in {size}, at most {fields['max_model_len']:,} per sequence"


def _states(fields: Mapping[str, Any]) -> str:
    return f"{fields['state_slots']:,} slots in {fields['state_cache_bytes'] / 2**20:,.1f} MiB"


def _arithmetic(fields: Mapping[str, Any]) -> str:
    said = "equal bits in any batch" if fields["batch_invariant"] else "bits by batch"
    elsewhere = "; penstock doctor times it against others" if "cpu" in fields["device"] else ""
    return f"{fields['arithmetic']}, {said}{elsewhere}"


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


_ROWS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("model", "model", _model),
    ("device", "device", _plain("device")),
    ("attention", "attention", _plain("attention")),
    ("matmul", "matmul", _plain("matmul")),
    ("instructions", "bf16 by", _plain("instructions")),
    ("arithmetic", "arithmetic", _arithmetic),
    ("timed", "measured", lambda fields: "; ".join(fields["timed"])),
    ("kv_cache_tokens", "KV cache", _kv_cache),
    ("state_slots", "states", _states),
    ("queue", "queue", _plain("queue")),
    ("worker", "worker", _plain("worker")),
    ("redis", "Redis", _plain("redis")),
    ("health", "health", _plain("health")),
    ("version", "version", _plain("version")),
)
