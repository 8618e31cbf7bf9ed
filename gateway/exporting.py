"""What a process sends by OpenTelemetry while it serves, where it is asked to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from penstock.producer.telemetry.sdk import Telemetry


@asynccontextmanager
async def exporting(
    telemetry: Telemetry | None, registry: CollectorRegistry, refresh: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Sends the metrics of `registry` while the block lasts, and at its end what there is of them and of spans.

    Args:
        telemetry: where to; None: nothing is sent. It is closed at the end.
        registry: what a scrape shows.
        refresh: brings it up to date.
    """
    if telemetry is None:
        yield
        return
    push = None
    if telemetry.metric_exporter is not None:
        from penstock.gateway.metric_push import MetricPush  # needs the extra

        push = MetricPush(telemetry.metric_exporter, telemetry.resource, registry, refresh)
        push.start()
    try:
        yield
    finally:
        ends = [asyncio.to_thread(telemetry.close), *([] if push is None else [push.stop()])]
        await asyncio.gather(*ends)
