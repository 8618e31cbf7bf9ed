"""Matches stop strings across the chunks that text arrives in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.errors import InvalidRequest


class StopMatcher:
    """Ends a text at the first stop string, and releases everything before it as early as possible.

    The text ends where the first stop string is complete, scanning character by character. If several are complete
    there, the longest counts. Everything after the stop string is left out, and so is the stop string itself unless it
    was asked for. The matcher holds back only the longest suffix of the text that may still become a stop string
    that is left out. The automaton is from Aho and Corasick, "Efficient string matching", CACM 18 (6), 1975; a
    character costs constant time on average.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Builds the automaton. Raises InvalidRequest if a stop string is empty."""
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty")
        self._root = _automaton(stops)
        self._include = include
        self._state = self._root
        self._held = ""  # the last `depth` characters seen; empty if stop strings are included
        self._found: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Returns the text that is now certain, and the stop string that was found, now or earlier.

        A stop string that is complete in a text that may not end is text like any other.
        """
        if self._found is not None:
            return "", self._found
        seen = self._held + text
        state = self._state
        for end, character in enumerate(text, start=len(self._held) + 1):
            while character not in state.next and state is not self._root:
                state = state.fallback
            state = state.next.get(character, self._root)
            if state.match and may_end:
                self._found, self._held = state.match, ""
                return seen[: end if self._include else end - len(state.match)], state.match
        self._state = state
        border = len(seen) if self._include else len(seen) - state.depth
        self._held = seen[border:]
        return seen[:border], None

    def flush(self) -> str:
        """Returns what is held back, now that no more text comes."""
        held, self._held, self._state = self._held, "", self._root
        return held


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of one or more stop strings."""

    depth: int
    match: str = ""  # longest stop string that is a suffix of this prefix
    next: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node = field(init=False)  # longest proper suffix of this prefix that is a prefix too

    def __post_init__(self) -> None:
        self.fallback = self


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(depth=node.depth + 1))
        node.match = stop
    queue = deque(root.next.values())  # breadth first: a fallback is shallower, so it is complete when needed
    for node in queue:
        node.fallback = root
    while queue:
        node = queue.popleft()
        for character, child in node.next.items():
            fallback = node.fallback
            while character not in fallback.next and fallback is not root:
                fallback = fallback.fallback
            child.fallback = fallback.next.get(character, root)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root
