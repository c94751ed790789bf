"""Where a process's OpenTelemetry spans go. Beside `web`, below the engines' servers and the router.

Loaded only by processes that trace; it needs `kvhandoff[traces]`. Nothing is global: no other library's
spans come this way. Ended spans wait in a bounded queue for a thread of their own, which sends them over
OTLP/HTTP. A collector that is away, slow or refuses costs spans, never a request: what does not fit the
queue is counted as lost, like what could not be sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from prometheus_client import Counter

from kvhandoff.core.errors import ConfigError

_log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""At the end of the process, what is still queued has so long to be sent."""

_QUEUE = 2048
"""Spans; OpenTelemetry's default."""

_propagator = TraceContextTextMapPropagator()
"""Of W3C Trace Context: https://www.w3.org/TR/trace-context/"""


class Tracing:
    """One process's tracer, and its way to the collector."""

    def __init__(self, endpoint: str, *, service: str, instance: str, spans: Counter) -> None:
        """`endpoint`: the full URL that spans are posted to. `service`, `instance`: what the process is
        called unless the environment says otherwise. `spans`: counted by `result`, `exported` or `lost`.

        All else comes from the standard `OTEL_…` variables. Raises ConfigError for values that can't be used.
        """
        try:
            size = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, _QUEUE))
            self._exporter = _Counted(OTLPSpanExporter(endpoint=endpoint), spans)
            self._queue = _Queue(self._exporter, size)
            provider = TracerProvider(resource=_resource(service, instance), shutdown_on_exit=False)
        except (ValueError, OSError) as error:
            raise ConfigError(f"traces: the OTEL_ variables of the environment: {error}") from error
        provider.add_span_processor(self._queue)
        self.tracer: Tracer = provider.get_tracer("kvhandoff", version("kvhandoff"))

    async def close(self) -> None:
        """Send what is queued, for `FLUSH_S` at most; the rest is lost."""

        def end() -> None:
            self._queue.force_flush()
            self._queue.shutdown()  # type: ignore[no-untyped-call]

        ending = threading.Thread(target=end, name="kvhandoff-traces-end", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, FLUSH_S)
        self._exporter.end()


class _Queue(BatchSpanProcessor):
    """The library's queue and thread, in front of which spans that don't fit are counted: it would drop
    others without a word."""

    def __init__(self, exporter: _Counted, size: int) -> None:
        """Raises ValueError for sizes that can't be."""
        super().__init__(exporter, max_queue_size=size)
        self._counted = exporter
        self._size = size

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`; any thread, never waits."""
        if span.context is not None and span.context.trace_flags.sampled and self._counted.admit(self._size):
            super().on_end(span)


class _Counted(SpanExporter):
    """Counts what becomes of spans, and says once that the collector does not take them."""

    def __init__(self, inner: OTLPSpanExporter, spans: Counter) -> None:
        self._inner = inner
        self._exported = spans.labels("exported")
        self._lost = spans.labels("lost")
        self._lock = threading.Lock()
        self._queued = 0
        """Spans between `admit` and the end of their `export`."""
        self._losing = False

    def admit(self, size: int) -> bool:
        """Whether one more span fits a queue of this size."""
        with self._lock:
            if self._queued < size:
                self._queued += 1
                return True
        self._lose(1, "the queue is full: the collector is slower than spans come")
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        try:
            result = self._inner.export(spans)
        finally:
            with self._lock:
                self._queued -= len(spans)
        if result is SpanExportResult.SUCCESS:
            self._exported.inc(len(spans))
            if self._losing:
                self._losing = False
                _log.info("traces: the collector takes spans again")
        else:
            self._lose(len(spans), _words.last)
        return result

    def shutdown(self) -> None:
        """See `SpanExporter`; called by the queue when all has been sent."""
        self.end()

    def end(self) -> None:
        """Send no more, nor try again; what is left is lost."""
        self._inner.shutdown()  # type: ignore[no-untyped-call]

    def _lose(self, count: int, why: str) -> None:
        self._lost.inc(count)
        if not self._losing:
            self._losing = True
            _log.warning("traces: spans are lost: %s", why)


class _Words(logging.Filter):
    """Keeps the exporter library's own lines, one for each try, out of the log, and their words for ours: the
    error that a batch ends with, and what went wrong before that was worth another try."""

    last = ""
    _before = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        words = re.sub(r"\?[^\s)'\"]*", "?…", record.getMessage())  # a query string may hold a key
        if record.levelno < logging.ERROR:
            self._before = words
        else:
            self.last = " ".join(filter(None, [words, self._before]))
            self._before = ""
        return False


_words = _Words()
logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").addFilter(_words)
# At level debug it writes whole URLs.
logging.getLogger("urllib3").setLevel(logging.INFO)


def _resource(service: str, instance: str) -> Resource:
    created = Resource.create({"service.instance.id": instance, "service.version": version("kvhandoff")})
    if str(created.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the environment gives no name
        created = created.merge(Resource({SERVICE_NAME: service}))
    return created


def context_of(headers: Mapping[str, str]) -> Context:
    """The trace that a request is part of; an empty one where it has none, or what it has is malformed."""
    return _propagator.extract(
        {name: headers[name] for name in _propagator.fields if name in headers}, Context()
    )


def headers_of(span: Span) -> dict[str, str]:
    """What makes a request the span's child."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, set_span_in_context(span, Context()))
    return headers


def server_span(
    tracer: Tracer,
    path: str,
    operation: str,
    headers: Mapping[str, str],
    more: Mapping[str, AttributeValue],
    start_ns: int | None = None,
) -> Span:
    """Begin the span of a request to `path`, in the trace that its headers name. `operation`:
    `gen_ai.operation.name`; `more`: further attributes."""
    return tracer.start_span(
        f"POST {path}",
        context_of(headers),
        kind=SpanKind.SERVER,
        attributes={
            "http.request.method": "POST",
            "url.path": path,
            "http.route": path,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvhandoff",
            **more,
        },
        start_time=start_ns,
    )


def fail(span: Span, cause: str) -> None:
    """It did not end well: why, in one word."""
    span.set_attribute("error.type", cause)
    span.set_status(StatusCode.ERROR, cause)


def lay(tracer: Tracer, parent: Span, start_ns: int, phases: Mapping[str, float]) -> int:
    """Phases (seconds) as spans, one behind the other from `start_ns` on this process's wall clock; returns
    where the last one ends."""
    context = set_span_in_context(parent, Context())
    for name, seconds in phases.items():
        end_ns = start_ns + max(0, round(seconds * 1e9))
        tracer.start_span(name, context, start_time=start_ns).end(end_ns)
        start_ns = end_ns
    return start_ns
