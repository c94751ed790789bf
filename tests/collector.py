"""An OpenTelemetry collector that keeps what it gets: OTLP over HTTP, in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

WAIT_S = 20.0


@dataclass(frozen=True)
class Span:
    """One span, as it came."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool
    state: str

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Collector:
    """Answers each batch with `status`, when `gate` is open."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.batches = 0
        """That have come, whatever became of them."""
        self.url = ""

    async def post(self, request: web.Request) -> web.Response:
        batch = ExportTraceServiceRequest.FromString(await request.read())
        self.batches += 1
        await self.gate.wait()
        if self.status == 200:
            self.spans += [
                _read(span, _values(resource.resource.attributes)["service.name"])
                for resource in batch.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
        return web.Response(status=self.status)

    def named(self, name: str, service: str | None = None) -> list[Span]:
        return [span for span in self.spans if span.name == name and service in (None, span.service)]

    def one(self, name: str, service: str | None = None) -> Span:
        (span,) = self.named(name, service)
        return span

    def below(self, parent: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_id == parent.span_id]

    async def has(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, within a deadline."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():  # noqa: ASYNC110  other threads' conditions have no event
                    await asyncio.sleep(0.005)
        except TimeoutError:
            shown = [(span.service, span.name, span.parent_id) for span in self.spans]
            raise AssertionError(f"not within {WAIT_S} s: {shown}") from None

    async def request(self, count: int = 1) -> Span:
        """The router's span of the last of so many requests; it comes with, or behind, all others."""
        await self.has(lambda: len(self._requests()) >= count)
        return self._requests()[-1]

    def _requests(self) -> list[Span]:
        return [s for s in self.spans if s.service == "kvhandoff-router" and s.name.startswith("POST ")]


@asynccontextmanager
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """One that runs; spans are sent to it soon after they end."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    made = Collector()
    app = web.Application(client_max_size=2**26)
    app.add_routes([web.post("/v1/traces", made.post)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield made
    finally:
        made.gate.set()
        await runner.cleanup()


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


def _read(span: Any, service: str) -> Span:
    return Span(
        service=service,
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        state=span.trace_state,
    )
