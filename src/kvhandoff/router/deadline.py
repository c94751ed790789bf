"""Ends the wait for a leg after a time that may be changed while it lasts.

What `asyncio.timeout` does, for less: every request waits for two legs, whose times are seldom over. So all
waits share one timer, set for the one that ends first when it was set.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

_TICK_S = 0.001
"""What loops round a timer to: so much too early is in time."""


class Deadlines:
    """The waits of one loop."""

    def __init__(self) -> None:
        self._running: set[Deadline] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._set_for = math.inf

    def within(self, seconds: float) -> Deadline:
        """From now. Made within a task, and entered at once."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        return Deadline(self, task, self._loop.time() + seconds)

    def now(self) -> float:
        """By the loop's clock."""
        return self._loop.time()

    def watch(self, deadline: Deadline) -> None:
        """It runs, or is due at another time than before."""
        self._running.add(deadline)
        if deadline.due < self._set_for:
            self._set(deadline.due)

    def forget(self, deadline: Deadline) -> None:
        """It is over, or has no bound any more."""
        self._running.discard(deadline)

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._set_for = self._loop.call_at(due, self._look), due

    def _look(self) -> None:
        self._timer, self._set_for = None, math.inf
        late = self._loop.time() + _TICK_S
        for deadline in [each for each in self._running if each.due <= late]:
            deadline.ring()
        if self._running:
            self._set(min(deadline.due for deadline in self._running))


class Deadline:
    """While its context lasts: when the time is over, the wait in it is cancelled and TimeoutError comes out.

    A cancellation for another cause goes through as it is.
    """

    __slots__ = ("_all", "_before", "_over", "_rung", "_task", "due")

    def __init__(self, deadlines: Deadlines, task: asyncio.Task[object], due: float) -> None:
        self.due = due
        """By the loop's clock."""
        self._all = deadlines
        self._task = task
        self._before = task.cancelling()
        """Cancellations that are not ours."""
        self._over = False
        """Nothing moves it any more."""
        self._rung = False

    def __enter__(self) -> Deadline:
        self._all.watch(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._all.forget(self)
        self._over = True
        if self._rung and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def move(self, seconds: float) -> None:
        """The time is over so many seconds from now; no effect when it is over or lifted, or the context is
        over."""
        if not self._over:
            self.due = self._all.now() + seconds
            self._all.watch(self)

    def lift(self) -> None:
        """There is no bound any more, whatever is yet to come."""
        self._over = True
        self._all.forget(self)

    def ring(self) -> None:
        """The time is over."""
        self._all.forget(self)
        self._over = self._rung = True
        self._task.cancel()
