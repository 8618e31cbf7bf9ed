"""What a long prompt does to streams that run: their longest gap while it is computed, against their usual one.

    python -m benchmarks.stalls --model tiny --dtype bfloat16 --streams 32 --prompt 900

In turn, in one run: an engine that paces prompts, and one that does not. Prints a table and appends it to
`benchmarks/results/stalls.jsonl`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

from rich.console import Console

from benchmarks.engine import RESULTS, engine_arguments, loaded_engine
from benchmarks.tables import table_of
from penstock.engine import Engine, EngineConfig, Output, Request, SamplingParams
from penstock.worker.bench.presets import GEOMETRIES
from penstock.worker.bench.report import append_result

_BEFORE, _BETWEEN = 40, 40  # steps that streams run alone


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=900, help="tokens of the prompts that come later")
    parser.add_argument("--prompts", type=int, default=4, help="how many come, one after the other")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    limits = (EngineConfig().prefill_share, 1.0)
    engines = {limit: loaded_engine(arguments, prefill_share=limit)[0] for limit in limits}
    rows = []
    for number in range(arguments.rounds):
        for limit, engine in engines.items():
            rows.append({"round": number + 1, "prefill_share": limit, **measure(engine, arguments, number)})
    Console().print(table_of(f"{arguments.model} {arguments.dtype}, {arguments.streams} streams", rows))
    append_result(RESULTS / "stalls.jsonl", {"options": vars(arguments), "rows": rows})


def measure(engine: Engine, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Gaps of the streams, and how long the prompts took, in milliseconds."""
    vocab = GEOMETRIES[arguments.model].vocab_size
    endless = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    short = dataclasses.replace(endless, max_tokens=1)
    for place in range(arguments.streams):
        engine.add(Request(f"s{place}", tuple((place * 31 + i * 7) % vocab for i in range(16)), endless))
    for _ in range(_BEFORE):
        engine.step()
    usual_ms, waits_ms, stalls_ms = _gaps_ms(engine, _BETWEEN), [], []
    for place in range(arguments.prompts):
        prompt = tuple((seed * 977 + place * 131 + i * 13) % vocab for i in range(arguments.prompt))
        engine.add(Request(f"p{place}", prompt, short))
        start = time.perf_counter()
        stalls_ms += _gaps_until(engine, f"p{place}")
        waits_ms.append((time.perf_counter() - start) * 1e3)
        usual_ms += _gaps_ms(engine, _BETWEEN)
    for place in range(arguments.streams):
        engine.abort(f"s{place}")
    while engine.has_work():
        engine.step()
    median_ms = statistics.median(usual_ms)
    return {
        "usual gap p50, ms": round(median_ms, 2),
        "longest usual gap, times": round(max(usual_ms) / median_ms, 2),
        "gap while prompts come p50, times": round(statistics.median(stalls_ms) / median_ms, 2),
        "longest, times": round(max(stalls_ms) / median_ms, 2),
        "prompt's TTFT p50, ms": round(statistics.median(waits_ms), 1),
    }


def _gaps_ms(engine: Engine, count: int) -> list[float]:
    return [_timed_step(engine)[0] for _ in range(count)]


def _gaps_until(engine: Engine, request_id: str) -> list[float]:
    """Between steps, until the request has its token."""
    gaps_ms = []
    is_there = False
    while not is_there:
        gap_ms, outputs = _timed_step(engine)
        is_there = any(output.request_id == request_id for output in outputs)
        gaps_ms.append(gap_ms)
    return gaps_ms


def _timed_step(engine: Engine) -> tuple[float, list[Output]]:
    start = time.perf_counter()
    outputs = engine.step()
    return (time.perf_counter() - start) * 1e3, outputs


if __name__ == "__main__":
    main()
