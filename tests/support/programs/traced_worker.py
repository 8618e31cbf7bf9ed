"""Traced workers, in this process with their exports at hand, or as separate processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.protocol.telemetry.loading import load_telemetry
from penstock.protocol.telemetry.sdk import Telemetry, provider_of
from penstock.tools.chaos import process as chaos
from penstock.tools.chaos.fake_engine import FakeEngine, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.logs import configure_logs
from penstock.worker.service import WorkerService
from tests.support.otlp_collector import Seen


@dataclass(frozen=True)
class InMemory:
    """Telemetry of a service of this process, and the spans and metrics that came of it."""

    exporter: InMemorySpanExporter
    telemetry: Telemetry

    @classmethod
    def of(cls, service: str) -> InMemory:
        exporter, resource = InMemorySpanExporter(), Resource({"service.name": service})
        return cls(exporter, Telemetry(resource, provider_of(exporter, resource), None))

    @property
    def provider(self) -> TracerProvider:
        assert self.telemetry.provider is not None
        return self.telemetry.provider

    @property
    def spans(self) -> list[Seen]:
        """All spans that have ended so far."""
        self.provider.force_flush()
        return [Seen.of(span) for span in self.exporter.get_finished_spans()]

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]


class TracedWorker(chaos.FakeWorker):
    """A FakeWorker with `otel` on under some variables."""

    def __init__(
        self,
        url: str,
        log: Path,
        engine: Mapping[str, Any],
        config: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        chaos.start_fork_server()
        self._process = chaos._FORKS.Process(
            target=_run, args=(url, log, dict(engine), dict(config), dict(environment)), daemon=True
        )
        self._process.start()


def traced(environment: Mapping[str, str]) -> Any:
    """Binds the environment of a TracedWorker, for WorkerProcess."""
    return partial(TracedWorker, environment=environment)


def _run(url: str, log: Path, engine: dict[str, Any], config: dict[str, Any], environment: dict[str, str]) -> None:
    chaos.end_with_harness()
    os.environ.update(environment)
    with log.open("w", buffering=1) as stream:
        os.dup2(stream.fileno(), 2)
        configure_logs("info", "json", stream)
        asyncio.run(_serve(url, engine, config))


async def _serve(url: str, engine: dict[str, Any], config: dict[str, Any]) -> None:
    made = WorkerConfig(**config)
    telemetry = load_telemetry("penstock-worker", made.name)
    service = WorkerService(made, url, lambda _: fake_model(FakeEngine(**engine)), telemetry)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.request_drain)
    await service.run()
