"""One slip: a change to one place of one file, and the tests that must notice it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    breaks: str  # what is no longer true; P1 to P11 are the promises of docs/guarantees.md
    file: str
    old: str  # stands exactly once in the file
    new: str
    killers: tuple[str, ...]  # test files or node ids, the quickest first

    def mutated(self, text: str) -> str:
        """Returns the file's text with the slip.

        Raises:
            ValueError: the old text does not stand there exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {count} times in {self.file}")
        return text.replace(self.old, self.new)

    @contextmanager
    def applied(self, tree: Path) -> Iterator[None]:
        """Makes the slip in a copy of the repository during the block."""
        path = tree / self.file
        text = path.read_text()
        path.write_text(self.mutated(text))
        try:
            yield
        finally:
            path.write_text(text)
