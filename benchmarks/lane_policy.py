"""Simulates the lanes' policy at the size of a large service, and measures what its calls cost one slot of Redis.

    python -m benchmarks.lane_policy
    python -m benchmarks.lane_policy --workers 1000 --per-day 10e6 --seconds 120

Minutes of traffic with a burst of ten tenants and the death of one worker in a hundred are played through the model of
the lanes, then through first in, first out, then with homes for prompts that begin alike. The same run measures what
each call costs the server, with as many consumers as workers. Calls that requests cause are counted in the simulation;
the rates of calls that workers make by the clock are computed. Appends to `benchmarks/results/lane_policy.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.lanes import costs
from benchmarks.lanes.costs import RUNNING, Cost
from benchmarks.lanes.simulated import OUTPUT_WEIGHT, Homes, Simulation
from benchmarks.lanes.traffic import BATCH, BURSTING, INTERACTIVE, Size, Traffic, drawn
from benchmarks.parts.tables import RESULTS, table_of
from penstock.tools.bench.report import append_result

DEATHS = 0.01  # of the fleet, in the middle of the burst
SCAN_S = 1.5  # at the earliest, between two looks for dead workers
AFTER_S = 30.0  # after the burst, waits still count as part of it
MOST_LOAD = 0.5  # of one core: most load that a slot's server should get
RUNS: tuple[tuple[str, bool, Homes], ...] = (
    ("lanes", True, "none"),
    ("first in, first out", False, "none"),
    ("lanes, home if free", True, "if free"),
    ("lanes, waits for home", True, "patient"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Size()
    parser.add_argument("--workers", type=int, default=usual.workers)
    parser.add_argument("--tenants", type=int, default=usual.tenants)
    parser.add_argument("--per-day", type=float, default=usual.per_day, help="requests")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="that are played")
    parser.add_argument("--steal-s", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    first_s = 0.4 * arguments.seconds
    size = Size(
        workers=arguments.workers, tenants=arguments.tenants, per_day=arguments.per_day, seconds=arguments.seconds,
        burst_s=(first_s, 0.6 * arguments.seconds),
    )  # fmt: skip
    traffic = drawn(size, arguments.seed)
    tables: dict[str, list[dict[str, Any]]] = {"waits in and after the burst, s": [], "fleets": []}
    runs: dict[str, Simulation] = {}
    for name, is_fair, homes in RUNS:
        begun_s = time.perf_counter()
        died_s = sum(size.burst_s) / 2
        run = Simulation(
            size, traffic, homes=homes, is_fair=is_fair, steal_s=arguments.steal_s, deaths={died_s: DEATHS},
            seed=arguments.seed,
        )  # fmt: skip
        run.run()
        runs[name] = run
        tables["waits in and after the burst, s"] += waits(name, run)
        tables["fleets"].append(summary(name, run, time.perf_counter() - begun_s))
    tables["served to tenants that always waited in the burst"] = service_bound(runs["lanes"])
    found = asyncio.run(costs.measure(size.workers))
    tables["one slot, one queue"] = slot_load(size, runs["lanes"], found)
    tables["several queues behind one name, load of each one's core"] = split(tables["one slot, one queue"])
    for title, rows in tables.items():
        if rows:
            Console(width=160).print(table_of(title, rows, digits=3))
    append_result(
        RESULTS / "lane_policy.jsonl",
        {
            "size": asdict(size),
            "seed": arguments.seed,
            "tables": tables,
            "costs": {key: asdict(each) for key, each in found.items()},
        },
    )


def waits(name: str, run: Simulation) -> list[dict[str, Any]]:
    """Returns the waits from the arrival to a slot."""
    traffic: Traffic = run.traffic
    at_s, tenant, priority = np.array(traffic.at_s), np.array(traffic.tenant), np.array(traffic.priority)
    waits_s = np.array(run.waits_s)
    first_s, last_s = run.size.burst_s
    is_counted = (at_s >= first_s) & (at_s < last_s + AFTER_S) & (at_s < run.size.seconds)
    began = waits_s >= 0
    waited_s = np.where(began, waits_s, run.size.seconds - at_s)  # for requests that still wait, the wait so far
    is_bursting = (tenant >= BURSTING.start) & (tenant < BURSTING.stop)
    classes = {
        "interactive": (priority == INTERACTIVE) & ~is_bursting,
        "usual, 10 heaviest": (priority == 0) & (tenant < BURSTING.start),
        "usual, next 1,000": (priority == 0) & (tenant >= BURSTING.stop) & (tenant < 1000),
        "usual, all others": (priority == 0) & (tenant >= 1000),
        "usual, the bursting": is_bursting,
        "batch": (priority == BATCH) & ~is_bursting,
    }
    rows = []
    for kind, is_in in classes.items():
        values = waited_s[is_in & is_counted]
        if values.size:
            p50, p99, most = (float(value) for value in np.percentile(values, (50, 99, 100)))
            share = float(np.mean(~began[is_in & is_counted]))
            rows.append(
                {"policy": name, "requests of": kind, "count": int(values.size), "p50": p50, "p99": p99, "max": most,
                 "still waiting": share}
            )  # fmt: skip
    return rows


def summary(name: str, run: Simulation, took_s: float) -> dict[str, Any]:
    size, resumed = run.size, run.resumed_s or [0.0]
    return {
        "policy": name,
        "begun": sum(wait_s >= 0 for wait_s in run.waits_s),
        "utilisation": run.busy_s / (size.workers * size.slots * size.seconds),
        "longest queue": run.longest_queue,
        "prefix hits": run.hits / max(1, run.num_begun_alike),
        "taken over": len(run.resumed_s),
        "until then, max s": max(resumed),
        "simulated in, s": took_s,
    }


def service_bound(run: Simulation) -> list[dict[str, Any]]:
    """Checks the bound by priority, between any two tenants that waited in every second of the burst's second half.

    The bound is twice the cost of all that can run at once, in mean requests.
    """
    first_s, last_s = run.size.burst_s
    samples = [each for each in run.samples if (first_s + last_s) / 2 <= each[0] <= last_s]
    traffic = run.traffic
    longest = [p + OUTPUT_WEIGHT * o for p, o in zip(traffic.prompt, traffic.output, strict=True)]
    at_once = run.size.workers * run.size.slots
    rows = []
    for priority in (INTERACTIVE, 0, BATCH):
        waiting = [{name for name, band in seats.items() if band == priority} for _, _, seats in samples]
        always = set.intersection(*waiting) if waiting else set()
        if len(always) < 2:
            continue
        served = [samples[-1][1][name] - samples[0][1][name] for name in always]
        rows.append({
            "priority": priority, "tenants": len(always), "seconds": samples[-1][0] - samples[0][0],
            "served at least": min(served), "at most": max(served), "difference": max(served) - min(served),
            "in mean requests": (max(served) - min(served)) / float(np.mean(longest)),
            "of the bound, %": 100 * (max(served) - min(served)) / (2.0 * at_once * float(np.mean(longest))),
        })  # fmt: skip
    return rows


def slot_load(size: Size, run: Simulation, found: Mapping[str, Cost]) -> list[dict[str, Any]]:
    """Returns the calls per second in the queue's slot. Microseconds are measured, and so are rates that requests
    cause.
    """
    per_s = {name: run.calls[name] / size.seconds for name in ("enqueue", "take", "take, none", "blocked read", "ack")}
    workers = size.workers
    rates: list[tuple[str, str, float, str]] = [
        ("enqueue", "requests", per_s["enqueue"], "enqueue"),
        ("take with its place", "requests", per_s["take"], "take, one of many"),
        ("take that finds none", "requests", per_s["take, none"], "take, none"),
        ("blocked read that finds one", "requests", per_s["blocked read"], "read, none"),
        ("ack", "requests", per_s["ack"], "ack"),
        ("charge", "workers", workers * 1.0, f"charge of {RUNNING}"),
        ("sweep", "workers", workers * 2.0, "sweep, none"),
        ("take that finds none", "workers", workers * 1.0, "take, none"),
        ("blocked read that lapses", "workers", workers * 1.0, "read, none"),
        ("calls: take, and blocked read", "workers", workers * 1.0, "take calls, none"),
        ("calls: blocked read that lapses", "workers", workers * 1.0, "read, none"),
        ("beat", "workers", workers * 0.3, "beat"),
        ("look for the dead: list of consumers, 2 in 1.5 s", "workers", 2 / SCAN_S, "consumers"),
        ("look for the dead: heartbeats of all, 2 in 1.5 s", "workers", 2 / SCAN_S, "beats of all"),
        ("measure, one for all", "workers", 1.0, "measure"),
        ("scrape, 1 in 15 s", "workers", workers / 15, "scrape"),
    ]
    return [
        {
            "call": name, "grows with": by, "per s": rate, "us": found[cost].us, "cores": rate * found[cost].us / 1e6,
            "bytes in": found[cost].bytes_in, "bytes out": found[cost].bytes_out,
        }
        for name, by, rate, cost in rates
    ]  # fmt: skip


def split(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the load of a slot if the same work is shared by that many queues."""
    by = {kind: sum(row["cores"] for row in rows if row["grows with"] == kind) for kind in _KINDS}
    found = []
    for queues in (1, 2, 4, 8, 16, 32, 64, 128):
        load = sum(by.values()) / queues
        found.append({
            "queues": queues, "requests": by["requests"] / queues, "workers": by["workers"] / queues, "all": load,
            "will do": "yes" if load <= MOST_LOAD else "no",
        })  # fmt: skip
    return found


_KINDS = ("requests", "workers")


if __name__ == "__main__":
    main()
