"""Exporters, sampler and resource of one process, as the standard `OTEL_*` variables set them."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.semconv.attributes.service_attributes import SERVICE_NAME, SERVICE_VERSION

from penstock.protocol.errors import TelemetryUnavailable
from penstock.protocol.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

OFF = "none"
CLOSE_TIMEOUT_S = 3.0
"""Time limit for exporting what is left at the end of a process."""

_INSTANCE_ID = "service.instance.id"


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Telemetry of one process. `provider` is None if no traces are wanted, `metric_exporter` if no metrics are."""

    resource: Resource
    provider: TracerProvider | None
    metric_exporter: MetricExporter | None

    def close(self) -> None:
        """Exports the remaining spans, in `CLOSE_TIMEOUT_S` at most; those that take longer are lost."""
        if self.provider is not None:
            closing = threading.Thread(target=self.provider.shutdown, name="penstock-spans-end", daemon=True)
            closing.start()
            closing.join(CLOSE_TIMEOUT_S)


def from_environment(service: str, instance: str | None = None) -> Telemetry:
    """Implements `penstock.protocol.telemetry.loading.load_telemetry`."""
    resource = _resource(service, instance)
    spans, metrics = exporters()
    return Telemetry(resource, None if spans is None else provider_of(spans, resource), metrics)


def exporters() -> tuple[SpanExporter | None, MetricExporter | None]:
    """Returns the exporters for spans and for metrics.

    Raises:
        TelemetryUnavailable: a variable names something that does not exist.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None, None
    spans, metrics = _exporter("traces"), _exporter("metrics")
    if metrics is not None and not isinstance(metrics, MetricExporter):
        raise TelemetryUnavailable("OTEL_METRICS_EXPORTER names an exporter that is scraped: /metrics is one already")
    return spans, metrics


def provider_of(exporter: SpanExporter, resource: Resource) -> TracerProvider:
    """Returns a provider that exports in batches, from its own thread, and samples as `OTEL_TRACES_SAMPLER` says."""
    provider = TracerProvider(resource=resource, id_generator=ChosenIds(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class ChosenIds(RandomIdGenerator):
    """Generates random ids, except where another process must derive the same ones."""

    def generate_trace_id(self) -> int:
        return _chosen.get()[0] or super().generate_trace_id()

    def generate_span_id(self) -> int:
        return _chosen.get()[1] or super().generate_span_id()

    def is_trace_id_random(self) -> bool:
        return not _chosen.get()[0]


_chosen: ContextVar[tuple[int, int]] = ContextVar("penstock_chosen_ids", default=(0, 0))


@contextmanager
def chosen_ids(span_id: int, trace_id: int = 0) -> Iterator[None]:
    """Sets the ids of the span that is started in the block. The trace id is used only if it has no parent."""
    token = _chosen.set((trace_id, span_id))
    try:
        yield
    finally:
        _chosen.reset(token)


def _resource(service: str, instance: str | None) -> Resource:
    """Returns the resource. The environment's values override ours."""
    said = OTELResourceDetector().detect().attributes
    ours = {SERVICE_NAME: service, SERVICE_VERSION: __version__}
    if instance is not None:
        ours[_INSTANCE_ID] = instance
    return Resource.create().merge(Resource({name: value for name, value in ours.items() if name not in said}))


def _exporter(signal: str) -> Any:
    """Returns the exporter that `OTEL_<SIGNAL>_EXPORTER` names; None for `none`."""
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    name = os.environ.get(variable, "").strip() or "otlp"
    if name == OFF:
        return None
    if name == "otlp":
        variable, name = _otlp(signal)
    group = f"opentelemetry_{signal}_exporter"
    for found in entry_points(group=group, name=name):
        try:
            return found.load()()
        except Exception as error:
            raise TelemetryUnavailable(f"{variable}: the exporter {name!r} can't be made: {error}") from error
    asked, there = os.environ.get(variable), ", ".join(sorted(entry_points(group=group).names))
    raise TelemetryUnavailable(
        f"{variable} is {asked!r}: no package for the exporter {name!r} is installed; installed are: {there}"
    )


def _otlp(signal: str) -> tuple[str, str]:
    """Returns the deciding variable, and the entry point of the exporter for the protocol that it names."""
    for variable in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(variable, "").strip():
            return variable, "otlp_proto_" + protocol.removesuffix("/protobuf").replace("/", "_")
    return "OTEL_EXPORTER_OTLP_PROTOCOL", "otlp_proto_http"
