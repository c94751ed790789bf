"""Ends the wait for a leg after a time that may be changed while it lasts.

What `asyncio.timeout` does, for less: every request waits for two legs, and that takes several times as long
to enter and leave.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadline:
    """While its context lasts: when the time is over, the wait in it is cancelled and TimeoutError comes out.

    A cancellation for another cause goes through as it is.
    """

    __slots__ = ("_alarm", "_before", "_loop", "_over", "_task")

    def __init__(self, seconds: float) -> None:
        """From now. Made within a task, and entered at once."""
        task = asyncio.current_task()
        assert task is not None
        self._over = False
        self._task = task
        self._before = task.cancelling()
        """Cancellations that are not ours."""
        self._loop = asyncio.get_running_loop()
        self._alarm = self._loop.call_later(seconds, self._ring)

    def __enter__(self) -> Deadline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.cancel()
        rung, self._over = self._over, True
        if rung and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def move(self, seconds: float) -> None:
        """The time is over so many seconds from now; no effect when it, or the context, is over already."""
        self._alarm.cancel()
        if not self._over:
            self._alarm = self._loop.call_later(seconds, self._ring)

    def lift(self) -> None:
        """There is no bound any more."""
        self._alarm.cancel()

    def _ring(self) -> None:
        self._over = True
        self._task.cancel()
