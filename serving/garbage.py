"""Keeps Python's garbage collector out of the way of a service that has started."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 50_000  # objects that trigger a collection of the youngest; a flush of 512 chunks holds some thousands


@contextmanager
def paused() -> Iterator[None]:
    """Keeps the collector off while modules are imported or a model is loaded. Nearly everything that is made then
    stays, and would be visited over and over. Afterwards it is frozen.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Configures the collector. The serving process calls it once, when everything it needs is loaded.

    The modules and the model leave a heap of some hundred thousand permanent objects. With Python's defaults, a full
    flush of chunks or the JSON of one large body triggers a collection. Now and then one walks the whole heap, and
    meanwhile no tokens are published or sent and no steps planned. Frozen objects are not visited again. Most of what
    requests leave behind is freed by reference counts, so cycles may wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 100)
