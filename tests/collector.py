"""An OpenTelemetry collector: takes spans over OTLP/HTTP, as a real one does, and keeps them."""

from __future__ import annotations

import gzip
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from lab.waiting import LIMIT
from tests.web import serving


@dataclass(frozen=True)
class Received:
    """A span as it came over the wire."""

    service: str
    name: str
    trace_id: str
    parent_id: str
    began: int
    ended: int
    attributes: dict[str, Any]
    events: dict[str, int]


class Collector:
    """Use as a context manager. While `answers` is not set, requests are taken and not answered."""

    def __init__(self) -> None:
        self._spans: list[Received] = []
        self._came = threading.Condition()
        self.answers = threading.Event()
        self.answers.set()
        self._open = ExitStack()
        self.url = ""
        """The endpoint, without a path."""

    def __enter__(self) -> Collector:
        port = self._open.enter_context(serving(self._handler()))
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.set()
        self._open.close()

    def spans(self, *names: str, timeout: float = LIMIT) -> list[Received]:
        """All that came, once there is a span of each of these names."""
        with self._came:
            came = self._came.wait_for(
                lambda: set(names) <= {span.name for span in self._spans}, timeout
            )
            assert came, self._spans
            return list(self._spans)

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        found = [
            Received(
                _values(resource.resource.attributes).get("service.name", ""),
                span.name,
                span.trace_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                _values(span.attributes),
                {event.name: event.time_unix_nano for event in span.events},
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._came:
            self._spans += found
            self._came.notify_all()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.answers.wait()
                is_right = self.path == "/v1/traces"
                if is_right:
                    collector._take(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if is_right else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        return Handler


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
