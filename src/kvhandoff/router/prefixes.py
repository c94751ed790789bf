"""Which prefill engine has computed which turn: its prefix cache has the turn's prompt, most likely.

A hint, in memory and bounded: an engine computes what it turns out not to have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.router.engine import Engine


class Prefixes:
    """The last turns, by the key of the leg that answered."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[HandoffKey, tuple[Identity, int]] = OrderedDict()

    def remember(self, turn: HandoffKey, engine: Identity, tokens: int) -> None:
        """A prefill engine has computed a turn's prompt of about so many tokens."""
        self._turns[turn] = (engine, tokens)
        self._turns.move_to_end(turn)
        while len(self._turns) > self._limit:
            self._turns.popitem(last=False)

    def find(self, turn: HandoffKey, engines: Iterable[Engine]) -> dict[str, int]:
        """Tokens of the turn's prompt by the URL of the engine that has them, if it still lives that life."""
        identity, tokens = self._turns.get(turn, (None, 0))
        return {
            engine.url: tokens for engine in engines if identity is not None and engine.identity == identity
        }
