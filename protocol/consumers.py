"""Consumers of a queue's group that are not workers, and hold entries until a worker takes them."""

from __future__ import annotations

from penstock.protocol.keys import HOLDERS, UNOWNED


def set_aside_for(digest: str) -> str:
    """Returns the consumer that holds entries whose replies were begun by workers with the model of this digest.

    Its heartbeat exists while such a worker serves the queue, and for a while after.
    """
    return f"{UNOWNED}/{digest}"  # no worker's name looks like it: none has a slash


def is_worker(consumer: str) -> bool:
    """Whether a consumer takes entries, and does not only hold them."""
    return consumer not in HOLDERS and not consumer.startswith(f"{UNOWNED}/")
