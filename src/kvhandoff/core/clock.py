"""Time is passed in: every part takes a `Clock`, and no two machines' clocks are ever compared."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

Clock = Callable[[], float]
"""Seconds on this process's own monotonic clock. Only differences of one clock's readings mean anything."""

Sleep = Callable[[float], Awaitable[None]]
"""Returns when so many seconds are over."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


monotonic: Clock = partial(time.clock_gettime, _CLOCK)
"""The clock of everything that holds or trusts a lease. Where the platform has one that goes on while the
machine is suspended, it is that: a lease ends for a reader that slept, too."""


class ManualClock:
    """A clock that moves only when told to, for tests and for the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
