"""How vLLM's loop passes its time while it has nothing to compute and a load is under way."""

from __future__ import annotations

import threading

FIRST_WAIT_S = 0.002
LONGEST_WAIT_S = 0.02
"""By itself the loop spins, and takes a core from the engine that computes the prompt where both share a
machine. A pull is over within a few short waits; behind a push it may be seconds, so they grow. A new request
ends none, since only vLLM hears of it: it waits for the longest of them at most."""


class IdleWait:
    """`wait` on vLLM's main thread; `news` on any."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._next_s = FIRST_WAIT_S

    def news(self) -> None:
        """There is something to do: ends the present wait, or the next one at once."""
        self._came.set()

    def busy(self) -> None:
        """A step computes, or a request has come: the next wait is a short one."""
        self._next_s = FIRST_WAIT_S

    def wait(self) -> None:
        """Until there are news, but no longer than what is due: twice as long each time."""
        came = self._came.wait(self._next_s)
        self._came.clear()
        self._next_s = FIRST_WAIT_S if came else min(2 * self._next_s, LONGEST_WAIT_S)
