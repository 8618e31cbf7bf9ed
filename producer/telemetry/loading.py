"""What is there without OpenTelemetry: how the rest is loaded, and what is said where it can't be."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from penstock.producer.errors import TelemetryUnavailable
from penstock.producer.wire import in_python

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from penstock.producer.telemetry.client_spans import ClientSpans
    from penstock.producer.telemetry.sdk import Telemetry

EXTRA = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Modules of the packages that the extra `otel` names."""


def require_otel() -> None:
    """Checks that the extra is there.

    Raises:
        TelemetryUnavailable: it is not; the message says how to install it.
    """
    for name in EXTRA:
        if not _is_there(name):
            raise TelemetryUnavailable(f"{name} is not installed; install it with: pip install 'penstock[otel]'")


def load_telemetry(service: str, instance: str | None = None) -> Telemetry:
    """What `OTEL_*` variables ask for. The process that is to export calls it: a fork has none of its threads.

    Args:
        service: its name, where `OTEL_SERVICE_NAME` has none.
        instance: tells processes of the service apart, where `OTEL_RESOURCE_ATTRIBUTES` does not.

    Raises:
        TelemetryUnavailable: the extra is not installed, or a variable names what is not there.
    """
    require_otel()
    from penstock.producer.telemetry.sdk import from_environment

    return from_environment(service, instance)


def check_telemetry() -> None:
    """As `load_telemetry`, and what it makes is thrown away: for a process that starts those that export."""
    require_otel()
    from penstock.producer.telemetry.sdk import exporters

    exporters()


def client_spans(tracing: bool | TracerProvider) -> ClientSpans | None:
    """What a client records of its requests. None: it is not asked to.

    Args:
        tracing: True stands for the provider that the application has set up.

    Raises:
        TelemetryUnavailable: the extra is not installed.
        TypeError: it is neither.
    """
    if tracing is False:
        return None
    if tracing is not True and not hasattr(tracing, "get_tracer"):
        raise TypeError(f"tracing must be True, False or a TracerProvider, not {in_python(tracing)}")
    require_otel()
    from penstock.producer.telemetry.client_spans import ClientSpans

    return ClientSpans(None if tracing is True else tracing)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor is what it is in
        return False
