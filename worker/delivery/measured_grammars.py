"""Compiles grammars, and says in the metrics how that went."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.engine.errors import InvalidRequest
from penstock.worker.delivery.preparation import Grammars
from penstock.worker.metrics import Metrics

if TYPE_CHECKING:
    from penstock.engine.structured import Grammar


class MeasuredGrammars:
    """As the `Grammars` that it stands before. Any thread may use it."""

    def __init__(self, grammars: Grammars, metrics: Metrics) -> None:
        self._grammars = grammars
        self._metrics = metrics

    def compile(self, source: str) -> Grammar:
        outcome, begun_s = "failed", time.monotonic()
        try:
            grammar = self._grammars.compile(source)
            outcome = "compiled"
        except InvalidRequest:
            outcome = "refused"
            raise
        finally:
            self._metrics.grammars.labels(outcome=outcome).inc()
            self._metrics.grammar_seconds.observe(time.monotonic() - begun_s)
        return grammar
