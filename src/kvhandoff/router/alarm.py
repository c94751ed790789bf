"""Waits for an engine that end when the engine stops answering, and not only at their deadlines."""

from __future__ import annotations

from kvhandoff.router.deadline import Deadline


class _Listening:
    __slots__ = ("_wait", "_waits")

    def __init__(self, waits: set[Deadline], wait: Deadline) -> None:
        self._waits = waits
        self._wait = wait

    def __enter__(self) -> None:
        self._waits.add(self._wait)

    def __exit__(self, *_: object) -> None:
        self._waits.discard(self._wait)


class Alarm:
    """The waits for one engine. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._waits: set[Deadline] = set()

    def ends(self, wait: Deadline) -> _Listening:
        """While the context lasts, `ring` makes `wait` expire at once."""
        return _Listening(self._waits, wait)

    def ring(self) -> None:
        """The engine doesn't answer any more."""
        for wait in self._waits:
            wait.move(0)
