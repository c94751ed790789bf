"""A circuit breaker for the legs of one engine: a pure function of their recent outcomes.

    closed ── FAILURES in a row, within WINDOW_S ──▶ open: the engine rests for its pause
    open ── the pause is over, a leg begins ──▶ open, for the next pause, while this one leg probes
    open ── a leg succeeds ──▶ closed

What keeps a healthy engine from being ejected:

- A failure counts only if its leg began after the last one that counted. So twenty legs that one reset has
  cut off count as one failure, and it takes several occasions to open the breaker.
- A success ends the row. An engine's 4xx is one: it has worked.
- Only one leg in a pause tries it out, and what becomes of legs that began before says nothing new.
- Whoever rests is avoided, not forbidden: a decode engine without an alternative gets its legs.

State reports have their own say: an engine that reports nothing, or a problem, gets no legs in any case. An
engine whose legs hang is theirs too: each of those takes longer to fail than a row may.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from kvhandoff.core.clock import Clock

log = logging.getLogger(__name__)

FAILURES = 3
"""In a row. One or two come with any restart of an engine or a switch."""
WINDOW_S = 60.0
"""From the first to the last of them, in seconds; a row that takes longer is no outage."""
PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Each pause is twice the one before, from the first to the longest."""


class Breaker(msgspec.Struct, frozen=True):
    """The recent outcomes of one engine's legs. Times are seconds on the router's monotonic clock."""

    failures: int = 0
    """In a row."""
    first: float = 0.0
    """When the row began."""
    last: float = float("-inf")
    """When the last one of it was seen."""
    pause: float = 0.0
    """The present one; 0: closed."""
    until: float = 0.0
    """When it ends."""

    def rests(self, now: float) -> bool:
        """Whether the engine is to be avoided."""
        return self.pause > 0 and now < self.until


def begun(breaker: Breaker, now: float) -> Breaker:
    """A leg begins. When the pause is over it is the probe, and others stay away for the next one."""
    if not breaker.pause or now < breaker.until:
        return breaker
    pause = min(2 * breaker.pause, LONGEST_PAUSE_S)
    return replace(breaker, pause=pause, until=now + pause)


def succeeded(breaker: Breaker) -> Breaker:
    """A leg was answered."""
    return Breaker(last=breaker.last) if breaker.failures else breaker


def failed(breaker: Breaker, began: float, now: float) -> Breaker:
    """A leg that began at `began` has failed."""
    if began <= breaker.last or breaker.pause:
        return breaker
    if not breaker.failures or now - breaker.first > WINDOW_S:
        return replace(breaker, failures=1, first=now, last=now)
    failures = breaker.failures + 1
    opened = failures >= FAILURES
    pause, until = (PAUSE_S, now + PAUSE_S) if opened else (0.0, 0.0)
    return replace(breaker, failures=failures, last=now, pause=pause, until=until)


Verdict = Callable[[BaseException], bool | None]
"""What an exception out of a leg says of its engine: it has worked, it has not, or (None) nothing."""


def _nothing(_: BaseException) -> None:
    return None


class Circuit:
    """One engine's breaker at work. Used on the event loop's thread only."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._breaker = Breaker()

    @property
    def rests(self) -> bool:
        """Whether the engine is to be avoided now."""
        breaker = self._breaker
        return bool(breaker.pause) and breaker.rests(self._clock())

    def begin(self, verdict: Verdict = _nothing) -> LegOutcome:
        """A leg begins. As a context, the outcome is what `verdict` makes of the exception that ends it; a
        leg that ends without one has succeeded."""
        now = self._clock()
        if self._breaker.pause:
            self._breaker = begun(self._breaker, now)
        return LegOutcome(self, now, verdict)

    def succeeded(self) -> None:
        """A leg was answered."""
        if self._breaker.pause:
            log.info("%s: gets legs again", self._name)
        if self._breaker.failures:
            self._breaker = succeeded(self._breaker)

    def failed(self, began: float) -> None:
        """A leg that began then has failed."""
        before, self._breaker = self._breaker, failed(self._breaker, began, self._clock())
        if self._breaker.pause and not before.pause:
            log.warning("%s: %d legs in a row have failed; it rests", self._name, self._breaker.failures)


class LegOutcome:
    """What becomes of one leg; the first word counts. One that is given up says nothing of its engine."""

    __slots__ = ("_began", "_circuit", "_verdict")

    def __init__(self, circuit: Circuit, began: float, verdict: Verdict) -> None:
        self._circuit: Circuit | None = circuit
        self._began = began
        self._verdict = verdict

    def __enter__(self) -> LegOutcome:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        worked = True if error is None else self._verdict(error)
        if worked is not None:
            (self.succeeded if worked else self.failed)()

    def succeeded(self) -> None:
        """It is being answered."""
        if self._circuit is not None:
            self._circuit.succeeded()
            self._circuit = None

    def failed(self) -> None:
        """It came to nothing."""
        if self._circuit is not None:
            self._circuit.failed(self._began)
            self._circuit = None
