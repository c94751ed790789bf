"""The embedded engine's spans: one for each request of a client or router, one for each phase of its legs.

POST /v1/completions        below the router's leg, by the request's traceparent
└─ prefill_queue, …         of the leg's account, laid from the leg's opening on this process's clock
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Middleware
from opentelemetry.trace import Tracer, get_current_span, use_span
from opentelemetry.util.types import AttributeValue

from kvhandoff.core.records import LegRecord
from kvhandoff.embedded.agent import EngineAgent
from kvhandoff.tracing import Tracing, fail, lay, server_span
from kvhandoff.web import Handler

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""What is traced, and its `gen_ai.operation.name`."""


@asynccontextmanager
async def trace_engine(agent: EngineAgent, endpoint: str, model_name: str) -> AsyncIterator[Middleware]:
    """Have the agent's legs traced, with spans posted to `endpoint`; gives what the server needs for it."""
    spans = agent.spans
    tracing = Tracing(endpoint, service="kvhandoff-engine", instance=str(agent.me), spans=spans)
    agent.trace_leg = partial(leg_tracer, tracing.tracer)
    try:
        yield tracing_middleware(tracing.tracer, model_name)
    finally:
        agent.trace_leg = None
        await tracing.close()


def tracing_middleware(tracer: Tracer, model_name: str) -> Middleware:
    """The outermost one: what errors are answered with is seen too."""

    @web.middleware
    async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
        operation = _OPERATIONS.get(request.path) if request.method == "POST" else None
        if operation is None:
            return await handler(request)
        more = {"gen_ai.request.model": model_name}
        span = server_span(tracer, request.path, operation, request.headers, more)
        try:
            with use_span(span, record_exception=False, set_status_on_exception=False):
                response = await handler(request)
        except BaseException as error:  # the client has left, or the server ends
            fail(span, "cancelled" if not isinstance(error, Exception) else type(error).__name__)
            raise
        else:
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= 499:
                fail(span, str(response.status))
            return response
        finally:
            span.end()

    return traced


def leg_tracer(tracer: Tracer) -> Callable[[LegRecord], None] | None:
    """For a leg that is being opened in a request's handler: what to do with its account. None: the request
    is not traced, or not sampled."""
    span, opened_ns = get_current_span(), time.time_ns()
    if not span.is_recording():
        return None

    def account(record: LegRecord) -> None:
        record.traced = True
        span.set_attributes(_attributes(record))
        if record.finish_reason in ("abort", "error"):
            fail(span, record.finish_reason)
        lay(tracer, span, opened_ns, record.phases)

    return account


def _attributes(record: LegRecord) -> dict[str, AttributeValue]:
    known: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "kvhandoff.handoff_id": record.handoff_id,
        "kvhandoff.attempt": record.attempt,
        "kvhandoff.leg": record.leg,
        "kvhandoff.engine": record.engine_id,
        "kvhandoff.epoch": record.epoch,
        "kvhandoff.kv_source": record.kv_source,
        "kvhandoff.transferred_tokens": record.transferred_tokens,
        "kvhandoff.computed_tokens": record.computed_tokens,
        "kvhandoff.blocks": record.blocks,
        "kvhandoff.bytes": record.bytes,
        "kvhandoff.early_bytes": record.early_bytes,
        "kvhandoff.prefill_chunks": record.prefill_chunks,
        "kvhandoff.reasons": list(record.reasons),
    }
    if record.finish_reason is not None:
        known["gen_ai.response.finish_reasons"] = [record.finish_reason]
    return known
