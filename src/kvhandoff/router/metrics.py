"""The router's metrics, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvhandoff.core.reasons import Reason
from kvhandoff.router.engine import Role
from kvhandoff.router.histograms import Histograms
from kvhandoff.router.pairs import PairReport
from kvhandoff.router.records import Draft, RequestRecord

_Child = TypeVar("_Child")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ShownEngine(Protocol):
    """What the page says of an engine."""

    @property
    def url(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def reserved(self) -> int: ...


class _Children(dict[tuple[str, ...], _Child]):
    """A metric's children by the values of their labels. prometheus_client looks a child up under a lock, and
    makes texts of the values first; requests count a dozen of them."""

    def __init__(self, make: Callable[..., _Child]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, values: tuple[str, ...]) -> _Child:
        child = self[values] = self._make(*values)
        return child


class RouterMetrics:
    """One router's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._in_flight = Gauge("kvhandoff_router_in_flight", "Requests under way.", registry=self._registry)
        self._requests = Counter(
            "kvhandoff_router_requests",
            "Requests that ended, by path ('none': refused before a path was chosen) and HTTP status "
            "(499: the client left; 502: also a stream that broke off).",
            ["endpoint", "path", "status"],
            registry=self._registry,
        )
        self._refused = Counter(
            "kvhandoff_router_refused",
            "Requests refused for their key, by the error's code, before anything else was looked at.",
            ["code"],
            registry=self._registry,
        )
        self._reasons = Counter(
            "kvhandoff_router_reasons",
            "Why requests did not take the path they might have taken, the engines' reasons included. "
            "Alarm on kind 'failure' only.",
            ["reason", "kind"],
            registry=self._registry,
        )
        self._lookups = Counter(
            "kvhandoff_router_return_lookups",
            "Turns of conversations that were looked up, by whether a decode engine keeps an earlier one.",
            ["result"],
            registry=self._registry,
        )
        self.lost_turns = Counter(
            "kvhandoff_router_index_lost_turns",
            "Turns of conversations that could not be remembered in the shared index.",
            registry=self._registry,
        )
        self.spans = Counter(
            "kvhandoff_router_spans",
            "OpenTelemetry spans that the collector has taken ('exported'), or that were lost on the way.",
            ["result"],
            registry=self._registry,
        )
        self._returned = Counter(
            "kvhandoff_router_returned_tokens",
            "Prompt tokens whose KV was read from the decode engine of an earlier turn.",
            registry=self._registry,
        )
        self._rebinds = Counter(
            "kvhandoff_router_rebinds",
            "Times that another decode engine was chosen while a prefill leg went on.",
            registry=self._registry,
        )
        self._bytes = Counter(
            "kvhandoff_router_moved_bytes",
            "KV moved for requests: 'early', before the end of prefill, 'late', after it, and 'return'.",
            ["part"],
            registry=self._registry,
        )
        self._ttft = Histograms(
            "kvhandoff_router_ttft_seconds",
            "From a request's arrival to its first content.",
            "path",
            _SECONDS,
            self._registry,
        )
        self._phases = Histograms(
            "kvhandoff_router_phase_seconds",
            "The parts of the time to the first content.",
            "phase",
            _SECONDS,
            self._registry,
        )
        self._healthy = Gauge(
            "kvhandoff_router_engine_healthy",
            "1 when the engine gets legs.",
            ["engine", "role"],
            registry=self._registry,
        )
        self._reserved = Gauge(
            "kvhandoff_router_engine_legs",
            "Legs under way at the engine.",
            ["engine", "role"],
            registry=self._registry,
        )

        self._pairs = Gauge(
            "kvhandoff_router_pairs",
            "Pairs of prefill and decode engines, by what the test of their handoff says. Alarm on 'failed'.",
            ["result"],
            registry=self._registry,
        )
        self._failed_pairs = Gauge(
            "kvhandoff_router_pair_failed",
            "1 for each pair that does not hand over.",
            ["prefill", "decode"],
            registry=self._registry,
        )
        self._draining = Gauge(
            "kvhandoff_router_engines_draining",
            "Engines that get no new legs, and end those that they have.",
            registry=self._registry,
        )

        self._reason_of = _Children(self._reasons.labels)
        self._request_of = _Children(self._requests.labels)
        self._lookup_of = _Children(self._lookups.labels)
        self._bytes_of = _Children(self._bytes.labels)

    def count_reason(self, reason: Reason) -> None:
        """One request met this reason."""
        self._reason_of[reason, reason.kind].inc()

    def show_in_flight(self, running: Callable[[], int]) -> None:
        """`running`: asked how many requests are under way, whenever somebody looks."""
        self._in_flight.set_function(running)

    def count_request(self, draft: Draft) -> None:
        """One request ended."""
        self._request_of[draft.endpoint, draft.path or "none", str(draft.status)].inc()
        if draft.remembered is not None:
            self._lookup_of["hit" if draft.remembered else "miss",].inc()

    def count_refused(self, code: str) -> None:
        """One request had no key, or none for this page."""
        self._refused.labels(code).inc()

    def observe(self, record: RequestRecord) -> None:
        """One record is complete."""
        if record.ttft_s is not None and record.path is not None:
            self._ttft.observe(record.path, record.ttft_s)
            for phase, seconds in record.phases.items():
                self._phases.observe(phase, seconds)
        if record.reused_tokens.returned:
            self._returned.inc(record.reused_tokens.returned)
        if record.rebound:
            self._rebinds.inc(record.rebound)
        if record.bytes or record.return_bytes:
            early, back = record.early_bytes, record.return_bytes
            for kind, moved in (("early", early), ("late", record.bytes - early), ("return", back)):
                counter = self._bytes_of[kind,]
                if moved:
                    counter.inc(moved)

    def show_fleet(self, pairs: PairReport, draining: int) -> None:
        """What the next page says of the fleet as a whole."""
        self._pairs.labels("passed").set(pairs.passed)
        self._pairs.labels("failed").set(len(pairs.failed))
        self._pairs.labels("untested").set(pairs.untested)
        self._failed_pairs.clear()
        for pair in pairs.failed:
            self._failed_pairs.labels(pair.prefill, pair.decode).set(1)
        self._draining.set(draining)

    def text(self, engines: Iterable[ShownEngine]) -> bytes:
        """The page, with the engines' present state."""
        self._healthy.clear()  # engines may have left
        self._reserved.clear()
        for engine in engines:
            self._healthy.labels(engine.url, engine.role).set(engine.healthy)
            self._reserved.labels(engine.url, engine.role).set(engine.reserved)
        return generate_latest(self._registry)
