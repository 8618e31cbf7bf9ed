"""Renders the state of a queue with rich: the tables and their summary. Decides nothing and asks nobody."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.shared.redis import visible
from penstock.protocol.operations.snapshot import DeadLetter, RunningRequest, Snapshot, Worker, WorkerState
from penstock.protocol.operations.waiting import WaitingRequest

SPARKS = "▁▂▃▄▅▆▇█"
SHOWN_DIGITS = 12  # shown of a digest
_STYLES: dict[WorkerState, str] = {
    "starting": "cyan", "live": "green", "unready": "yellow", "draining": "cyan", "silent": "bold red", "lost": "red",
}  # fmt: skip
_SELECTED = "reverse"


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Selects the rows of a table that are shown.

    Args:
        most: rows to show at most; None: all.
        selected: index of the row that keys act on; None: it is in another table.
    """

    most: int | None = None
    selected: int | None = None

    def window(self, count: int) -> range:
        """Returns the rows that are shown, the selected one among them."""
        if self.most is None or count <= self.most:
            return range(count)
        first = 0 if self.selected is None else max(0, min(self.selected - self.most // 2, count - self.most))
        return range(first, first + self.most)

    @property
    def folds(self) -> bool:
        """Whether a cell may take several lines rather than be cut."""
        return self.most is None

    def style_of(self, place: int) -> str:
        return _SELECTED if place == self.selected else ""


ALL = RowSelection()


def workers_table(workers: Sequence[Worker], rows: RowSelection = ALL) -> Table:
    table = _table(rows.folds, "worker", "state", "model", "version", "device")
    for title in ("requests", "slots", "pages", "tokens/s", "heartbeat"):
        table.add_column(title, justify="right", no_wrap=True)
    for place in rows.window(len(workers)):
        worker = workers[place]
        table.add_row(*_worker_cells(worker), style=rows.style_of(place))
    return table


def _worker_cells(worker: Worker) -> tuple[RenderableType, ...]:
    report = worker.report
    state = Text(worker.state, _STYLES[worker.state])
    if worker.state == "silent" and worker.reported_s is not None:
        state.append(f" {duration(worker.reported_s)}")
    elif report is not None and report.unready and worker.state in ("starting", "unready"):
        state.append(f": {visible(report.unready)}")
    if report is None:
        model = (worker.digest or "")[:SHOWN_DIGITS]
        return _text(worker.name), state, _text(model), "", "", f"{worker.num_taken:,}", "", "", "", _beat(worker)
    slots = f"{report.running_sequences:,}/{report.slots:,}" if report.slots else ""
    if report.waiting_sequences:
        slots += f" +{report.waiting_sequences:,}"
    used = report.pages - report.free_pages - report.cached_pages
    return (
        _text(worker.name), state, _text(_model(worker)), _text(report.version), _text(report.device or ""),
        f"{worker.num_taken:,}", slots, f"{used:,}/{report.pages:,}" if report.pages else "",
        f"{report.tokens_per_s:,.0f}" if report.slots else "", _beat(worker),
    )  # fmt: skip


def _model(worker: Worker) -> str:
    """Returns the name, and what tells models of one name apart."""
    name = worker.report.model if worker.report is not None else None
    digest = (worker.digest or "")[:SHOWN_DIGITS]
    return " ".join(part for part in ((name or "").rpartition("/")[2], digest) if part)


def _beat(worker: Worker) -> str:
    """Returns the heartbeat's age; of a version that does not report it, the time left."""
    if worker.heartbeat_left_ms is None:
        return ""
    if worker.heartbeat_s is None:
        return f"lapses in {duration(worker.heartbeat_left_ms / 1000)}"
    return duration(worker.heartbeat_s)


def running_table(running: Sequence[RunningRequest], rows: RowSelection = ALL) -> Table:
    """Makes one row per request that a worker has."""
    table = _table(rows.folds, "request", "worker", "tenant", "phase")
    for title in ("age", "here for", "prompt", "tokens", "takeovers"):
        table.add_column(title, justify="right", no_wrap=True)
    for place in rows.window(len(running)):
        each = running[place]
        table.add_row(
            _text(each.id), _text(each.worker), _text(each.tenant or ""), each.phase, duration(each.age_s),
            duration(each.running_s), f"{each.prompt_tokens:,}", f"{each.tokens:,}", str(each.takeovers or ""),
            style=rows.style_of(place),
        )  # fmt: skip
    return table


def waiting_table(waiting: Sequence[WaitingRequest]) -> Table:
    """Makes one row per waiting request."""
    table = _table(True, "entry", "tenant")
    for title in ("priority", "bytes", "age"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in waiting:
        table.add_row(
            _text(each.entry), _text(each.tenant), str(each.priority), f"{each.num_bytes:,}", duration(each.age_s)
        )
    return table


def lanes_table(snapshot: Snapshot, most: int | None = None) -> Table:
    """Makes one row per priority, and below it the tenants that are next."""
    table = _table(most is None, "lane")
    for title in ("waiting", "tokens", "oldest", "served"):
        table.add_column(title, justify="right", no_wrap=True)
    rows: list[tuple[RenderableType, ...]] = []
    for lane in snapshot.lanes:
        tenants = "1 tenant" if lane.num_tenants == 1 else f"{lane.num_tenants:,} tenants"
        name = Text(f"priority {lane.priority}", "bold").append(f", {tenants}", "not bold dim")
        rows.append((name, f"{lane.num_requests:,}", f"{lane.tokens:,}", duration(lane.oldest_s), ""))
        rows += [
            (_text(f"  {tenant.name or '(none)'}"), f"{tenant.num_waiting:,}", "", "", f"{tenant.served:,.0f}")
            for tenant in lane.tenants
            if tenant.num_waiting
        ]
    for row in rows[:most]:
        table.add_row(*row)
    return table


def letters_table(letters: Sequence[DeadLetter], rows: RowSelection = ALL) -> Table:
    """Makes one row per request that was given up."""
    table = _table(rows.folds, "dead letter", "request", "code", "worker")
    for title in ("given up", "crashes"):
        table.add_column(title, justify="right", no_wrap=True)
    for place in rows.window(len(letters)):
        each = letters[place]
        crashes = "" if each.crashes is None else str(each.crashes)
        table.add_row(
            _text(each.id), _text(each.request_id), _text(each.code), _text(each.worker),
            f"{duration(each.age_s)} ago", crashes, style=rows.style_of(place),
        )  # fmt: skip
    return table


def summary(snapshot: Snapshot, history: Sequence[float], width: int = 40) -> tuple[Text, Text, Text]:
    """Summarizes the queue in three lines.

    Args:
        snapshot: the last one.
        history: tokens per second, the last one last.
        width: of the sparkline, in columns.
    """
    counts: dict[str, int] = {}
    for worker in snapshot.workers:
        counts[worker.state] = counts.get(worker.state, 0) + 1
    fleet = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "no workers"
    title = Text.assemble(("penstock ", "bold"), f"queue {snapshot.queue}", ("  ·  ", "dim"), fleet)
    oldest = "" if not snapshot.num_waiting or snapshot.oldest_s is None else f", oldest {duration(snapshot.oldest_s)}"
    new = f" ({snapshot.num_new:,} not counted yet)" if snapshot.num_new else ""
    dead = "1 dead letter" if snapshot.num_dead == 1 else f"{snapshot.num_dead:,} dead letters"
    malformed = f", {snapshot.num_malformed:,} malformed" if snapshot.num_malformed else ""
    slots = f" on {snapshot.slots:,} slots" if snapshot.slots else ""
    queue = Text.assemble(
        (f"{snapshot.num_waiting:,} waiting", "bold yellow" if snapshot.num_waiting else ""), f"{oldest}{new}",
        ("  ·  ", "dim"), f"{snapshot.num_running:,} running{slots}", ("  ·  ", "dim"),
        (f"{dead}{malformed}", "red" if snapshot.num_dead or snapshot.num_malformed else ""),
    )  # fmt: skip
    rate = Text.assemble((f"{snapshot.tokens_per_s:,.0f} tokens/s ", "bold"), (sparkline(history[-width:]), "green"))
    if snapshot.load is not None and snapshot.workers:
        rate.append(f"  wanted workers {snapshot.load.wanted_workers:,}", "dim")
    return title, queue, rate


def sparkline(values: Iterable[float]) -> str:
    """Draws one block per value, as high as its share of the largest."""
    values = list(values)
    most = max(values, default=0.0)
    if most <= 0:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[min(len(SPARKS) - 1, round(value / most * (len(SPARKS) - 1)))] for value in values)


def duration(seconds: float) -> str:
    """Formats a duration briefly."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02} h"


def _table(folds: bool, *titles: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    return table


def _text(value: str) -> Text:
    """Renders foreign text: no markup, and nothing that moves the cursor."""
    return Text(visible(value))
