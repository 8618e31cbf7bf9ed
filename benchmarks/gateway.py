"""Measures what the gateway costs over the native client, and over a server that streams the same events from memory.

    python -m benchmarks.gateway latency    # time to the first token, one request after the other
    python -m benchmarks.gateway streams    # tokens per second of 64 streams at once
    python -m benchmarks.gateway chunks     # processor time per chunk of the serving process, against bare Starlette

Without a name all of them run. In each round both sides are measured in turn. Redis, the worker, the gateway and the
clients are processes of their own. Each part prints a table and appends a line to `benchmarks/results/gateway.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from rich.console import Console

from benchmarks.parts import gateway_sides
from benchmarks.parts.tables import RESULTS, table_of
from penstock.tools.bench.report import append_result

PARTS = {
    "latency": gateway_sides.latency,
    "streams": gateway_sides.streams,
    "chunks": gateway_sides.chunks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured, in turn")
    arguments = parser.parse_args()
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"{name} is not one of {', '.join(PARTS)}")
    for name in arguments.parts or PARTS:
        load = os.getloadavg()[0]
        rows: list[dict[str, Any]] = asyncio.run(PARTS[name](arguments.rounds))
        Console().print(table_of(f"{name} (load of the machine before: {load:.1f})", rows, digits=3))
        append_result(RESULTS / "gateway.jsonl", {"part": name, "options": vars(arguments), "rows": rows})


if __name__ == "__main__":
    main()
