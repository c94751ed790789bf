"""One record per request: the router's own account, joined with the engines' accounts of their legs.

How the phases add up. The router cuts its own time, on its own clock, into ROUTE, RETRY (attempts that came
to nothing), the prefill leg's wall time, BIND and the decode leg's wall time up to the first content. Each
leg's wall time then holds what the engine accounts for, on the engine's clock; the rest is called network:

    PREFILL_NETWORK = prefill leg's wall time − sum of the prefill engine's phases
    DECODE_NETWORK  = decode leg's wall time up to the first content − sum of the decode engine's phases

so that all phases add up to the time to the first content. An answer that is not streamed shows no first
content; there DECODE_NETWORK is the leg's whole wall time − the engine's total, and the sum is the TTFT.
Only durations are subtracted; no two clocks are compared.

A pushed prompt's prefill leg runs beside the decode leg: the client waits for the latter alone, so that
ROUTE, RETRY and the decode leg add up to the TTFT. The prefill leg's phases stand apart and add up to its
wall time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import msgspec

from kvhandoff.core.ids import HandoffId, HandoffKey, Identity, handoff_id_of
from kvhandoff.core.phases import Phase
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import KVSource, LegRecord
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.limits import Charge
from kvhandoff.router.policy import Expected, Path, PathChoice, ReturnChoice, Weighed
from kvhandoff.router.request_log import log_request

if TYPE_CHECKING:
    from kvhandoff.router.traces import RequestTrace, Traces

Binding = Literal["early", "late"]
Connector = Literal["kvhandoff", "nixl", "nixl-push"]

_BINDINGS: dict[Path, Binding] = {"push": "early", "pull": "late"}


class ReusedTokens(msgspec.Struct, kw_only=True):
    """Prompt tokens that an engine did not have to compute."""

    prefill_cache: int = 0
    decode_cache: int = 0
    transferred: int = 0
    """Forward: pulled or pushed to the decode engine."""
    returned: int = 0
    """Read from a decode engine that had kept the conversation's last turn."""


class ComputedTokens(msgspec.Struct, kw_only=True):
    """Prompt tokens run through the model."""

    prefill: int = 0
    decode: int = 0


class RequestRecord(msgspec.Struct, kw_only=True):
    """What `GET /v1/handoffs/{id}` answers."""

    id: str
    """The `id` of the OpenAI response."""
    handoff_id: str
    trace_id: str
    """Of its OpenTelemetry trace, 32 hexadecimal digits; empty without traces."""
    tenant: str
    """By the API key; empty without a file of tenants."""
    model: str
    connector: Connector
    """What moves KV between the engines. Only `kvhandoff` verifies it. Of the others' legs there is no
    account: the time of each is all in its network phase, and where the KV came from is not known."""
    requested_path: PathChoice
    path: Path | None
    """The path that answered (or was tried last); None when the request was refused before."""
    binding: Binding | None
    """When the decode engine was chosen: `early`, before the prefill leg, or `late`, after it."""
    rebound: int
    """How often another decode engine was chosen while the prefill leg went on."""
    requested_return: ReturnChoice
    history: Identity | None
    """The decode engine that keeps the conversation's last turn, as the router remembers. A local leg on it
    needs no return: its own prefix cache has the history."""
    attempts: int
    status: int | None
    """HTTP status; 499 when the client left, 502 also when a stream broke off; None while it runs."""
    ttft_s: float | None
    """From the request's arrival to the first content; None when there was none, or it can't be known."""
    first_byte_s: float | None
    """From the request's arrival to the first byte sent to the client, which may have no content."""
    total_s: float | None
    phases: dict[str, float]
    """Seconds, in the order of `Phase`; their sum is `ttft_s` where that is known."""
    prefill_phases: dict[str, float]
    """Pushed: the prefill leg's, which ran beside those of `phases`; their sum is its wall time."""
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: ReusedTokens
    computed_tokens: ComputedTokens
    kv_source: KVSource | None
    bytes: int
    """Moved forward, to the decode engine."""
    early_bytes: int
    """Pushed: those of them that had landed before the prompt's last chunk was computed."""
    return_bytes: int
    """Read from the decode engine with the conversation's history."""
    blocks: int
    descriptors: int
    grants: int
    write_chunks: int
    """Pushed: transfers that the bytes came in."""
    first_token_reused: bool
    """The token that the prefill engine sampled is the answer's first."""
    retained_tokens: int
    """Kept for the conversation's next turn."""
    reasons: list[Reason]
    expected: Expected | None
    """What `auto` has chosen its path by; None where it did not decide."""
    prefill: Identity | None
    decode: Identity | None
    finish_reason: str | None
    incomplete: bool
    """An engine's account is missing: it is not in yet, or the engine died with it."""


class LegRef(msgspec.Struct, frozen=True):
    """A leg whose account belongs into the record."""

    key: HandoffKey
    engine: Identity


class Draft(msgspec.Struct, eq=False, weakref=True):
    """The record of one request while its parts come in."""

    handoff_id: HandoffId
    endpoint: Endpoint
    requested_path: PathChoice
    on_reason: Callable[[Reason], None]
    """Called once for each reason."""
    trace: RequestTrace | None = None
    """While it is traced."""
    trace_id: str = ""
    tenant: str = ""
    charge: Charge | None = None
    """What it costs its tenant."""
    model: str = ""
    connector: Connector = "kvhandoff"
    path: Path | None = None
    weighed: Weighed | None = None
    requested_return: ReturnChoice = "off"
    remembered: bool | None = None
    """Whether the index knew its conversation; None: it was not asked."""
    history: Identity | None = None
    rebound: int = 0
    attempts: int = 0
    status: int | None = None
    walls: dict[str, float] = {}
    """The router's own cuts; a leg's wall time stands under its network phase."""
    first_content_s: float | None = None
    first_byte_s: float | None = None
    total_s: float | None = None
    prefill: LegRef | None = None
    prefill_wall_s: float | None = None
    """Of a leg that ran beside the decode leg."""
    decode: LegRef | None = None
    complete: bool = False
    """The client has been sent the whole of a stream."""
    joinable: bool = True
    """False when the engine answers without a ticket, so that its account doesn't name this handoff."""
    response_id: str = ""
    """The `id` in the response's body; empty: the one that the router would give it."""
    reasons: list[Reason] = []
    told: bool = False
    """It has settled, and whoever wants to know does."""
    legs: dict[tuple[int, str], LegRecord] = {}
    """Engines' accounts, by attempt and engine."""

    def __post_init__(self) -> None:
        if not self.response_id:
            self.response_id = self.endpoint.response_id(self.handoff_id)

    def headers(self) -> dict[str, str]:
        """What every response carries, errors too: under this id the record is found."""
        return {"X-Request-Id": self.handoff_id}

    def traced(self, name: str, leg: LegRef, url: str) -> AbstractContextManager[Mapping[str, str]]:
        """Around a leg to the engine at `url`: its span, and the headers by which the engine continues the
        trace; none where nothing is traced."""
        return _UNTRACED if self.trace is None else self.trace.leg(name, leg, url)

    def log_fields(self) -> dict[str, object]:
        """What lines of the log about it have in common; without prompts and keys."""
        fields = {
            "handoff_id": self.handoff_id,
            "request_id": self.response_id,
            "trace_id": self.trace_id,
            "tenant": self.tenant,
            "model": self.model,
            "path": self.path,
        }
        return {name: value for name, value in fields.items() if value}

    def because(self, reason: Reason) -> None:
        """Note and count a reason, once each."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            self.on_reason(reason)

    def add_leg(self, leg: LegRecord) -> None:
        """An engine's account; a repeated one changes nothing."""
        name = (leg.attempt, leg.engine_id)
        if name not in self.legs:
            self.legs[name] = leg
            for reason in leg.reasons:
                self.because(reason)

    def bound_again(self) -> None:
        """The prefill leg goes on for another decode engine."""
        self.rebound += 1
        self.because(Reason.REBOUND)

    def missing(self) -> list[Identity]:
        """Engines whose accounts are not in."""
        if not self.joinable:
            return []
        return [ref.engine for ref in (self.prefill, self.decode) if ref is not None and self._lacks(ref)]

    def accounts(self) -> tuple[LegRecord | None, LegRecord | None]:
        """The prefill and the decode engine's, as far as they are in."""
        return self._leg(self.prefill), self._leg(self.decode)

    @property
    def settled(self) -> bool:
        """Whether nothing more is to come."""
        if self.status is None or not self.joinable:
            return self.status is not None
        return not (self._lacks(self.decode) or self._lacks(self.prefill))

    def record(self, *, weighed: bool = True) -> RequestRecord:
        """All that is known now; without what `auto` has weighed, for those who only count."""
        prefill, decode = self.accounts()
        lacking = self._lacks(self.prefill) or self._lacks(self.decode)
        phases, ttft_s = self._phases(prefill, decode)
        forward, back = (None, decode) if decode and decode.leg == "local" else (decode, prefill)
        return RequestRecord(
            id=self.response_id,
            handoff_id=self.handoff_id,
            trace_id=self.trace_id,
            tenant=self.tenant,
            model=self.model,
            connector=self.connector,
            requested_path=self.requested_path,
            path=self.path,
            binding=_BINDINGS.get(self.path) if self.path else None,
            rebound=self.rebound,
            requested_return=self.requested_return,
            history=self.history,
            attempts=self.attempts,
            status=self.status,
            ttft_s=ttft_s,
            first_byte_s=self.first_byte_s,
            total_s=self.total_s,
            phases=phases,
            prefill_phases=self._prefill_phases(prefill),
            prompt_tokens=max(prefill.prompt_tokens if prefill else 0, decode.prompt_tokens if decode else 0),
            completion_tokens=decode.completion_tokens if decode else 0,
            reused_tokens=ReusedTokens(
                prefill_cache=prefill.cached_tokens if prefill else 0,
                decode_cache=decode.cached_tokens if decode else 0,
                transferred=forward.transferred_tokens if forward else 0,
                returned=back.transferred_tokens if back else 0,
            ),
            computed_tokens=ComputedTokens(
                prefill=prefill.computed_tokens if prefill else 0,
                decode=decode.computed_tokens if decode else 0,
            ),
            kv_source=decode.kv_source if decode else None,
            bytes=forward.bytes if forward else 0,
            early_bytes=forward.early_bytes if forward else 0,
            return_bytes=back.bytes if back else 0,
            blocks=forward.blocks if forward else 0,
            descriptors=forward.descriptors if forward else 0,
            grants=forward.grants if forward else 0,
            write_chunks=forward.write_chunks if forward else 0,
            first_token_reused=decode.first_token_reused if decode else False,
            retained_tokens=decode.retained_tokens if decode else 0,
            reasons=list(self.reasons),
            expected=self.weighed.expected() if weighed and self.weighed is not None else None,
            prefill=self.prefill.engine if self.prefill else None,
            decode=self.decode.engine if self.decode else None,
            finish_reason=decode.finish_reason if decode else None,
            incomplete=self.status is None or not self.joinable or lacking,
        )

    def _lacks(self, ref: LegRef | None) -> bool:
        return ref is not None and self._leg(ref) is None

    def _leg(self, ref: LegRef | None) -> LegRecord | None:
        if ref is None:
            return None
        leg = self.legs.get((ref.key.attempt, ref.engine.engine_id))
        return leg if leg is not None and leg.epoch == ref.engine.epoch else None

    def _phases(
        self, prefill: LegRecord | None, decode: LegRecord | None
    ) -> tuple[dict[str, float], float | None]:
        seconds = dict(self.walls)
        if prefill and Phase.PREFILL_NETWORK in seconds:
            _account(seconds, Phase.PREFILL_NETWORK, prefill, sum(prefill.phases.values()))
        if decode and Phase.DECODE_NETWORK in seconds:
            accounted = sum(decode.phases.values())
            if self.first_content_s is None:
                # An engine may close its account when its last bytes are out, a moment after they are here.
                accounted = min(decode.total_s, seconds[Phase.DECODE_NETWORK])
            _account(seconds, Phase.DECODE_NETWORK, decode, accounted)
        answered = self.status == 200 or self.first_content_s is not None
        known = self.first_content_s is not None or decode is not None
        return _ordered(seconds), sum(seconds.values()) if answered and known else None

    def _prefill_phases(self, prefill: LegRecord | None) -> dict[str, float]:
        """Of a leg that ran beside the decode leg; its network phase when its end has been seen."""
        if Phase.PREFILL_NETWORK in self.walls:
            return {}
        if self.prefill_wall_s is None:
            return _ordered(prefill.phases) if prefill else {}
        seconds: dict[str, float] = {Phase.PREFILL_NETWORK.value: self.prefill_wall_s}
        if prefill is None:
            return seconds
        _account(seconds, Phase.PREFILL_NETWORK, prefill, sum(prefill.phases.values()))
        return _ordered(seconds)


_UNTRACED: AbstractContextManager[Mapping[str, str]] = nullcontext({})
_PHASES: tuple[str, ...] = tuple(phase.value for phase in Phase)


def _ordered(seconds: dict[str, float]) -> dict[str, float]:
    """As requests meet them; what a newer engine calls otherwise comes last."""
    known = {name: seconds[name] for name in _PHASES if name in seconds}
    return known if len(known) == len(seconds) else known | {str(name): s for name, s in seconds.items()}


def _account(seconds: dict[str, float], network: Phase, leg: LegRecord, accounted: float) -> None:
    seconds[network] -= accounted
    for phase, duration in leg.phases.items():
        seconds[phase] = seconds.get(phase, 0.0) + duration


class Records:
    """The last requests' records, bounded."""

    def __init__(
        self,
        limit: int,
        *,
        on_reason: Callable[[Reason], None],
        on_closed: Callable[[Draft], None],
        on_settled: Callable[[Draft, RequestRecord], None],
    ) -> None:
        self._limit = limit
        self._on_reason = on_reason
        self._on_closed = on_closed
        self._on_settled = on_settled
        self._drafts: OrderedDict[str, Draft] = OrderedDict()
        self.running = 0
        """Requests that have been opened and not closed."""
        self.traces: Traces | None = None
        """None: requests are not traced."""

    def open(
        self,
        handoff_id: HandoffId,
        *,
        endpoint: Endpoint,
        requested_path: PathChoice,
        headers: Mapping[str, str] | None = None,
    ) -> Draft:
        """A new request's draft. `headers`: the client's, which may name the trace that it is part of."""
        draft = Draft(handoff_id, endpoint=endpoint, requested_path=requested_path, on_reason=self._on_reason)
        if self.traces is not None:
            draft.trace = self.traces.open(draft, headers or {})
            draft.trace_id = draft.trace.trace_id
        self._keep(handoff_id, draft)
        self.running += 1
        return draft

    def close(self, draft: Draft, status: int, total_s: float) -> None:
        """The request is over; its record settles when the engines' accounts are in."""
        self.running -= 1
        draft.status, draft.total_s = status, total_s
        if draft.charge is not None:
            draft.charge.close()
        self._on_closed(draft)
        log_request(draft)
        if not draft.joinable:
            self._keep(handoff_id_of(draft.response_id), draft)
        if draft.settled:
            self._settle(draft)
        elif draft.trace is not None:
            draft.trace.wait(draft)

    def add_legs(self, legs: Iterable[LegRecord]) -> None:
        """Engines' accounts, in any order; those of requests that aren't kept (any more) are dropped."""
        for leg in legs:
            draft = self._drafts.get(leg.handoff_id)
            if draft is None:
                continue
            draft.add_leg(leg)
            if not draft.told and draft.settled:
                self._settle(draft)

    def _settle(self, draft: Draft) -> None:
        draft.told = True
        record = draft.record(weighed=False)
        if draft.charge is not None and not record.incomplete:
            draft.charge.settle(record.prompt_tokens + record.completion_tokens)
        self._on_settled(draft, record)
        if draft.trace is not None:
            draft.trace.end(draft, record)

    def get(self, identifier: str) -> Draft | None:
        """By handoff id, or by the `id` of an OpenAI response."""
        return self._drafts.get(handoff_id_of(identifier))

    def _keep(self, handoff_id: HandoffId, draft: Draft) -> None:
        self._drafts[handoff_id] = draft
        while len(self._drafts) > self._limit:
            self._drafts.popitem(last=False)
