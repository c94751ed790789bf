"""The work that the router has given an engine, in tokens and from the decision on, so that simultaneous
requests spread."""

from __future__ import annotations

from kvhandoff.core.records import EngineState
from kvhandoff.router.policy import TYPICAL_TOKENS


class Reservation:
    """One leg's: until its context ends."""

    def __init__(self, of: Reservations, tokens: int, compute: int) -> None:
        self._of = of
        self._tokens = tokens
        self._compute = compute
        self._ended = False

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def computed(self) -> None:
        """The prompt is computed: the leg is no more in anybody's way but by its KV."""
        self._of.changes += 1
        self._of.computing -= self._compute
        self._compute = 0

    def end(self) -> None:
        """The leg has ended; once."""
        if not self._ended:
            self._ended = True
            self.computed()
            self._of.legs -= 1
            self._of.running -= 1
            self._of.load -= self._tokens


class Reservations:
    """One engine's legs, and what it said of others'."""

    def __init__(self) -> None:
        self.changes = 0
        """Of what stands below: while it is the same, so is that."""
        self.legs = 0
        self.chosen = 0
        """Legs that it was ever given."""
        self.load = 0
        """Tokens, as `EngineView.load`."""
        self.computing = 0
        """Those of the legs' prompts that it has yet to compute."""
        self.running = 0
        """Requests here."""
        self._others = 0
        """Requests that it had of other routers' or clients', at its last report."""
        self._others_tokens = 0

    def take(self, tokens: int, compute: int) -> Reservation:
        """One more leg."""
        self.changes += 1
        self.legs += 1
        self.chosen += 1
        self.running += 1
        self.load += tokens
        self.computing += compute
        return Reservation(self, tokens, compute)

    def reported(self, state: EngineState) -> None:
        """Requests beyond the legs that are reserved now are others'. Their sizes are not reported: each is
        taken for a typical one, or for its share of the blocks in use if that is more."""
        self.changes += 1
        self.running -= self._others
        self.load -= self._others_tokens
        self._others = max(0, state.running + state.waiting + state.loading - self.legs)
        share = state.blocks.used * state.block_size // max(1, state.running)
        self._others_tokens = self._others * max(TYPICAL_TOKENS, share)
        self.running += self._others
        self.load += self._others_tokens
