"""Strategies for any JSON, and for a given document with one place changed."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


def mutations(value: Any) -> st.SearchStrategy[Any]:
    """Draws the value with one place changed."""
    if isinstance(value, dict) and value:
        inside = [mutations(inner).map(lambda new, name=name: {**value, name: new}) for name, inner in value.items()]
        return st.one_of(values, st.tuples(st.text(), values).map(lambda item: {**value, item[0]: item[1]}), *inside)
    if isinstance(value, list) and value:
        inside = [
            mutations(inner).map(lambda new, at=at: [*value[:at], new, *value[at + 1 :]])
            for at, inner in enumerate(value)
        ]
        return st.one_of(values, *inside)
    return values
