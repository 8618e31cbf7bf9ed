"""Measures the lanes under load, with real workers and paced devices, against the bars in docs/lanes.md.

    python -m benchmarks.lanes tenants     # a small tenant beside a crowd, against half the fleet alone
    python -m benchmarks.lanes windows     # interactive requests beside batch work, against either alone
    python -m benchmarks.lanes prefixes    # prefix hits of four workers, against one large one; a dead and a slow one
    python -m benchmarks.lanes backlog     # the scripts behind 1,000,000 entries that wait, against 1,000

Without a name all of them run. Each prints tables and appends a line to `benchmarks/results/lanes.jsonl`. Ratios
compare figures of one run. A timer stands in for the device (`benchmarks.parts.paced_engine`). The rest is as in
production.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from rich.console import Console

from benchmarks.lanes import backlog, prefixes, tenants, windows
from benchmarks.lanes.figures import Measured
from benchmarks.parts.tables import RESULTS, table_of
from penstock.tools.bench.report import append_result

SCENARIOS: dict[str, tuple[Callable[[float, int], Coroutine[Any, Any, Measured]], float]] = {
    "tenants": (tenants.measure, 25.0),
    "windows": (windows.measure, 25.0),
    "prefixes": (prefixes.measure, 15.0),
    "backlog": (backlog.measure, 10.0),
}
"""The measuring function of each scenario, and the seconds per side by default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seconds", type=float, help="that each side is under load")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.scenarios:
        if name not in SCENARIOS:
            parser.error(f"{name} is not one of {', '.join(SCENARIOS)}")
    for name in arguments.scenarios or SCENARIOS:
        measure, seconds = SCENARIOS[name]
        load = os.getloadavg()[0]
        seconds = arguments.seconds or seconds
        found = asyncio.run(measure(seconds, arguments.seed))
        bars = [bar.row() for bar in found.bars]
        Console(width=160).print(table_of(f"{name} (load of the machine before: {load:.1f})", found.rows))
        Console(width=160).print(table_of("bars", bars, digits=3))
        options = {"seconds": seconds, "seed": arguments.seed}
        append_result(RESULTS / "lanes.jsonl", {"scenario": name, "options": options, "rows": found.rows, "bars": bars})


if __name__ == "__main__":
    main()
