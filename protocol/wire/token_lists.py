"""Lists of token ids as text. A prompt of 1 MB may have a million, and other threads of the process wait during each
step. So a step takes a few thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

_PIECE = 4096


def spell_tokens(ids: Sequence[int]) -> str:
    """Joins ids with commas."""
    pieces = (ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE))
    return ",".join([",".join(map(str, piece)) for piece in pieces])


def read_tokens(text: str) -> tuple[int, ...]:
    """Inverts `spell_tokens`.

    Raises:
        ValueError: the text is not such a list.
    """
    return tuple(chain.from_iterable([tuple(map(_number, piece)) for piece in _pieces(text)]))


def _pieces(text: str) -> Iterator[list[str]]:
    rest = text.split(",") if text else []
    for start in range(0, len(rest), _PIECE):
        yield rest[start : start + _PIECE]


def _number(digits: str) -> int:
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{digits[:40]!r} is not a token id")
    return int(digits)
