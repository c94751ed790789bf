"""Has the requests of a router traced while it runs; without, nothing of OpenTelemetry is loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import Counter

from kvhandoff.core.ids import new_epoch
from kvhandoff.router.records import Records


@asynccontextmanager
async def traced(endpoint: str | None, records: Records, spans: Counter) -> AsyncIterator[None]:
    """`endpoint`: where spans are posted, None for no traces; `spans`: counts them. Raises ConfigError."""
    if endpoint is None:
        yield
        return
    from kvhandoff.router.traces import Traces
    from kvhandoff.tracing import Tracing

    tracing = Tracing(endpoint, service="kvhandoff-router", instance=new_epoch(), spans=spans)
    records.traces = traces = Traces(tracing.tracer)
    try:
        yield
    finally:
        records.traces = None
        traces.close()
        await tracing.close()
