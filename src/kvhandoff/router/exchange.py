"""What the router holds of one client request, across its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from kvhandoff.core.clock import Clock
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.phases import Phase, PhaseTimer
from kvhandoff.router.answers import Prefilled
from kvhandoff.router.body import Fields
from kvhandoff.router.engine import Engine
from kvhandoff.router.policy import Path, RequestSummary
from kvhandoff.router.records import Draft, LegRef


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One client request. Its times are cut on the router's own clock."""

    request: web.Request
    fields: Fields
    summary: RequestSummary
    headers: dict[str, str]
    """Of every leg."""
    clock: Clock
    timer: PhaseTimer
    draft: Draft
    attempt: int = 0
    """Of the key in tickets. Goes up when an attempt that may have begun is given up."""
    avoid: set[str] = field(default_factory=set)
    """URLs of engines that failed this request."""
    prefilled: Prefilled | None = None
    """The prefill leg's result, for a decode leg to come."""
    outstanding: tuple[Engine, LegRef] | None = None
    """The prefill leg that may leave an offer, until a decode engine has answered for it."""

    @property
    def path(self) -> Path | None:
        return self.draft.path

    @property
    def key(self) -> HandoffKey:
        return HandoffKey(self.draft.handoff_id, self.attempt)

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

    def failed(self, *, begin_again: bool) -> None:
        """The time since the last cut was for nothing.

        `begin_again`: so was the attempt's before; the next one has another key and its own prefill leg.
        """
        self.cut(Phase.RETRY)
        if not begin_again:
            return
        self.attempt += 1
        self.prefilled = None
        for phase in (Phase.PREFILL_NETWORK, Phase.BIND, Phase.DECODE_NETWORK):
            self.timer.seconds[Phase.RETRY] += self.timer.seconds.pop(phase, 0.0)
