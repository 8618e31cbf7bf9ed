"""The standard variables are obeyed, or a log line says why that can't be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

from penstock.protocol.errors import TelemetryUnavailable
from penstock.protocol.telemetry.loading import check_telemetry, client_spans, load_telemetry, require_otel
from penstock.protocol.telemetry.recorder import SCHEMA_URL
from penstock.protocol.telemetry.sdk import Telemetry, chosen_ids
from penstock.protocol.version import __version__
from tests.support.packages import ROOT

WITHOUT_IT = """
import sys
sys.modules["opentelemetry"] = None
from penstock import AsyncClient, Client, TelemetryUnavailable
for kind in (AsyncClient, Client):
    try:
        kind("redis://127.0.0.1:1", tracing=True)
    except TelemetryUnavailable as error:
        print(error)
    kind("redis://127.0.0.1:1")
"""

# Everything that a worker, a gateway and a client import where nobody asks for traces. (redis-py takes opentelemetry
# where it is there.)
WITHOUT_ASKING = """
import sys
sys.modules["opentelemetry"] = None
from penstock import AsyncClient
from penstock.gateway.app import create_app
from penstock.gateway.serve import serve
from penstock.gateway.settings import GatewaySettings
from penstock.tools.chaos.fake_engine import fake_model
from penstock.cli.shared.serve import load_model
from penstock.worker.config import WorkerConfig
from penstock.worker.service import WorkerService
create_app(GatewaySettings())
WorkerService(WorkerConfig(), "redis://127.0.0.1:1", lambda _: fake_model())
AsyncClient("redis://127.0.0.1:1")
print(*sorted(name for name in sys.modules if name.startswith("opentelemetry.")))
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def printed(code: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


def closed(telemetry: Telemetry) -> Telemetry:
    telemetry.close()
    return telemetry


def test_a_client_without_the_extra_says_what_to_install() -> None:
    message = "opentelemetry.sdk is not installed; install it with: pip install '.[otel]' in a clone"
    assert printed(WITHOUT_IT) == [message, message]


def test_nothing_is_loaded_where_nobody_asks() -> None:
    assert printed(WITHOUT_ASKING) == [""]
    require_otel()  # it is there
    assert client_spans(False) is None


def test_the_usual_is_otlp_under_our_name() -> None:
    telemetry = closed(load_telemetry("penstock-worker", "w-1"))
    assert telemetry.provider is not None
    assert isinstance(telemetry.metric_exporter, OTLPMetricExporter)
    said = telemetry.resource.attributes
    assert (said["service.name"], said["service.version"], said["service.instance.id"]) == (
        "penstock-worker", __version__, "w-1",
    )  # fmt: skip


def test_variables_go_before_what_we_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=theirs,deployment.environment.name=here")
    said = closed(load_telemetry("penstock-worker", "w-1")).resource.attributes
    assert (said["service.name"], said["service.instance.id"]) == ("mine", "theirs")
    assert said["deployment.environment.name"] == "here"


def test_each_signal_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    telemetry = closed(load_telemetry("x"))
    assert telemetry.provider is None
    assert isinstance(telemetry.metric_exporter, ConsoleMetricExporter)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    telemetry = closed(load_telemetry("x"))
    assert (telemetry.provider, telemetry.metric_exporter) == (None, None)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER is 'zipkin': no package for the exporter 'zipkin'"),
        ("OTEL_METRICS_EXPORTER", "zipkin", "OTEL_METRICS_EXPORTER is 'zipkin'"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/xml", "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/xml': no package"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "smoke", "'otlp_proto_smoke'"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobody", "'otlp_proto_http' can't be made: .*'nobody'"),
    ],
)
def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str) -> None:
    monkeypatch.setenv(variable, value)
    for load in (check_telemetry, lambda: load_telemetry("x")):
        with pytest.raises(TelemetryUnavailable, match=told):
            load()


def test_a_protocol_of_the_standard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert closed(load_telemetry("x")).provider is not None


def test_ids_are_drawn_unless_they_are_chosen() -> None:
    telemetry = load_telemetry("x")
    assert telemetry.provider is not None
    tracer = telemetry.provider.get_tracer("t", schema_url=SCHEMA_URL)
    with chosen_ids(7, 8):
        chosen = tracer.start_span("a", Context()).get_span_context()
        below = tracer.start_span("b", trace.set_span_in_context(trace.NonRecordingSpan(chosen))).get_span_context()
    drawn = tracer.start_span("c", Context()).get_span_context()
    telemetry.close()
    assert (chosen.trace_id, chosen.span_id, below.trace_id) == (8, 7, 8)
    assert drawn.trace_id not in (0, 8)
    assert drawn.span_id not in (0, 7)
    # W3C's flag: whether the trace id is random.
    assert (chosen.trace_flags & 2, drawn.trace_flags & 2) == (0, 2)
