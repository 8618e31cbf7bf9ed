"""Consumers of a queue's group that are not workers, and hold entries until a worker takes them.

A half-written reply goes on with the model that began it, and for a while, or for good, with the arithmetic. So there
are two kinds of workers that an entry may be left to: those with one model, which its digest names, and those of them
that round alike (`kind_of`).
"""

from __future__ import annotations

from penstock.protocol.keys import HOLDERS, UNOWNED


def kind_of(digest: str, arithmetic: str) -> str:
    """Names the workers with one model and one arithmetic, each "" if it is not known: that is a kind of its own."""
    return f"{digest}/{arithmetic}"


def set_aside_for(kind: str) -> str:
    """Returns the consumer that holds entries whose replies were begun by workers of this kind.

    Its heartbeat exists while such a worker serves the queue, and for a while after.
    """
    return f"{UNOWNED}/{kind}"  # no worker's name looks like it: none has a slash


def is_worker(consumer: str) -> bool:
    """Whether a consumer takes entries, and does not only hold them."""
    return consumer not in HOLDERS and not consumer.startswith(f"{UNOWNED}/")
