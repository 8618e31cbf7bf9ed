"""Checks how well the simulator of `penstock plan --trace` predicts a real engine on CPU.

    python -m benchmarks.simulation --model tiny --rounds 8
    python -m benchmarks.simulation --paced --model nano --rates 8 16 --fitted-rate 12

Runs alternate: traces whose steps are recorded, then one to predict, with other lengths and arrivals. The simulation
gets only the step times fitted to the runs before and after, and the trace's own lengths and arrivals. Neither side
speculates. The output has each figure of the real runs, their spread, and simulated over real, pair by pair: the median
over all rounds, and over those in which steps were as long after the run as before. A last ratio uses the steps of the
predicted run itself, which leaves out changes of the machine's speed. With --paced the engine is the real one and its
device a timer, as an accelerator is to a host: other work on the machine hardly shows.

A JSON line goes to `benchmarks/results/simulation.jsonl`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engine import engine_arguments, loaded_engine, shared_load
from benchmarks.parts.paced_engine import paced_engine
from benchmarks.parts.step_recording import MeasuredSteps, StepRecord, recorded
from benchmarks.parts.tables import RESULTS, table_of
from penstock.engine import Engine
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.tools.bench.machine import describe_machine
from penstock.tools.bench.on_engine import run_on_engine
from penstock.tools.bench.report import append_result
from penstock.tools.bench.summary import Summary
from penstock.tools.bench.traffic.load import Load
from penstock.tools.plan.replica import Replica
from penstock.tools.plan.simulation import simulate
from penstock.tools.plan.traces import Trace, TracedRequest

_DRAWS = 3  # simulations per trace
_FITTED_SEED = 1000
_STEADY = 1.1  # the machine is steady if steps change by no more than this factor

Figures = Mapping[str, float]


def trace_of(load: Load) -> Trace:
    """Returns a load's arrivals and lengths, without tokens."""
    return Trace(
        tuple(
            TracedRequest(time_s, len(request.prompt), request.max_tokens, request.max_tokens)
            for time_s, request in zip(load.times_s(), load.requests, strict=True)
        )
    )


def foretold(engine: Engine, trace: Trace, steps: MeasuredSteps) -> Figures:
    """Returns the simulation's medians over several draws."""
    found = []
    for seed in range(_DRAWS):
        figures = simulate(trace, [replica_like(engine, replace(steps, seed=seed))]).total
        found.append(
            {
                "output tokens/s": figures.output_tokens_per_s,
                "TTFT p50, ms": 1e3 * figures.ttft_s.p50,
                "TTFT p90, ms": 1e3 * figures.ttft_s.p90,
                "ITL p50, ms": 1e3 * figures.itl_s.p50,
                "ITL p99, ms": 1e3 * figures.itl_s.p99,
                "steps": float(figures.steps),
            }
        )
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def replica_like(engine: Engine, timing: MeasuredSteps) -> Replica:
    """Makes a replica with scheduler and pages like `engine`, planning with its warm-up's times."""
    pool, geometry = engine._pool, engine._runner.geometry  # noqa: SLF001
    scheduler = Scheduler(
        PagePool(
            [store.num_pages for store in pool.stores],
            pool.page_size,
            windows=pool.needs.windows,
            kinds=pool.needs.kinds,
            prefix_caching=False,
        ),
        max_num_seqs=engine.max_num_seqs,
        max_batch_tokens=geometry.max_batch_tokens,
        max_model_len=engine.max_model_len,
        max_rows=geometry.max_rows,
    )
    return Replica(scheduler, engine._pace, timing, engine.max_num_seqs, takes_all=True)  # noqa: SLF001


def measured(engine: Engine, load: Load) -> tuple[Figures, list[StepRecord]]:
    before = engine.stats().steps_total
    with recorded(engine) as records:
        summary = Summary.of(run_on_engine(engine, engine.tokenizer, load))
    if summary.ttft_ms is None or summary.itl_ms is None:
        raise RuntimeError("no request of this load got two tokens")
    return {
        "output tokens/s": summary.output_tokens_per_s,
        "TTFT p50, ms": summary.ttft_ms.p50,
        "TTFT p90, ms": summary.ttft_ms.p90,
        "ITL p50, ms": summary.itl_ms.p50,
        "ITL p99, ms": summary.itl_ms.p99,
        "steps": float(engine.stats().steps_total - before),
    }, records


@dataclass(frozen=True, slots=True)
class Pair:
    """A real run, and the simulation of its trace."""

    real: Figures
    told: Figures  # with the steps of other traces
    told_by_own: Figures
    drift: float  # how much longer the run's steps would take after it than before, from the recorded steps

    @property
    def is_steady(self) -> bool:
        return abs(math.log(self.drift)) < math.log(_STEADY)


def runs(engine: Engine, arguments: argparse.Namespace, kept: list[StepRecord]) -> Iterator[tuple[str, Pair]]:
    """Yields the pairs of one round. With --steps nothing is recorded for them; recorded steps go to `kept` too."""
    given = None if arguments.steps is None else MeasuredSteps.read(arguments.steps)
    before = recorded_steps(engine, arguments) if given is None else []
    kept += before
    for name, load in told_loads(arguments).items():
        real, own = measured(engine, load)
        after = recorded_steps(engine, arguments) if given is None else []
        kept += after
        trace, steps = trace_of(load), given or MeasuredSteps.fitted(before + after)
        yield (
            name,
            Pair(
                real,
                foretold(engine, trace, steps),
                foretold(engine, trace, MeasuredSteps.fitted(own)),
                1.0 if given else drift(before, after, own),
            ),
        )
        before = after


def drift(before: Sequence[StepRecord], after: Sequence[StepRecord], own: Sequence[StepRecord]) -> float:
    first_s, then_s = (
        sum(steps.usual_s(record.shape) for record in own) for steps in map(MeasuredSteps.fitted, (before, after))
    )
    return then_s / first_s


def recorded_steps(engine: Engine, arguments: argparse.Namespace) -> list[StepRecord]:
    count, options = arguments.fitted_requests, {"seed": _FITTED_SEED}
    burst = shared_load(arguments.model, count, **options)
    stream = shared_load(arguments.model, count, arrivals="poisson", rate=arguments.fitted_rate, **options)
    return measured(engine, burst)[1] + measured(engine, stream)[1]


def told_loads(arguments: argparse.Namespace) -> dict[str, Load]:
    model, count = arguments.model, arguments.requests
    rates = {f"{rate:g}/s": shared_load(model, count, arrivals="poisson", rate=rate) for rate in arguments.rates}
    return {"burst": shared_load(model, count), **rates}


def rows(pairs: Mapping[str, Sequence[Pair]]) -> Iterator[dict[str, Any]]:
    for load, found in pairs.items():
        for name in found[0].real:
            real = sorted(pair.real[name] for pair in found)
            ratios = sorted(pair.told[name] / pair.real[name] for pair in found)
            steady = [pair.told[name] / pair.real[name] for pair in found if pair.is_steady]
            yield {
                "load": load,
                "figure": name,
                "real": round(statistics.median(real), 2),
                "least": round(real[0], 2),
                "most": round(real[-1], 2),
                "simulated": round(statistics.median(pair.told[name] for pair in found), 2),
                "simulated/real": round(statistics.median(ratios), 3),
                "from": round(ratios[0], 3),
                "to": round(ratios[-1], 3),
                "steady": round(statistics.median(steady), 3) if steady else None,
                "of": len(steady),
                "by own steps": round(statistics.median(p.told_by_own[name] / p.real[name] for p in found), 3),
            }


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.set_defaults(requests=48)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rates", type=float, nargs="+", default=[3.0, 6.0], help="of the traces that are foretold")
    parser.add_argument("--fitted-rate", type=float, default=4.5, help="of the traces whose steps are recorded")
    parser.add_argument("--fitted-requests", type=int, default=32)
    parser.add_argument("--paced", action="store_true", help="a timer as the device; --model gives token ids only")
    parser.add_argument("--keep", type=Path, help="write the step times fitted to all that was recorded to this file")
    parser.add_argument("--steps", type=Path, help="foretell by the step times in this file, and record none")
    arguments = parser.parse_args()
    machine = describe_machine()
    if arguments.paced:
        engine = paced_engine(64, arguments.max_batch_tokens)
    else:
        engine, _ = loaded_engine(arguments, speculation="off")
    pairs: dict[str, list[Pair]] = {}
    kept: list[StepRecord] = []
    for _ in range(arguments.rounds):
        for name, pair in runs(engine, arguments, kept):
            pairs.setdefault(name, []).append(pair)
    if arguments.keep is not None:
        MeasuredSteps.fitted(kept).write(arguments.keep)
    table = list(rows(pairs))
    title = "a paced device" if arguments.paced else f"{arguments.model} {arguments.dtype}"
    Console(width=160).print(table_of(f"{title}, {arguments.rounds} rounds", table, digits=3))
    record = {
        "title": title,
        "options": {name: str(value) for name, value in vars(arguments).items()},
        "machine": machine,
        "rows": table,
    }
    append_result(RESULTS / "simulation.jsonl", record)


if __name__ == "__main__":
    main()
