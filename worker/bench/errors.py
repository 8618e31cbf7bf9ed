"""What can be wrong with a benchmark before it starts."""

from __future__ import annotations


class ImpossibleLoad(ValueError):
    """Options that contradict each other or a value out of range; the message names the option."""
