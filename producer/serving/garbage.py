"""Keeps Python's garbage collector out of the way of a service that has started."""

from __future__ import annotations

import gc

_YOUNG = 50_000  # objects that wait for a look at the youngest; a flush of 512 chunks holds some thousands


def settle() -> None:
    """To be called once, by the process that serves, when everything it needs is loaded.

    The modules and the model leave a heap of some hundred thousand objects that stay for ever. With Python's defaults
    a full flush of chunks, or the JSON of one large body, sets a collection off, and every so often one that walks all
    of that heap, during which no tokens are published or sent and no steps planned. Frozen objects are not looked at
    again; what requests leave behind is freed by reference counts, so that cycles may wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 100)
