"""Keeps Python's garbage collector out of the way of a service that has started."""

from __future__ import annotations

import gc

_YOUNG = 50_000  # objects that trigger a collection of the youngest; a flush of 512 chunks holds some thousands


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
