"""Stop strings, matched across the chunks that text arrives in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.errors import InvalidRequest


class StopMatcher:
    """Ends a text at the first stop string, and releases everything before it as early as can be.

    Scanning character by character, the text stops where the first stop string is complete; if several are complete
    there, the longest counts. The stop string and all behind it are left out. Held back is only what could still become
    part of a stop string: the longest end of the text so far that some stop string begins with. The automaton is that
    of Aho and Corasick, "Efficient string matching", CACM 18 (6), 1975; a character costs constant time on average.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest if a stop string is empty."""
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty")
        self._root = _automaton(stops)
        self._state = self._root
        self._held = ""  # always the `depth` last characters seen
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is now certain to come before any stop string, and whether one was found, now or earlier."""
        if self._stopped:
            return "", True
        seen = self._held + text
        state = self._state
        for end, character in enumerate(text, start=len(self._held) + 1):
            while character not in state.next and state is not self._root:
                state = state.fallback
            state = state.next.get(character, self._root)
            if state.match_length:
                self._stopped, self._held = True, ""
                return seen[: end - state.match_length], True
        self._state = state
        border = len(seen) - state.depth
        self._held = seen[border:]
        return seen[:border], False

    def flush(self) -> str:
        """What is held back, now that no more text comes."""
        held, self._held, self._state = self._held, "", self._root
        return held


@dataclass(slots=True, eq=False)
class _Node:
    """A beginning of one or more stop strings."""

    depth: int
    match_length: int = 0  # of the longest stop string that this beginning ends with; 0: with none
    next: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node = field(init=False)  # the longest proper end of this beginning that is itself one

    def __post_init__(self) -> None:
        self.fallback = self


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(depth=node.depth + 1))
        node.match_length = len(stop)
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
            child.match_length = child.match_length or child.fallback.match_length
            queue.append(child)
    return root
