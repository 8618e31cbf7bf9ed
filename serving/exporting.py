"""Sends a serving process's telemetry by OpenTelemetry, if configured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from penstock.protocol.telemetry.sdk import Telemetry


@asynccontextmanager
async def exporting(
    telemetry: Telemetry | None, registry: CollectorRegistry, refresh: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Sends the metrics of `registry` during the block; at its end also the remaining metrics and spans.

    Args:
        telemetry: its exporters; None: nothing is sent. It is closed at the end.
        registry: the metrics that a scrape shows.
        refresh: updates the registry.
    """
    if telemetry is None:
        yield
        return
    push = None
    if telemetry.metric_exporter is not None:
        from penstock.serving.metric_push import MetricPush  # needs the extra

        push = MetricPush(telemetry.metric_exporter, telemetry.resource, registry, refresh)
        push.start()
    try:
        yield
    finally:
        ends = [asyncio.to_thread(telemetry.close), *([] if push is None else [push.stop()])]
        await asyncio.gather(*ends)
