"""What the router holds of one client request, across its attempts."""

from __future__ import annotations

import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.phases import Phase, PhaseTimer
from kvhandoff.handoff.events import Retention
from kvhandoff.handoff.messages import HistoryRef
from kvhandoff.router import wire
from kvhandoff.router.body import Fields
from kvhandoff.router.dialect import Unsealed, dialect_of
from kvhandoff.router.engine import Engine, Integration
from kvhandoff.router.moves import Bound, Move
from kvhandoff.router.names import Names
from kvhandoff.router.policy import TYPICAL_TOKENS, EngineView, Path, RequestSummary
from kvhandoff.router.records import Draft, LegRef
from kvhandoff.router.reservations import Reservation
from kvhandoff.router.source import Source


class Exchange(msgspec.Struct, kw_only=True, eq=False):
    """One client request. Its times are cut on the router's own clock."""

    request: wire.Request
    fields: Fields
    summary: RequestSummary
    headers: bytes
    """Of every leg, as lines."""
    clock: Clock
    timer: PhaseTimer
    draft: Draft
    names: Names | None = None
    """Of its conversation; None: no return wanted."""
    called: list[bytes] | None = None
    """What this turn is remembered under, once that is worked out."""
    history: HistoryRef | None = None
    """What a decode engine has kept of the conversation's last turn."""
    holder: Engine | None = None
    """The engine that has the history."""
    tokens: int = TYPICAL_TOKENS
    """Of the prompt, about."""
    kept: int = 0
    """Tokens of the history, about."""
    cached: dict[str, int] = {}
    """Tokens of the prompt that a prefill engine (URL) is believed to have."""
    chosen: EngineView | None = None
    """The prefill engine that the path was chosen with, until anything may have changed since."""
    bodies: dict[Integration, Unsealed] = {}
    """Of a decode leg, by what kind of engine it goes to."""
    reservation: Reservation | None = None
    """On the decode engine, while its leg lasts."""
    retain: Retention | None = None
    """How this turn is kept for the next one."""
    attempt: int = 0
    """Of the key in tickets. Goes up when an attempt that may have begun is given up."""
    failures: int = 0
    """Legs of it that failed, so that another attempt was needed."""
    avoid: set[str] = set()
    """URLs of engines that failed this request."""
    source: Source | None = None
    """The prefill leg, for a decode leg beside it (push) or to come (pull)."""
    target: Engine | None = None
    """The decode engine that has, or had, the decode leg."""
    bound: Bound | None = None
    """The decode leg that an operator may still move."""
    move: Move | None = None
    """An operator's order to move it."""
    abandoned: Engine | None = None
    """The decode engine whose leg was given up while the prefill leg goes on."""
    answered: bool = False
    """The decode engine's answer has begun: its KV is complete."""

    @property
    def path(self) -> Path | None:
        return self.draft.path

    @property
    def history_tokens(self) -> int:
        """Tokens of the prompt whose KV the history has, about."""
        return min(self.kept, self.tokens - 1) if self.history is not None else 0

    def to_prefill(self, engine: Engine) -> int:
        """Tokens that a prefill engine computes for it, about."""
        return max(1, self.tokens - max(self.history_tokens, self.cached.get(engine.url, 0)))

    @property
    def to_compute(self) -> int:
        """Tokens that the decode engine computes for it, about."""
        return self.tokens - self.history_tokens if self.path == "local" else 0

    @property
    def key(self) -> HandoffKey:
        return HandoffKey(self.draft.handoff_id, self.attempt)

    def decode_body(self, integration: Integration) -> Unsealed:
        """What a decode (or local) leg says to an engine of this kind, whatever has come of others. Raises
        RequestError."""
        body = self.bodies.get(integration)
        if body is None:
            dialect = dialect_of(integration, self.summary.endpoint)
            body = dialect.decode(self.fields, self.draft.handoff_id, self.summary.cache_salt)
            self.bodies[integration] = body
        return body

    def turn_names(self) -> list[bytes]:
        """What this turn is remembered under, if it is."""
        if self.called is None:
            self.called = list(self.names.of_this_turn()) if self.names is not None else []
        return self.called

    def leg_at(self, engine: Engine) -> LegRef:
        """This attempt's leg on the engine's present life."""
        if engine.identity is None:
            raise LookupError(f"{engine} has not reported its state yet")
        return LegRef(self.key, engine.identity)

    def elapsed(self) -> float:
        """Seconds since the request's arrival."""
        return self.clock() - self.timer.started

    def cut(self, phase: Phase) -> None:
        """Give the time since the last cut to `phase`."""
        self.timer.mark(phase)

    def alone(self, source: Source) -> None:
        """The prefill leg of a push has ended: the decode engine has all that it gets of it."""
        if self.source is source and self.bound is not None and self.move is None:
            self.bound.alone()

    def settle(self) -> None:
        """The decode engine has begun to answer: too late to move the leg."""
        self.bound = None
        if self.move is not None:
            self.move.overtaken()
            self.move = None

    def answering(self) -> None:
        """The decode engine's answer has begun."""
        self.answered = True
        if self.reservation is not None:
            self.reservation.computed()
        if self.source is not None:
            self.source.use()

    def failed(self, *, dispatched: bool) -> None:
        """The time since the last cut was for nothing. `dispatched`: the leg may have begun, so that the next
        one needs another key."""
        self.cut(Phase.RETRY)
        self.attempt += dispatched

    def begin_again(self) -> None:
        """The attempt is given up as a whole; the next one has another key and its own prefill leg."""
        self.failed(dispatched=True)
        self.source = None
        self.draft.prefill_wall_s = None
        self.timer.for_nothing()
