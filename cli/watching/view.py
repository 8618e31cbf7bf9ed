"""Renders the state of a queue with rich: the tables and their summary. Decides nothing and asks nobody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
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
_GAP = 2  # columns between those of a table
_CUT_AT = 24  # a longer name is cut before a column is left out


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Selects the rows of a table that are shown.

    Args:
        most: rows to show at most; None: all.
        selected: index of the row that keys act on; None: it is in another table.
        width: columns of the terminal; what does not fit beside the rest is left out. None: as wide as it gets.
    """

    most: int | None = None
    selected: int | None = None
    width: int | None = None

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
    return _filled(
        ("worker", "state", "model", "version", "device"),
        ("requests", "slots", "pages", "tokens/s", "heartbeat"),
        {place: _worker_cells(workers[place]) for place in rows.window(len(workers))},
        rows,
        leaving=("version", "device", "pages", "heartbeat", "model", "slots", "tokens/s"),
    )


def reasons(workers: Sequence[Worker]) -> list[str]:
    """Returns a line for each worker that says why it is not ready, which is too long for a cell."""
    said = ((worker.name, worker.report.unready) for worker in workers if worker.report is not None)
    return [f"{visible(name)}: {visible(why)}" for name, why in said if why]


def _worker_cells(worker: Worker) -> tuple[RenderableType, ...]:
    report = worker.report
    state = Text(worker.state, _STYLES[worker.state])
    if worker.state == "silent" and worker.reported_s is not None:
        state.append(f" {duration(worker.reported_s)}")
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
    cells = {
        place: (
            _text(each.id), _text(each.worker), _text(each.tenant or ""), each.phase, duration(each.age_s),
            duration(each.running_s), _prompt(each), f"{each.tokens:,}", str(each.takeovers or ""),
        )
        for place in rows.window(len(running))
        for each in [running[place]]
    }  # fmt: skip
    return _filled(
        ("request", "worker", "tenant", "phase"),
        ("age", "here for", "prompt", "tokens", "takeovers"),
        cells,
        rows,
        leaving=("here for", "prompt", "tenant", "age", "takeovers", "worker"),
    )


def _prompt(request: RunningRequest) -> str:
    """Returns the tokens of the prompt, and while it takes several steps how many of them are computed."""
    computed = f"{min(request.prefilled, request.prompt_tokens):,}/" if request.prefilled else ""
    return f"{computed}{request.prompt_tokens:,}"


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


def lanes_table(snapshot: Snapshot, rows: RowSelection = ALL) -> Table:
    """Makes one row per priority, and below it the tenants that are next."""
    cells: list[tuple[RenderableType, ...]] = []
    for lane in snapshot.lanes:
        tenants = "1 tenant" if lane.num_tenants == 1 else f"{lane.num_tenants:,} tenants"
        name = Text(f"priority {lane.priority}", "bold").append(f", {tenants}", "not bold dim")
        cells.append((name, f"{lane.num_requests:,}", f"{lane.tokens:,}", duration(lane.oldest_s), ""))
        cells += [
            (_text(f"  {tenant.name or '(none)'}"), f"{tenant.num_waiting:,}", "", "", f"{tenant.served:,.0f}")
            for tenant in lane.tenants
            if tenant.num_waiting
        ]
    return _filled(
        ("lane",),
        ("waiting", "tokens", "oldest", "served"),
        {place: cells[place] for place in rows.window(len(cells))},
        rows,
        leaving=("served", "tokens"),
    )


def letters_table(letters: Sequence[DeadLetter], rows: RowSelection = ALL) -> Table:
    """Makes one row per request that was given up."""
    cells = {
        place: (
            _text(each.id), _text(each.request_id), _text(each.code), _text(each.worker),
            f"{duration(each.age_s)} ago", "" if each.crashes is None else str(each.crashes),
        )
        for place in rows.window(len(letters))
        for each in [letters[place]]
    }  # fmt: skip
    return _filled(
        ("dead letter", "request", "code", "worker"),
        ("given up", "crashes"),
        cells,
        rows,
        leaving=("crashes", "worker", "request"),
    )


def summary(snapshot: Snapshot, history: Sequence[float], width: int = 40) -> tuple[Text, Text, Text]:
    """Summarizes the queue in three lines.

    Args:
        snapshot: the last one.
        history: tokens per second, the last one last.
        width: the sparkline's, in columns.
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


def _filled(
    left: Sequence[str],
    right: Sequence[str],
    rows: Mapping[int, Sequence[RenderableType]],
    selection: RowSelection,
    *,
    leaving: Sequence[str],
) -> Table:
    """Makes a table of texts and, to their right, of numbers.

    Args:
        left: titles of the texts. What the terminal has no columns for is cut from the last ones.
        right: titles of the numbers, which are never cut.
        rows: their cells, by place.
        selection: which rows are shown.
        leaving: titles that are left out, the first one first, where the terminal is too narrow for all.
    """
    titles = (*left, *right)
    widths = [max(map(_width, (title, *(cells[at] for cells in rows.values())))) for at, title in enumerate(titles)]
    needed = {
        title: min(width, _CUT_AT) if title in left else width for title, width in zip(titles, widths, strict=True)
    }
    for title in leaving:
        if selection.width is not None and sum(needed.values()) + _GAP * (len(needed) - 1) > selection.width:
            del needed[title]
    table = _table(selection.folds, *(title for title in left if title in needed))
    for title in right:
        if title in needed:
            table.add_column(title, justify="right", no_wrap=True)
    if selection.width is not None:
        _fit(table, needed, dict(zip(titles, widths, strict=True)), selection.width)
    for place, cells in rows.items():
        shown = (cell for title, cell in zip(titles, cells, strict=True) if title in needed)
        table.add_row(*shown, style=selection.style_of(place))
    return table


def _fit(table: Table, needed: Mapping[str, int], wanted: Mapping[str, int], width: int) -> None:
    """Gives each column what it needs, and the first ones of the rest what they want."""
    spare = width - sum(needed.values()) - _GAP * (len(needed) - 1)
    for column, (title, cells) in zip(table.columns, needed.items(), strict=True):
        more = max(0, min(spare, wanted[title] - cells))
        column.width = cells + more
        spare -= more


def _width(cell: RenderableType) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(str(cell))


def _text(value: str) -> Text:
    """Renders foreign text: no markup, and nothing that moves the cursor."""
    return Text(visible(value))
