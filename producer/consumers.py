"""The consumers of a queue's group that are no workers, and hold entries until one takes them."""

from __future__ import annotations

from penstock.producer.keys import HOLDERS, UNOWNED


def set_aside_for(digest: str) -> str:
    """The consumer that holds entries whose replies workers with the model of this digest have begun.

    Its heartbeat exists while such a worker serves the queue, and for a while after.
    """
    return f"{UNOWNED}/{digest}"  # no worker's name is like it: there is no slash in one


def is_worker(consumer: str) -> bool:
    """Whether a consumer is one that takes entries, and none that just holds them."""
    return consumer not in HOLDERS and not consumer.startswith(f"{UNOWNED}/")
