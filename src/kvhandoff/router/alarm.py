"""Waits for an engine that end when the engine stops answering, and not only at their deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Alarm:
    """The waits for one engine. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()

    @contextmanager
    def ends(self, wait: asyncio.Timeout) -> Iterator[None]:
        """While the context lasts, `ring` makes `wait`, which has been entered, expire at once."""
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    def ring(self) -> None:
        """The engine doesn't answer any more."""
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)
