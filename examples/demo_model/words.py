"""Words for the spelling and reversing tasks: a list of common ones, and any number of made-up ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

COMMON_WORDS: tuple[str, ...] = tuple((Path(__file__).parent / "words.txt").read_text().split())

_ONSETS = (*"bcdfghjklmnprstvwz", "br", "ch", "cl", "cr", "dr", "fl", "gr", "pl", "sh", "sl", "st", "th", "tr")
_VOWELS = (*"aeiou", "ai", "ea", "ee", "oa", "oo", "ou")
_CODAS = ("", "", "", "", "n", "r", "l", "t", "s", "m", "d", "ck", "nd", "rt", "st")


def draw_word(rng: Random) -> str:
    """Draws a lower-case word of 3 to 9 letters; two in five are made up, so that spelling can't be memorized."""
    if rng.random() < 0.6:
        return rng.choice(COMMON_WORDS)
    while True:
        syllables = rng.choice((1, 2, 2, 3))
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))
        if 3 <= len(word) <= 9:
            return word
