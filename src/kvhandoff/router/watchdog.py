"""Finds an engine that answers for its state, and does nothing."""

from __future__ import annotations

from kvhandoff.core.records import EngineState


class Watchdog:
    """Watches one engine's reports, in the router's time. An engine that doesn't count its steps is not
    watched."""

    def __init__(self, stuck_s: float) -> None:
        """`stuck_s`: how long an engine with work may stand still."""
        self._stuck_s = stuck_s
        self._mark: tuple[str, int, int] | None = None
        self._since = 0.0

    def look(self, state: EngineState, now: float) -> str | None:
        """Take in a report that arrived at `now`: what is wrong, or None.

        Work is what only the engine itself can bring forward: requests that run, or that wait while no other
        engine is involved. A load waits for one, and memory that is lent to one comes back in its time; both
        have deadlines of their own.
        """
        blocks = state.blocks
        lent = blocks.offered - blocks.retained + blocks.granted + blocks.quarantined
        has_work = state.running > 0 or (state.waiting > 0 and not (state.loading or lent))
        if state.progress is None or not has_work:
            self.forget()
            return None
        mark = (state.epoch, state.progress, state.cursor)
        if mark != self._mark:
            self._mark, self._since = mark, now
            return None
        still_s = now - self._since
        if still_s < self._stuck_s:
            return None
        return (
            f"no progress for {still_s:.0f} s, though it answers: {state.running} running, "
            f"{state.waiting} waiting, {state.loading} loading"
        )

    def forget(self) -> None:
        """Nothing is known of what it has done since: begin again with the next report."""
        self._mark = None
