"""Exports spans to an OpenTelemetry collector, over HTTP and on a thread of the SDK."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock import __version__
from penstock.errors import ConfigError
from penstock.vllm.names import PREFIX

_FLUSH_SECONDS = 2.0
"""The longest that a shutdown waits for the collector."""

_TRACES_PATH = "/v1/traces"
"""The path of OTLP/HTTP for spans."""


@dataclass(frozen=True)
class Span:
    """A span that is over. Times are nanoseconds of the wall clock."""

    name: str
    began: int
    ended: int
    attributes: Mapping[str, str | int | float]
    events: Mapping[str, int] = field(default_factory=dict)
    """Name of an event → its time."""
    trace_headers: Mapping[str, str] | None = None
    """The W3C trace context of the span's parent; without it, the span begins a trace."""


class Exporter:
    """Hands spans to the SDK, which batches and sends them on its own thread.

    The SDK's queue is bounded. If the collector does not keep up or does not answer, spans are
    dropped. The SDK's environment variables (`OTEL_*`) set the rest: the resource, sampling, the
    queue, headers, certificates.
    """

    def __init__(self, endpoint: str) -> None:
        """Sends to the collector at the URL `endpoint`, from the first span on.

        Raises:
            ConfigError: the SDK or its exporter is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"{PREFIX}otlp_endpoint is set, but OpenTelemetry is not installed ({error}): "
                "pip install 'penstock[tracing]', or leave the setting out"
            ) from None
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "penstock"}))
        # No hook at the process's exit: it would wait for a collector that does not answer.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint)))
        )
        self._tracer = self._provider.get_tracer("penstock", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def export(self, span: Span) -> None:
        """Queues a span. Does no I/O."""
        parent = span.trace_headers and self._propagator.extract(span.trace_headers)
        made = self._tracer.start_span(
            span.name,
            context=parent or None,
            attributes=span.attributes,
            start_time=span.began,
        )
        for name, moment in span.events.items():
            made.add_event(name, timestamp=moment)
        made.end(span.ended)

    def shutdown(self) -> None:
        """Sends what is queued, and waits for that for a bounded time."""
        # The SDK itself would wait for as long as it retries.
        thread = threading.Thread(target=self._provider.shutdown, name="penstock-spans")
        thread.daemon = True
        thread.start()
        thread.join(_FLUSH_SECONDS)


def traces_url(endpoint: str) -> str:
    """The URL that spans are sent to.

    >>> traces_url("http://127.0.0.1:4318")
    'http://127.0.0.1:4318/v1/traces'
    >>> traces_url("https://collector/team/v1/traces")
    'https://collector/team/v1/traces'
    """
    has_path = urlsplit(endpoint).path.strip("/")
    return endpoint if has_path else endpoint.rstrip("/") + _TRACES_PATH
