"""Counts forks: a child must not use what it inherits. Threads do not run in it; connections are still the parent's."""

from __future__ import annotations

import os
import threading

renewing = threading.Lock()
"""Held while something inherited is replaced. A child has a lock of its own: the parent's may be held forever."""

_forks = 0
_kept: list[object] = []


def generation() -> int:
    """Returns how many forks led to this process, counted from the one that loaded this module."""
    return _forks


def keep(inherited: object) -> None:
    """Keeps something of the parent's from being garbage-collected here.

    The child's event loop shares the kernel's list of watched sockets with the parent's. If the child closed a socket,
    the parent would hear no more of it.
    """
    _kept.append(inherited)


def _note_fork() -> None:
    global _forks, renewing  # noqa: PLW0603  of this process, as the fork is
    _forks += 1
    renewing = threading.Lock()


os.register_at_fork(after_in_child=_note_fork)
