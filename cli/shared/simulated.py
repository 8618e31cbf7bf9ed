"""Shows what `penstock plan --trace` simulated."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.tools.plan import Simulated
from penstock.tools.plan.simulation import Figures

NOT_MEASURED = (
    "Step times are estimates: of the programs that libtpu compiled, by their bytes, cycles and links. "
    "None was measured, and real steps may be slower. Redis, tokenizing and delivery take no time here."
)


def simulated_as_dict(simulated: Simulated) -> dict[str, Any]:
    """Returns the figures, with times in seconds. Each replica's rates are averaged over the whole simulated time."""
    return {"step_times": NOT_MEASURED, **asdict(simulated)}


def show_simulated(screen: Console, simulated: Simulated, source: str) -> None:
    waited = f"at most {simulated.longest_queue:,} waited at once for a replica with room"
    screen.print(f"\n[bold]{escape(source)}[/]: served in {simulated.seconds:,.1f} s; {waited}.")
    table = Table(
        "", "requests", "prompt tokens", "cached", "output tokens/s", "TTFT ms p50", "p90", "p99", "ITL ms p50", "p99",
        "sequences/step", "busy", "preemptions",
        title="simulated", title_justify="left",
    )  # fmt: skip
    table.add_row("total", *_cells(simulated.total))
    for number, figures in enumerate(simulated.replicas, 1) if len(simulated.replicas) > 1 else ():
        table.add_row(f"replica {number}", *_cells(figures))
    screen.print(table)
    screen.print(f"[dim]{NOT_MEASURED}[/]")


def _cells(figures: Figures) -> list[str]:
    ttft, itl = figures.ttft_s, figures.itl_s
    return [
        f"{figures.requests:,}",
        f"{figures.prompt_tokens:,}",
        f"{figures.cached_tokens:,}",
        f"{figures.output_tokens_per_s:,.0f}",
        *(f"{1e3 * value:,.1f}" for value in (ttft.p50, ttft.p90, ttft.p99)),
        *(f"{1e3 * value:,.2f}" for value in (itl.p50, itl.p99)),
        f"{figures.sequences_per_step:.1f}",
        f"{figures.utilisation:.0%}",
        f"{figures.preemptions:,}",
    ]
