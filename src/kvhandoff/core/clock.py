"""Time is passed in: every part takes a `Clock`, and no two machines' clocks are ever compared."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds on this process's own monotonic clock. Only differences of one clock's readings mean anything."""

monotonic: Clock = time.monotonic


class ManualClock:
    """A clock that moves only when told to, for tests and for the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
