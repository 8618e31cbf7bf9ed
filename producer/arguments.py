"""Checks the arguments that callers pass besides requests, in the call that takes them. Errors name the argument."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real

from pydantic import BaseModel

from penstock.protocol.wire import ID_PATTERN, in_python

LONGEST_S = 1e9
"""The longest time accepted: some thirty years."""

MOST = 2**53
"""The largest count accepted: the server's scripts calculate in doubles."""


def check_name(what: str, name: object) -> str:
    """Returns the name if it can be a queue's or a request's, and so part of a key.

    Raises:
        TypeError: it is not a string.
        ValueError: it is not a valid name.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str, not {in_python(name)}")
    if not ID_PATTERN.fullmatch(name):
        raise ValueError(f"{what} {in_python(name)} is not 1 to 128 of the characters A-Z a-z 0-9 _ . : -")
    return name


def check_count(what: str, value: object, *, most: int = MOST) -> int:
    """Returns the number as a plain Python int.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is below 1, or above `most`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{what} must be an int, not {in_python(value)}")
    count = int(value)
    if not 1 <= count <= most:
        raise ValueError(f"{what} {in_python(value)} is {'below 1' if count < 1 else f'above {most}'}")
    return count


def check_seconds(what: str, value: object, *, above: float | None = None, most: float = LONGEST_S) -> float:
    """Returns the time as a float.

    Args:
        what: the argument's name.
        value: the argument's value.
        above: exclusive lower bound; None: 0 or more is allowed.
        most: inclusive upper bound.

    Raises:
        TypeError: it is not a number.
        ValueError: it is out of range, or NaN.
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
    """Checks the `timeout` of a wait for a reply; None: no limit. Raises as `check_seconds`."""
    return None if value is None else check_seconds("timeout", value)


def check_flag(what: str, value: object) -> bool:
    """Raises TypeError unless the value is a bool: a word such as "no" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {in_python(value)}")
    return value


def check_many(what: str, values: object) -> None:
    """Raises TypeError for a value that is iterable but stands for one item: a text, bytes, a mapping or a request."""
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping | BaseModel):
        raise TypeError(f"{what} must be an iterable of them, such as a list, not one {type(values).__name__}")
