"""Compiles grammars, and records the outcome in the metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.engine.errors import InvalidRequest
from penstock.worker.intake.preparation import Grammars
from penstock.worker.metrics import WorkerMetrics

if TYPE_CHECKING:
    from penstock.engine.structured import Grammar


class MeasuredGrammars:
    """Wraps a `Grammars` and measures it. Any thread may use it."""

    def __init__(self, grammars: Grammars, metrics: WorkerMetrics) -> None:
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
