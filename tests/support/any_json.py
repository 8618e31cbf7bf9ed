"""Strategies for any JSON, and for a given document with one place changed."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

from hypothesis import strategies as st

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


def mutations(value: Any) -> st.SearchStrategy[Any]:
    """Draws the value with one place changed."""
    if isinstance(value, dict) and value:
        inside = [mutations(inner).map(partial(_replaced, value, name)) for name, inner in value.items()]
        return st.one_of(values, st.tuples(st.text(), values).map(lambda item: {**value, item[0]: item[1]}), *inside)
    if isinstance(value, list) and value:
        return st.one_of(
            values, *(mutations(inner).map(partial(_replaced, value, at)) for at, inner in enumerate(value))
        )
    return values


def _replaced(value: Any, at: Any, new: Any) -> Any:
    changed = copy(value)
    changed[at] = new
    return changed
