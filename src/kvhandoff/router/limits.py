"""Limits of a tenant: pure functions of what it uses and the time, and the meter that applies them.

Tokens are counted by a token bucket: it holds a minute's worth and fills evenly. A request takes what it may
use at most when it is admitted, and puts back what it did not use when its engines have told:

    spent(t) = max(0, spent − rate · Δt)          rate = tokens per minute / 60
    admitted if spent + reserved ≤ a minute's worth,  reserved = min(bound, a minute's worth)
    afterwards  spent += used − reserved

The bound of a request that says no limit of its answer is the model's whole context. It is cut off at a
minute's worth, so that any request is admitted in the end; one that uses more puts its tenant into debt, and
over time nobody gets more than the rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError

RETRY_CONCURRENCY_S = 1.0
"""When to come again to a tenant that has too many requests under way: nobody knows when one ends."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use; None: no limit."""

    max_concurrency: int | None = None
    tokens_per_minute: int | None = None

    def shared_by(self, processes: int) -> Limits:
        """Each one's part, so that together they have no more, but for one that would have nothing."""
        return Limits(*(n and max(1, n // processes) for n in (self.max_concurrency, self.tokens_per_minute)))


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tenant uses."""

    running: int = 0
    spent: float = 0.0
    """Tokens that have not been made up for by time, as of `at`."""
    at: float = 0.0
    """Seconds, on the router's monotonic clock."""


class Excess(NamedTuple):
    """Too much is asked for."""

    limit: Literal["max_concurrency", "tokens_per_minute"]
    retry_after_s: float
    """Then it is not too much any more, if nothing else is admitted."""


class Reserved(NamedTuple):
    """Tokens are set aside."""

    usage: Usage
    tokens: int


def begin(limits: Limits, usage: Usage) -> Usage | Excess:
    """One more request under way."""
    if limits.max_concurrency is not None and usage.running >= limits.max_concurrency:
        return Excess("max_concurrency", RETRY_CONCURRENCY_S)
    return replace(usage, running=usage.running + 1)


def end(usage: Usage) -> Usage:
    """One less."""
    return replace(usage, running=usage.running - 1)


def reserve(limits: Limits, usage: Usage, bound: int, now: float) -> Reserved | Excess:
    """Set aside what a request may use: `bound` tokens at most."""
    room = limits.tokens_per_minute
    if room is None:
        return Reserved(usage, 0)
    usage = _refilled(usage, room, now)
    tokens = min(max(bound, 0), room)
    over = usage.spent + tokens - room
    if over > 0:
        return Excess("tokens_per_minute", over * 60 / room)
    return Reserved(replace(usage, spent=usage.spent + tokens), tokens)


def settle(limits: Limits, usage: Usage, reserved: int, used: int, now: float) -> Usage:
    """The request has used `used` tokens."""
    room = limits.tokens_per_minute
    if room is None:
        return usage
    usage = _refilled(usage, room, now)
    return replace(usage, spent=max(0.0, usage.spent + used - reserved))


def _refilled(usage: Usage, room: int, now: float) -> Usage:
    spent = max(0.0, usage.spent - (now - usage.at) * room / 60)
    return replace(usage, spent=spent, at=now)


class Meter:
    """One tenant's use, over changes of its limits. Used on the event loop's thread only."""

    def __init__(self, name: str, limits: Limits, clock: Clock) -> None:
        self.name = name
        self.limits = limits
        self.usage = Usage(at=clock())
        self._clock = clock

    def open(self) -> Charge:
        """One more request. Raises RequestError (429)."""
        usage = begin(self.limits, self.usage)
        if isinstance(usage, Excess):
            raise self._too_much(usage, f"{self.usage.running} requests under way")
        self.usage = usage
        return Charge(self)

    def reserve(self, bound: int) -> int:
        """How many tokens are set aside. Raises RequestError (429)."""
        reserved = reserve(self.limits, self.usage, bound, self._clock())
        if isinstance(reserved, Excess):
            raise self._too_much(reserved, f"a request of up to {bound} tokens")
        self.usage = reserved.usage
        return reserved.tokens

    def close(self) -> None:
        """One request less."""
        self.usage = end(self.usage)

    def settle(self, reserved: int, used: int) -> None:
        """What was used of it."""
        self.usage = settle(self.limits, self.usage, reserved, used, self._clock())

    def _too_much(self, excess: Excess, got: str) -> RequestError:
        seconds = max(1, ceil(excess.retry_after_s))
        return RequestError(
            f"{excess.limit}: got {got}, allowed for {self.name} is {getattr(self.limits, excess.limit)}; "
            f"try again in {seconds} s",
            status=429,
            code="rate_limit_exceeded",
            kind="rate_limit_error",
            headers={"Retry-After": str(seconds)},
        )


class Charge:
    """What one request costs its tenant."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._reserved: int | None = None
        self._open = True

    @property
    def counts_tokens(self) -> bool:
        """Whether there is a limit, so that a bound is worth finding."""
        return self._meter.limits.tokens_per_minute is not None

    def reserve(self, bound: int) -> None:
        """It may use so many tokens. Raises RequestError (429)."""
        self._reserved = self._meter.reserve(bound)

    def close(self) -> None:
        """It has ended. What it has used may come later, or never: then all that was reserved is spent."""
        if self._open:
            self._open = False
            self._meter.close()

    def settle(self, used: int) -> None:
        """It has used so many tokens. Once."""
        if self._reserved is not None:
            self._meter.settle(self._reserved, used)
            self._reserved = None
