"""Reports a run as a table, and its problems."""

from __future__ import annotations

from penstock.tools.chaos.checker import FAULTS
from penstock.tools.chaos.reading import tokens_of
from penstock.tools.chaos.run import ChaosOutcome

MAX_PROBLEMS = 20  # shown at most


def table(outcome: ChaosOutcome) -> list[tuple[str, str]]:
    """Returns names and values."""
    history, verdict, wire = outcome.history, outcome.verdict, outcome.history.wire
    count = {kind: sum(event.kind == kind for event in history.events) for kind in ("kill", "freeze", "restart")}
    rows: list[tuple[str, object]] = [
        ("seed", outcome.plan.options.seed),
        ("requests", len(history.records)),
        ("tokens", sum(len(tokens_of(entry.fields)) for record in history.records.values() for entry in record.seen)),
        ("seconds", f"{history.seconds:.1f}"),
        ("kills", count["kill"]),
        ("zombies", count["freeze"]),
        ("server restarts", count["restart"]),
        ("dropped replies", wire.dropped),
        ("cut or delayed", wire.cut + wire.delayed),
        ("missed faults", history.missed),
        ("resumed", verdict.resumed),
        ("fenced writes", wire.fenced),
        ("absorbed retries", wire.absorbed),
        ("longest recovery", f"{verdict.longest_recovery_s:.1f} s"),
        *((fault, verdict.count(fault)) for fault in FAULTS),
    ]
    return [(name, str(value)) for name, value in rows]


def as_text(outcome: ChaosOutcome) -> str:
    """Returns the table and the first problems, each with its request's plan."""
    rows = table(outcome)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>10}" for name, value in rows]
    problems = outcome.verdict.problems
    for problem in problems[:MAX_PROBLEMS]:
        lines.append(f"{problem.fault}: {problem.request_id}: {problem.text}")
        record = outcome.history.records.get(problem.request_id)
        if record is not None:
            lines.append(f"    {record.request}")
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return "\n".join(lines)
