"""State of the screen of `penstock top`: the last look, the selection, the question. It does nothing itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.protocol.operations.snapshot import Snapshot

Pane: TypeAlias = Literal["workers", "requests", "letters"]
PANES: tuple[Pane, ...] = ("workers", "requests", "letters")

HISTORY = 240
"""Looks that the sparkline can show at most."""

Deed: TypeAlias = Literal["drain", "cancel", "replay"]
_KEYS: dict[str, tuple[Deed, Pane]] = {
    "d": ("drain", "workers"), "c": ("cancel", "requests"), "r": ("replay", "letters"),
}  # fmt: skip
_NOUNS: dict[Pane, str] = {"workers": "worker", "requests": "request", "letters": "dead letter"}


@dataclass(frozen=True, slots=True)
class Action:
    """An action to take once its question is answered with yes."""

    deed: Deed
    target: str

    @property
    def question(self) -> str:
        if self.deed == "drain":
            return f"drain worker {self.target}? It takes nothing new, and what it does not finish goes on elsewhere."
        if self.deed == "cancel":
            return f"cancel request {self.target}? Its reply ends with the text so far."
        return f"send the request of dead letter {self.target} again, under a new id?"


class Quit(Exception):
    """Raised when the user wants to leave."""


class Board:
    """Changes with keys and looks, which both come from outside."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.history: deque[float] = deque([snapshot.tokens_per_s], HISTORY)
        self.pane: Pane = "workers"
        self.asked: Action | None = None
        self.note = ""  # result of the last key
        self.trouble = ""  # why there is no newer look
        self._selected: dict[Pane, str] = {}

    def show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.history.append(snapshot.tokens_per_s)
        self.trouble = ""

    @property
    def selected(self) -> int | None:
        """Row number of the selection in its pane. The selection follows its item for as long as that exists."""
        names = self.names(self.pane)
        if not names:
            return None
        name = self._selected.get(self.pane)
        return names.index(name) if name in names else 0

    def names(self, pane: Pane) -> list[str]:
        """Returns the items of a pane's rows, in order."""
        if pane == "workers":
            return [worker.name for worker in self.snapshot.workers]
        if pane == "requests":
            return [each.id for each in self.snapshot.running]
        return [letter.id for letter in self.snapshot.letters]

    def press(self, key: str) -> Action | None:
        """Takes a key; returns the action to take now.

        Raises:
            Quit: the key was the one to leave.
        """
        if self.asked is not None:
            asked, self.asked = self.asked, None
            self.note = "" if key == "y" else f"{asked.deed}: not done"
            return asked if key == "y" else None
        self.note = ""
        if key == "q":
            raise Quit
        if key in ("tab", "backtab"):
            place = PANES.index(self.pane) + (1 if key == "tab" else -1)
            self.pane = PANES[place % len(PANES)]
        elif key in ("down", "j", "up", "k"):
            self._move(1 if key in ("down", "j") else -1)
        elif key in _KEYS:
            self._ask(*_KEYS[key])
        return None

    def _move(self, by: int) -> None:
        names, place = self.names(self.pane), self.selected
        if place is not None:
            self._selected[self.pane] = names[max(0, min(place + by, len(names) - 1))]

    def _ask(self, deed: Deed, pane: Pane) -> None:
        if pane != self.pane:
            self.note = f"{deed}: choose a {_NOUNS[pane]} first, with Tab"
            return
        place = self.selected
        if place is None:
            self.note = f"{deed}: there is no {_NOUNS[pane]}"
            return
        target = self.names(pane)[place]
        self._selected[pane] = target  # the item in question stays selected
        self.asked = Action(deed, target)
