"""Every state in which a request waits, and how soon its deadline, its cancellation and its priority act there.

The table in docs/guarantees.md is made from this one (`python -m penstock.worker.intake.waiting`). Each cell has a
test in `tests/e2e/takeover/test_waiting_states.py`: a state without a row, or a cell without a test, fails.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum


class WaitingState(Enum):
    """State of a request that has not ended, or whose end nobody has read. The value is its name in the table."""

    NEW = "new in the stream"
    IN_LANE = "in a lane"
    AT_HOME = "left to its home"
    ORPHANED = "pending for a dead worker not yet noticed"
    UNOWNED = "pending for nobody"
    SET_ASIDE = "set aside for a model"
    LEFT_ALIKE = "left to its arithmetic"
    SUSPECT = "suspect"
    GIVEN_BACK = "given back"
    READ = "read and unclaimed"
    PREPARING = "being prepared"
    COMPILING = "compiling a grammar"
    RUNNING = "running"
    PREEMPTED = "preempted"
    IN_OUTBOX = "in the outbox while Redis is away"
    UNREAD = "ended and unread"
    BATCH_LINE = "a batch's line not yet enqueued"
    BACKGROUND = "a background response"
    CALL = "a call"


@dataclass(frozen=True, slots=True)
class Cell:
    """A bound, or the reason why there is none."""

    text: str
    is_none: bool = False

    def __str__(self) -> str:
        return f"none: {self.text}" if self.is_none else self.text


@dataclass(frozen=True, slots=True)
class PromiseRow:
    deadline: Cell
    cancel: Cell
    priority: Cell
    same_id: Cell


COLUMNS = tuple(field.name for field in fields(PromiseRow))
_TITLES = {"deadline": "deadline", "cancel": "cancel", "priority": "priority", "same_id": "the same id sent again"}

_SOON = Cell("2 s")
_NOTICED = Cell("`heartbeat_ttl_s` + a look + 2 s")
_WITH_REDIS = Cell("2 s from when Redis is back")
_JOINS = Cell("joins it")
_PASSED = Cell("holds up no other, of any priority")


def _row(deadline: Cell, cancel: Cell, priority: Cell | str, same_id: Cell = _JOINS) -> PromiseRow:
    return PromiseRow(deadline, cancel, Cell(priority) if isinstance(priority, str) else priority, same_id)


def _none(reason: str) -> Cell:
    return Cell(reason, is_none=True)


TABLE: Mapping[WaitingState, PromiseRow] = {
    WaitingState.NEW: _row(_SOON, _SOON, "with its place, which it gets within 2 s, or when a worker has room"),
    WaitingState.IN_LANE: _row(_SOON, _SOON, "goes next by it"),
    WaitingState.AT_HOME: _row(_SOON, _SOON, "lower ones may go before it for `steal_after_ms`"),
    WaitingState.ORPHANED: _row(_NOTICED, _NOTICED, "goes next by it once it is back in line"),
    WaitingState.UNOWNED: _row(_SOON, _SOON, "goes next by it once it is back in line, within 2 s"),
    WaitingState.SET_ASIDE: _row(_SOON, _SOON, "a worker with its model takes it before lower ones"),
    WaitingState.LEFT_ALIKE: _row(_SOON, _SOON, "a worker that rounds alike takes it before lower ones"),
    WaitingState.SUSPECT: _row(_SOON, _SOON, "goes next by it among suspects, and holds up no other until its moment"),
    WaitingState.GIVEN_BACK: _row(_SOON, _SOON, "goes next by it"),
    WaitingState.READ: _row(Cell("at its claim"), Cell("at its claim"), _PASSED),
    WaitingState.PREPARING: _row(_SOON, _SOON, _PASSED),
    WaitingState.COMPILING: _row(_SOON, _SOON, _PASSED),
    WaitingState.RUNNING: _row(_SOON, _SOON, "below 0 gives way to 0 or more"),
    WaitingState.PREEMPTED: _row(_SOON, _SOON, "below 0 gives way to 0 or more"),
    WaitingState.IN_OUTBOX: _row(_WITH_REDIS, _WITH_REDIS, _none("it has had its turn")),
    WaitingState.UNREAD: _row(
        _none("it has ended"),
        _none("its end stays"),
        _none("it has ended"),
        Cell("joins it; `ReplyGone` at once after the reply has expired"),
    ),
    WaitingState.BATCH_LINE: _row(
        Cell("with its batch's window, 2 s"),
        Cell("with its batch, 2 s"),
        _none("it goes with -1000 once it is enqueued"),
        _none("its id is the batch's"),
    ),
    WaitingState.BACKGROUND: _row(
        Cell("as its request's"), Cell("2 s"), Cell("that of its request"), Cell("the same `Idempotency-Key` joins it")
    ),
    WaitingState.CALL: _row(
        Cell("`CallTimedOut` at once; no answer is late"),
        _none("a call takes a minute at most"),
        _none("a call waits for no batch slot"),
        Cell("each is answered"),
    ),
}


def table() -> str:
    """Returns the table as it is in docs/guarantees.md: states with equal cells share a row."""
    states: dict[PromiseRow, list[str]] = {}
    for state, row in TABLE.items():
        states.setdefault(row, []).append(state.value)
    lines = [f"| state | {' | '.join(_TITLES[name] for name in COLUMNS)} |", f"|{' --- |' * (1 + len(COLUMNS))}"]
    for row, names in states.items():
        lines.append(f"| {'; '.join(names)} | {' | '.join(str(getattr(row, name)) for name in COLUMNS)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
