"""Collects what OTLP exporters send over HTTP, those of other processes too, for a test to look at."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan


@dataclass(frozen=True)
class Seen:
    """A span, wherever it was caught."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)  # trace id, span id, attributes
    service: str = ""
    is_error: bool = False
    state: str = ""  # W3C's tracestate

    @classmethod
    def of(cls, span: ReadableSpan) -> Seen:
        """Makes one from a span of this process."""
        context = span.context
        assert context is not None
        return cls(
            span.name,
            f"{context.trace_id:032x}",
            f"{context.span_id:016x}",
            None if span.parent is None else f"{span.parent.span_id:016x}",
            span.start_time or 0,
            span.end_time or 0,
            dict(span.attributes or {}),
            [
                (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}", dict(link.attributes or {}))
                for link in span.links
            ],
            str(span.resource.attributes["service.name"]),
            not span.status.is_ok,
            context.trace_state.to_header(),
        )


class Collector:
    """Listens while the `with` block lasts."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []  # spans as they came
        self.spans: list[Seen] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self._news = threading.Condition()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that have a process export to this collector, and soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_address[1]}",
            "OTEL_BSP_SCHEDULE_DELAY": "20",
            "OTEL_METRIC_EXPORT_INTERVAL": "50",
        }

    def named(self, name: str) -> list[Seen]:
        with self._news:
            return [span for span in self.spans if span.name == name]

    def wait_for(self, holds: Callable[[], object], timeout_s: float) -> None:
        """Waits until something that came makes `holds` true. It blocks: not for the event loop's thread."""
        with self._news:
            assert self._news.wait_for(holds, timeout_s), [span.name for span in self.spans]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, path: str, body: bytes) -> None:
        with self._news:
            if path == "/v1/metrics":
                self.metrics.append(ExportMetricsServiceRequest.FromString(body))
            else:
                self.bodies.append(body)
                self.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self._news.notify_all()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Seen]:
    for of_resource in request.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Seen(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex() or None,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _values(span.attributes),
                    [(link.trace_id.hex(), link.span_id.hex(), _values(link.attributes)) for link in span.links],
                    resource["service.name"],
                    span.status.code == 2,
                    span.trace_state,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(each) for each in value.array_value.values)
    return getattr(value, kind)
