"""The part that works without OpenTelemetry: it loads the rest, and reports what is missing."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from penstock.installed import how_to_install
from penstock.protocol.errors import TelemetryUnavailable
from penstock.protocol.wire import in_python

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from penstock.protocol.telemetry.client_spans import ClientSpans
    from penstock.protocol.telemetry.sdk import Telemetry

EXTRA = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Modules of the packages that the extra `otel` names."""


def require_otel() -> None:
    """Checks that the extra is there.

    Raises:
        TelemetryUnavailable: it is not; the message says how to install it.
    """
    for name in EXTRA:
        if not _is_there(name):
            raise TelemetryUnavailable(f"{name} is not installed; install it with: {how_to_install('otel')}")


def load_telemetry(service: str, instance: str | None = None) -> Telemetry:
    """Loads what the `OTEL_*` variables ask for. The exporting process must call it: a fork has none of its threads.

    Args:
        service: the service's name, unless `OTEL_SERVICE_NAME` is set.
        instance: tells processes of the service apart, unless `OTEL_RESOURCE_ATTRIBUTES` does.

    Raises:
        TelemetryUnavailable: the extra is not installed, or a variable names something that does not exist.
    """
    require_otel()
    from penstock.protocol.telemetry.sdk import from_environment

    return from_environment(service, instance)


def check_telemetry() -> None:
    """Calls `load_telemetry` and discards the result: for a process that starts the exporting ones."""
    require_otel()
    from penstock.protocol.telemetry.sdk import exporters

    exporters()


def client_spans(tracing: bool | TracerProvider) -> ClientSpans | None:
    """Returns the recorder of a client's requests; None: it records nothing.

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
    from penstock.protocol.telemetry.client_spans import ClientSpans

    return ClientSpans(None if tracing is True else tracing)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor is the package it is in
        return False
