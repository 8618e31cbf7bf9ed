"""Measures what the service around an engine costs: the same load on the bare engine and through Redis, in one run.

    python -m benchmarks.service engine        # throughput and time to first token, against the bare engine
    python -m benchmarks.service publishing    # chunks per second of one worker, against a bare pipeline of redis-py
    python -m benchmarks.service readers       # what readers cost Redis, and one client that reads 1,000 replies
    python -m benchmarks.service slow-redis    # whether a slow Redis slows the engine

Without a name all of them run. Each prints a table and appends a line to `benchmarks/results/service.jsonl`.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console

from benchmarks.engine import engine_arguments
from benchmarks.parts import service_engine, service_publishing, service_readers
from benchmarks.parts.tables import RESULTS, table_of
from penstock.serving import garbage
from penstock.tools.bench.report import append_result
from penstock.worker.logs import configure_logs

PARTS = {
    "engine": service_engine.against_bare_engine,
    "publishing": service_publishing.against_bare_pipeline,
    "readers": service_readers.cost_of_readers,
    "slow-redis": service_engine.with_slow_redis,
}


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured, in turn")
    parser.add_argument("--flush-interval-ms", type=int, default=30, help="of the worker, in the part `engine`")
    arguments = parser.parse_args()
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"{name} is not one of {', '.join(PARTS)}")
    configure_logs("error", "console", sys.stderr)
    garbage.settle()
    for name in arguments.parts or PARTS:
        load = os.getloadavg()[0]
        rows = PARTS[name](arguments)
        Console().print(table_of(f"{name} (load of the machine before: {load:.1f})", rows, digits=3))
        append_result(RESULTS / "service.jsonl", {"part": name, "options": vars(arguments), "rows": rows})


if __name__ == "__main__":
    main()
