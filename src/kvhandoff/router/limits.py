"""Limits of a tenant: pure functions of what it uses and the time, and the meter that applies them.

Several routers that share an index count together (`shared_limits.py`): a request is admitted if there is
room by this router's own count, and by that of all. Where the latter can't be had, the own one decides alone,
with a reason: no tenant is ever without its limits.

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

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple, Protocol

import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.router.index import IN_MEMORY

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


class Usage(msgspec.Struct, frozen=True):
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
    running: int = 0
    """Requests under way, where there are too many."""


class Reserved(NamedTuple):
    """Tokens are set aside."""

    usage: Usage
    tokens: int


def begin(limits: Limits, usage: Usage) -> Usage | Excess:
    """One more request under way."""
    if limits.max_concurrency is not None and usage.running >= limits.max_concurrency:
        return Excess("max_concurrency", RETRY_CONCURRENCY_S, usage.running)
    return Usage(usage.running + 1, usage.spent, usage.at)


def end(usage: Usage) -> Usage:
    """One less."""
    return Usage(usage.running - 1, usage.spent, usage.at)


def reserve(limits: Limits, usage: Usage, bound: int, now: float) -> Reserved | Excess:
    """Set aside what a request may use: `bound` tokens at most."""
    room = limits.tokens_per_minute
    if room is None:
        return Reserved(usage, 0)
    spent, tokens = _spent(usage, room, now), min(max(bound, 0), room)
    over = spent + tokens - room
    if over > 0:
        return Excess("tokens_per_minute", over * 60 / room)
    return Reserved(Usage(usage.running, spent + tokens, now), tokens)


def settle(limits: Limits, usage: Usage, reserved: int, used: int, now: float) -> Usage:
    """The request has used `used` tokens."""
    room = limits.tokens_per_minute
    if room is None:
        return usage
    return Usage(usage.running, max(0.0, _spent(usage, room, now) + used - reserved), now)


def _spent(usage: Usage, room: int, now: float) -> float:
    """As of now."""
    return max(0.0, usage.spent - (now - usage.at) * room / 60)


class SharedCounts(Protocol):
    """What tenants use of all routers. Where it can't be asked, the answer is the reason."""

    async def begin(self, tenant: str, running: int, limit: int) -> Excess | Reason | None:
        """One more request, with which so many are under way here. None: admitted."""

    def state(self, tenant: str, running: int) -> None:
        """So many are under way here now. Returns at once."""

    async def reserve(self, tenant: str, tokens: int, room: int) -> Excess | Reason | None:
        """Set tokens aside, of `room` a minute. None: admitted."""

    def settle(self, tenant: str, delta: int, room: int) -> None:
        """So many tokens more were used than set aside; fewer, if below 0. Returns at once."""

    async def start(self) -> None:
        """Get ready; a server that can't be reached now is asked again in the background."""

    async def close(self) -> None:
        """End the background work."""


def open_limits(index: str, key: bytes, *, deadline_s: float, connect_s: float) -> SharedCounts | None:
    """Counts on the server of the shared index (`index.py`); None: each router's own, as its index is."""
    if index == IN_MEMORY:
        return None
    from kvhandoff.router.shared_limits import SharedLimits

    return SharedLimits(index, key, deadline_s=deadline_s, connect_s=connect_s)


class Meter:
    """One tenant's use, over changes of its limits. Used on the event loop's thread only."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        clock: Clock,
        shared: SharedCounts | None = None,
        *,
        processes: int = 1,
    ) -> None:
        """`processes`: how many share the limits without counting together; each admits its part of them."""
        self.name = name
        self.usage = Usage(at=clock())
        self._clock = clock
        self.shared = shared
        """What the tenant uses of all routers, where they count together."""
        self._processes = processes
        self.limits = limits

    @property
    def limits(self) -> Limits:
        """As the tenant's; what is applied here is its part."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self._part = limits.shared_by(self._processes)
        self.counts_tokens = limits.tokens_per_minute is not None

    async def open(self, on_reason: Callable[[Reason], None]) -> Charge:
        """One more request; `on_reason` hears why the other routers' requests don't count. Raises
        RequestError (429)."""
        usage = begin(self._part, self.usage)
        if isinstance(usage, Excess):
            raise self._too_many(usage)
        self.usage = usage
        limit = self._limits.max_concurrency
        if self.shared is not None and limit is not None:
            try:
                verdict = await self.shared.begin(self.name, usage.running, limit)
                if isinstance(verdict, Excess):
                    raise self._too_many(verdict)
            except BaseException:
                self.close()
                raise
            if verdict is not None:
                on_reason(verdict)
        return Charge(self, on_reason)

    def reserve(self, bound: int) -> int:
        """How many tokens are set aside here. Raises RequestError (429)."""
        reserved = reserve(self._part, self.usage, bound, self._clock())
        if isinstance(reserved, Excess):
            raise self._too_much(reserved, bound)
        self.usage = reserved.usage
        return reserved.tokens

    async def reserve_everywhere(self, tokens: int, bound: int, on_reason: Callable[[Reason], None]) -> int:
        """How many of these are set aside of all routers' too. Raises RequestError (429)."""
        room = self.limits.tokens_per_minute
        if self.shared is None or room is None:
            return 0
        verdict = await self.shared.reserve(self.name, tokens, room)
        if isinstance(verdict, Excess):
            raise self._too_much(verdict, bound)
        if verdict is not None:
            on_reason(verdict)
            return 0
        return tokens

    def close(self) -> None:
        """One request less."""
        self.usage = end(self.usage)
        if self.shared is not None:
            limited = self.limits.max_concurrency is not None  # it may have been when requests began
            self.shared.state(self.name, self.usage.running if limited else 0)

    def settle(self, own: int, everywhere: int, used: int) -> None:
        """What was used of the tokens set aside here, and everywhere."""
        self.usage = settle(self._part, self.usage, own, used, self._clock())
        room = self.limits.tokens_per_minute
        if self.shared is not None and room is not None and used != everywhere:
            self.shared.settle(self.name, used - everywhere, room)

    def _too_many(self, excess: Excess) -> RequestError:
        return self._refusal(excess, f"{excess.running} requests under way")

    def _too_much(self, excess: Excess, bound: int) -> RequestError:
        return self._refusal(excess, f"a request of up to {bound} tokens")

    def _refusal(self, excess: Excess, got: str) -> RequestError:
        seconds = max(1, ceil(excess.retry_after_s))
        allowed = str(getattr(self.limits, excess.limit))
        if self._processes > 1:
            allowed += f", {getattr(self._part, excess.limit)} of it at each of {self._processes} workers"
        return RequestError(
            f"{excess.limit}: got {got}, allowed for {self.name} is {allowed}; try again in {seconds} s",
            status=429,
            code="rate_limit_exceeded",
            kind="rate_limit_error",
            headers={"Retry-After": str(seconds)},
        )


def _unheard(_: Reason) -> None:
    """Nobody wants to know any more."""


class Charge:
    """What one request costs its tenant."""

    def __init__(self, meter: Meter, on_reason: Callable[[Reason], None]) -> None:
        self._meter = meter
        self._on_reason = on_reason
        self._reserved: int | None = None
        self._everywhere = 0
        """Of them, what all routers know of; none where they could not be asked, or refused."""
        self._open = True

    @property
    def counts_tokens(self) -> bool:
        """Whether there is a limit, so that a bound is worth finding."""
        return self._meter.counts_tokens

    async def reserve(self, bound: int) -> None:
        """It may use so many tokens. Raises RequestError (429)."""
        meter = self._meter
        self._reserved = meter.reserve(bound)
        if meter.shared is not None:
            self._everywhere = await meter.reserve_everywhere(self._reserved, bound, self._on_reason)

    def close(self) -> None:
        """It has ended. What it has used may come later, or never: then all that was reserved is spent."""
        if self._open:
            self._open = False
            self._on_reason = _unheard  # of the record that holds this: such a cycle would outlive both
            self._meter.close()

    def settle(self, used: int) -> None:
        """It has used so many tokens. Once."""
        if self._reserved is not None:
            self._meter.settle(self._reserved, self._everywhere, used)
            self._reserved = None
