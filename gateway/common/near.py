"""Known names that a misspelled one was probably meant for."""

from __future__ import annotations

from collections.abc import Iterable

FEWEST_LETTERS = 6
"""Shorter names are near to too many words that mean something else."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name of six letters or more that is one edit from `name`: a character more, less or another
    one, or two neighbours in each other's place (Damerau's distance).
    """
    near = (each for each in known if _is_near(name, each))
    return next((each for each in near if sum(map(str.isalpha, each)) >= FEWEST_LETTERS), None)


def _is_near(one: str, other: str) -> bool:
    shorter, longer = sorted((one, other), key=len)
    if len(longer) - len(shorter) > 1:
        return False
    start = next((place for place, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    if len(shorter) < len(longer):
        return shorter[start:] == longer[start + 1 :]
    if shorter[start + 1 :] == longer[start + 1 :]:
        return True
    is_swapped = shorter[start : start + 2] == longer[start : start + 2][::-1]
    return is_swapped and shorter[start + 2 :] == longer[start + 2 :]
