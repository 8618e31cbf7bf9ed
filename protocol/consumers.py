"""Consumers of a queue's group that are not workers, and hold entries until a worker takes them.

A half-written reply must be continued with the model that began it and, for a while or for good, with the same
arithmetic. So an entry may be left to two kinds of workers: those with one model, which its digest names, and those
among them that round alike (`kind_of`).
"""

from __future__ import annotations

from penstock.protocol.keys import HOLDERS, UNOWNED


def kind_of(digest: str, arithmetic: str) -> str:
    """Names the kind of workers with this model and arithmetic. Either may be "", not known: that is a kind as well."""
    return f"{digest}/{arithmetic}"


def set_aside_for(kind: str) -> str:
    """Returns the consumer that holds entries whose replies were begun by workers of this kind.

    Its heartbeat exists while such a worker serves the queue, and for a while after.
    """
    return f"{UNOWNED}/{kind}"  # no worker's name looks like it: none has a slash


def is_worker(consumer: str) -> bool:
    """Whether a consumer is a worker, which takes entries, and not one that only holds them."""
    return consumer not in HOLDERS and not consumer.startswith(f"{UNOWNED}/")
