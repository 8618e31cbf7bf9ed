"""Rows of a stored weight that a parameter holds several times: KV heads, where there are more devices than heads."""

from __future__ import annotations


def before_copying(part: slice, size: int, copies: int, head_dim: int) -> tuple[slice, slice]:
    """What to read so that, with each head `copies` times, it holds `part` of `size`; and where in that it then is."""
    start, stop, _ = part.indices(size)
    width = copies * head_dim  # of all copies of one stored head
    first, end = start // width, -(-stop // width)
    stored = slice(first * head_dim, end * head_dim)
    return stored, slice(start - first * width, stop - first * width)
