"""What callers pass beside requests: each argument is looked at in the call that it is passed to, and named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real

from pydantic import BaseModel

from penstock.producer.wire import ID_PATTERN, in_python

LONGEST_S = 1e9
"""Of times: some thirty years."""

MOST = 2**53
"""Of counts: the server's scripts reckon in doubles."""


def check_name(what: str, name: object) -> str:
    """The name, if it can be a queue's or a request's, and so part of a key.

    Raises:
        TypeError: it is no text.
        ValueError: it could not be one.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str, not {in_python(name)}")
    if not ID_PATTERN.fullmatch(name):
        raise ValueError(f"{what} {in_python(name)} is not 1 to 128 of the characters A-Z a-z 0-9 _ . : -")
    return name


def check_count(what: str, value: object, *, most: int = MOST) -> int:
    """The number, as an int of Python's own.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below 1, or above `most`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{what} must be an int, not {in_python(value)}")
    count = int(value)
    if not 1 <= count <= most:
        raise ValueError(f"{what} {in_python(value)} is {'below 1' if count < 1 else f'above {most}'}")
    return count


def check_seconds(what: str, value: object, *, above: float | None = None, most: float = LONGEST_S) -> float:
    """The time, as a float.

    Args:
        what: the argument's name.
        value: of it.
        above: it has to be longer than that; None: than nothing, which 0 is not.
        most: it may be as long.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range, or none at all (NaN).
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what} must be a number of seconds, not {in_python(value)}")
    try:
        seconds = float(value)
    except OverflowError:  # a whole number of over 300 digits
        seconds = math.inf
    if not (seconds >= 0 if above is None else seconds > above) or seconds > most:
        least = "from 0" if above is None else f"above {above:g}"
        raise ValueError(f"{what} must be {least} to {most:g} s, not {in_python(value)}")
    return seconds


def check_wait(value: object) -> float | None:
    """The `timeout` of who waits for a reply; None: without end. Raises as `check_seconds`."""
    return None if value is None else check_seconds("timeout", value)


def check_flag(what: str, value: object) -> bool:
    """Raises TypeError unless it is a bool: words such as "no" are true."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {in_python(value)}")
    return value


def check_many(what: str, values: object) -> None:
    """Raises TypeError for what can be iterated over, and holds no items of its kind: one text, one request, a map."""
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping | BaseModel):
        raise TypeError(f"{what} must be an iterable of them, such as a list, not one {type(values).__name__}")
