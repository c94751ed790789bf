"""One trace for each request: a span for the request, one for each leg, one for each phase of the record.

    POST /v1/completions              the client's trace goes on, or a new one begins
    ├─ route, retry, bind             phases of the router's own
    ├─ prefill leg                    as the router sees it; the engine's spans are below it
    │  └─ prefill_network, …
    └─ decode leg  (or local leg)
       └─ decode_network, …

A request's span is given out when its record is complete, since only then the engines' accounts are in, or
`SETTLE_S` after its end. The phases of an engine that gives out no spans of its own (`LegRecord.traced`) are
laid below its leg's span, from that leg's start on this clock and behind the network phase, which in truth is
both before and behind them. So each phase of a record is one span, wherever it was measured, and no two
machines' clocks are compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer, format_trace_id, set_span_in_context
from opentelemetry.util.types import AttributeValue

from kvhandoff.core.clock import monotonic
from kvhandoff.core.errors import RequestError
from kvhandoff.core.phases import Phase
from kvhandoff.core.reasons import ReasonKind
from kvhandoff.core.records import LegRecord
from kvhandoff.router.answers import LegFailed
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.moves import Moved
from kvhandoff.router.trace_context import trace_context
from kvhandoff.tracing import fail, headers_of, lay, server_span
from kvhandoff.web import CLIENT_LEFT

if TYPE_CHECKING:
    from kvhandoff.router.records import Draft, LegRef, RequestRecord

SETTLE_S = 5.0
"""A request whose engines' accounts are not in so long after its end is given out without them."""

_OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.RESPONSES: "chat",
}
"""`gen_ai.operation.name` of OpenTelemetry's conventions for generative AI."""

_OWN = (Phase.ROUTE, Phase.RETRY)
"""Phases of the router before any leg; BIND stands before the decode leg."""


class Traces:
    """One router's. Used on the event loop's thread only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.waiting: dict[Draft, asyncio.TimerHandle] = {}
        """Requests that are over and whose engines' accounts are not in."""

    def open(self, draft: Draft, headers: Mapping[str, str]) -> RequestTrace:
        """The trace of a request that has come in with these headers."""
        return RequestTrace(self, self._tracer, draft, headers)

    def close(self) -> None:
        """Give out what still waits."""
        for draft in list(self.waiting):
            _give_out(draft)


class RequestTrace:
    """One request's spans."""

    def __init__(self, traces: Traces, tracer: Tracer, draft: Draft, headers: Mapping[str, str]) -> None:
        self._traces = traces
        self._tracer = tracer
        self._start_ns = time.time_ns()
        self._started = monotonic()
        self._legs: dict[LegRef, tuple[Span, int]] = {}
        """Spans of legs, and when they began."""
        more = {"kvhandoff.handoff_id": draft.handoff_id}
        operation = _OPERATIONS[draft.endpoint]
        self._span = server_span(
            tracer, draft.endpoint.path, operation, trace_context(headers), more, self._start_ns
        )
        self.trace_id = format_trace_id(self._span.get_span_context().trace_id)

    @contextmanager
    def leg(self, name: str, ref: LegRef, url: str) -> Iterator[dict[str, str]]:
        """Around a leg to the engine at `url`; gives the headers that continue the trace."""
        start_ns = self._now_ns()
        to = urlsplit(url)
        span = self._tracer.start_span(
            f"{name} leg",
            set_span_in_context(self._span, Context()),
            kind=SpanKind.CLIENT,
            attributes={
                "kvhandoff.leg": name,
                "kvhandoff.handoff_id": ref.key.handoff_id,
                "kvhandoff.attempt": ref.key.attempt,
                "kvhandoff.engine": ref.engine.engine_id,
                "kvhandoff.epoch": ref.engine.epoch,
                "server.address": to.hostname or "",
                "server.port": to.port or (443 if to.scheme == "https" else 80),
            },
            start_time=start_ns,
        )
        self._legs[ref] = span, start_ns
        try:
            yield headers_of(span)
        except Moved:
            span.set_attribute("kvhandoff.moved", True)
            raise
        except BaseException as error:
            fail(span, _cause(error))
            raise
        finally:
            span.end(self._now_ns())

    def wait(self, draft: Draft) -> None:
        """The request is over; engines' accounts are still to come."""
        if self._span.is_recording():
            later = asyncio.get_running_loop().call_later
            self._traces.waiting[draft] = later(SETTLE_S, _give_out, draft)

    def end(self, draft: Draft, record: RequestRecord) -> None:
        """Give the request's span out, and those of its phases. Once."""
        handle = self._traces.waiting.pop(draft, None)
        if handle is not None:
            handle.cancel()
        draft.trace = None
        span = self._span
        if not span.is_recording():
            return
        span.set_attributes(_attributes(record))
        if record.status is not None and (record.status >= 500 or record.status == CLIENT_LEFT):
            fail(span, _cause_of(record))
        lay(self._tracer, span, self._start_ns, _of(record, *_OWN))
        prefill, decode = draft.accounts()
        if draft.prefill is not None:
            beside = Phase.PREFILL_NETWORK in record.prefill_phases
            network = record.prefill_phases if beside else record.phases
            self._lay_leg(draft.prefill, network.get(Phase.PREFILL_NETWORK), Phase.PREFILL_NETWORK, prefill)
        if draft.decode is not None:
            bind = _of(record, Phase.BIND)
            if bind and draft.decode in self._legs:
                _, sent_ns = self._legs[draft.decode]
                lay(self._tracer, span, sent_ns - round(bind[Phase.BIND] * 1e9), bind)
            network_s = record.phases.get(Phase.DECODE_NETWORK)
            self._lay_leg(draft.decode, network_s, Phase.DECODE_NETWORK, decode)
        span.end(self._start_ns + round((record.total_s or 0.0) * 1e9))

    def _lay_leg(
        self, ref: LegRef, network_s: float | None, network: Phase, account: LegRecord | None
    ) -> None:
        """The phases of a leg that the engine doesn't give out itself. `network_s`: None when its end was not
        seen."""
        if ref not in self._legs:
            return  # it was to be sent, and was not
        span, start_ns = self._legs[ref]
        if network_s is not None:
            start_ns = lay(self._tracer, span, start_ns, {network.value: network_s})
        if account is not None and not account.traced:
            lay(self._tracer, span, start_ns, account.phases)

    def _now_ns(self) -> int:
        """The wall clock, as it was at the start, plus what has passed: no step of it comes between."""
        return self._start_ns + round((monotonic() - self._started) * 1e9)


def _give_out(draft: Draft) -> None:
    if draft.trace is not None:
        draft.trace.end(draft, draft.record())


def _of(record: RequestRecord, *phases: Phase) -> dict[str, float]:
    return {phase.value: record.phases[phase] for phase in phases if phase in record.phases}


def _attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    reused = record.reused_tokens
    # As the answer's usage has it: what the engine that computed the prompt did not have to.
    cached = reused.prefill_cache if record.prefill is not None else reused.decode_cache
    known: dict[str, AttributeValue | None] = {
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model or None,
        "gen_ai.response.id": record.id,
        "gen_ai.response.finish_reasons": [record.finish_reason] if record.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "kvhandoff.tenant": record.tenant or None,
        "kvhandoff.connector": record.connector,
        "kvhandoff.path": record.path,
        "kvhandoff.requested_path": record.requested_path,
        "kvhandoff.binding": record.binding,
        "kvhandoff.rebound": record.rebound,
        "kvhandoff.attempts": record.attempts,
        "kvhandoff.prefill.engine": record.prefill.engine_id if record.prefill else None,
        "kvhandoff.decode.engine": record.decode.engine_id if record.decode else None,
        "kvhandoff.reasons": list(record.reasons),
        "kvhandoff.incomplete": record.incomplete,
    }
    if not record.incomplete:
        known |= {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached + reused.returned,
            "kvhandoff.kv_source": record.kv_source,
            "kvhandoff.transferred_tokens": reused.transferred,
            "kvhandoff.returned_tokens": reused.returned,
            "kvhandoff.blocks": record.blocks,
            "kvhandoff.bytes": record.bytes,
            "kvhandoff.early_bytes": record.early_bytes,
            "kvhandoff.return_bytes": record.return_bytes,
        }
    return {name: value for name, value in known.items() if value is not None}


def _cause(error: BaseException) -> str:
    """In one word: messages may quote what the client has sent."""
    match error:
        case LegFailed():
            return error.kind
        case RequestError() if error.code:
            return error.code
        case asyncio.CancelledError():
            return "cancelled"
        case _:
            return type(error).__name__


def _cause_of(record: RequestRecord) -> str:
    if record.status == CLIENT_LEFT:
        return "client_aborted"
    failures = [reason.value for reason in record.reasons if reason.kind is ReasonKind.FAILURE]
    return failures[-1] if failures else str(record.status)
