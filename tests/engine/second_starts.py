"""Starts an engine twice on one folder of compiled programs, and listens to what jax traces in the second warm-up.

python -m tests.engine.second_starts CHECKPOINT CACHE TENSOR: does so in a process of its own; prints JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jax import monitoring

from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.deployment.deployment import DEFAULT_BUILD_DIR
from tests.engine.engines import SMALL, drive

_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_listening: list[list[str]] = []


def _listen(event: str, duration_secs: float, **facts: str | int) -> None:
    for names in _listening if event == _TRACED else ():
        names.append(str(facts.get("fun_name")))


monitoring.register_event_duration_secs_listener(_listen)  # listeners live as long as the process


@contextmanager
def traced() -> Iterator[list[str]]:
    """Collects the names of the functions that are traced within the context, on any thread."""
    names: list[str] = []
    _listening.append(names)
    try:
        yield names
    finally:
        _listening.remove(names)


def start(model: Path, config: EngineConfig) -> tuple[list[list[int]], list[str]]:
    """Returns tokens of greedy, seeded and several choices, and the names of what warm-up traced."""
    engine = Engine.from_checkpoint(model, config)
    with traced() as names:
        engine.warm_up()
    requests = [
        Request("greedy", tuple(range(1, 30)), SamplingParams(max_tokens=12, temperature=0.0)),
        Request("drawn", (5, 6, 7), SamplingParams(max_tokens=12, seed=3, top_p=0.9, logprobs=2), n=2),
        Request("stopped", (8, 9), SamplingParams(max_tokens=12, seed=4, repetition_penalty=1.3, stop=("e",))),
    ]
    found = drive(engine, requests)
    assert engine.stats().compiles_after_warmup_total == 0
    return [found[key].token_ids for key in sorted(found)], names


def config_in(cache: Path, tensor: int = 1) -> EngineConfig:
    """Returns settings that keep programs in `cache`, with kernels that are built already."""
    cache.mkdir(exist_ok=True)
    if not (native := cache / "native").is_symlink():
        native.symlink_to(DEFAULT_BUILD_DIR / "native", target_is_directory=True)
    return replace(SMALL, decode_steps=2, tensor_parallel=tensor, compile_cache_dir=cache)


def main() -> None:
    model, cache, tensor = sys.argv[1:]
    json.dump([start(Path(model), config_in(Path(cache), int(tensor))) for _ in range(2)], sys.stdout)


if __name__ == "__main__":
    main()
