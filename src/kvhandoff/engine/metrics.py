"""What an engine counts for Prometheus. A reason is counted where it happened, by its own name and kind."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import BlockCounts, LegRecord
from kvhandoff.transport.mover import Moved

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class EngineMetrics:
    """One engine's registry."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._legs = Counter(
            "kvhandoff_engine_legs", "Legs served", ["leg", "kv_source", "finish_reason"], registry=registry
        )
        self._reasons = Counter(
            "kvhandoff_engine_reasons", "Fallbacks and ends, by reason", ["reason", "kind"], registry=registry
        )
        self._refused = Counter(
            "kvhandoff_engine_tickets_refused",
            "Requests served alone: a ticket not obeyed",
            registry=registry,
        )
        self._tokens = Counter(
            "kvhandoff_engine_prompt_tokens",
            "Prompt tokens, by where their KV came from",
            ["source"],
            registry=registry,
        )
        self._bytes = Counter(
            "kvhandoff_engine_transfer_bytes",
            "KV bytes moved, by this engine's part",
            ["part"],
            registry=registry,
        )
        self._early = Counter(
            "kvhandoff_engine_early_bytes",
            "Pushed bytes that came before their prompt's end",
            registry=registry,
        )
        self._first_tokens = Counter(
            "kvhandoff_engine_first_tokens_reused",
            "First tokens taken from the prefill engine",
            registry=registry,
        )
        self._descriptors = Counter(
            "kvhandoff_engine_transfer_descriptors", "Contiguous copies they were made of", registry=registry
        )
        self._phases = Histogram(
            "kvhandoff_engine_phase_seconds",
            "Time of each phase up to the first token",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.spans = Counter(
            "kvhandoff_engine_spans",
            "OpenTelemetry spans that the collector has taken ('exported'), or that were lost on the way",
            ["result"],
            registry=registry,
        )
        self._blocks = Gauge("kvhandoff_engine_blocks", "KV blocks, by state", ["state"], registry=registry)
        self._leases = Gauge(
            "kvhandoff_engine_leases",
            "Leases that hold now: 'offer' and 'retained', blocks kept for readers; 'pin', a peer's hold on "
            "one of those; 'read', KV awaited from a peer; 'grant', a peer's permission to write here",
            ["kind"],
            registry=registry,
        )
        self._requests = Gauge(
            "kvhandoff_engine_requests", "Requests, by state", ["state"], registry=registry
        )

    def reason(self, reason: Reason) -> None:
        """One more of this reason."""
        self._reasons.labels(reason, reason.kind).inc()

    def refused(self) -> None:
        """One more request whose ticket was not obeyed."""
        self._refused.inc()

    def leg(self, record: LegRecord) -> None:
        """One leg is over."""
        self._legs.labels(record.leg, record.kv_source, record.finish_reason or "none").inc()
        self._tokens.labels("cached").inc(record.cached_tokens)
        came = "returned" if record.leg != "decode" else "transferred"
        self._tokens.labels(came).inc(record.transferred_tokens)
        self._tokens.labels("computed").inc(record.computed_tokens)
        self._bytes.labels("granted" if record.grants else "read").inc(record.bytes)
        self._early.inc(record.early_bytes)
        self._first_tokens.inc(record.first_token_reused)
        self._descriptors.inc(record.descriptors)
        for phase, seconds in record.phases.items():
            self._phases.labels(phase).observe(seconds)

    def written(self, moved: Moved) -> None:
        """A write of this engine has ended."""
        self._bytes.labels("written").inc(moved.bytes)
        self._descriptors.inc(moved.descriptors)

    def render(self, blocks: BlockCounts, requests: dict[str, int], leases: dict[str, int]) -> bytes:
        """Prometheus text format, with the gauges as they are now."""
        for state in BlockCounts.__struct_fields__:
            self._blocks.labels(state).set(getattr(blocks, state))
        for kind, count in leases.items():
            self._leases.labels(kind).set(count)
        for state, count in requests.items():
            self._requests.labels(state).set(count)
        return generate_latest(self._registry)
