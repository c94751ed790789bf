"""How long a turn's prompt was, and which prefill engine has it in its prefix cache, most likely.

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
        self._turns: OrderedDict[HandoffKey, tuple[Identity | None, int]] = OrderedDict()

    def remember(self, turn: HandoffKey, engine: Identity | None, tokens: int) -> None:
        """A turn's prompt had about so many tokens, which this prefill engine, or none, has computed."""
        self._turns[turn] = (engine, tokens)
        self._turns.move_to_end(turn)
        while len(self._turns) > self._limit:
            self._turns.popitem(last=False)

    def tokens(self, turn: HandoffKey) -> int | None:
        """Of the turn's prompt; None: it is not remembered."""
        found = self._turns.get(turn)
        return found[1] if found is not None else None

    def find(self, turn: HandoffKey, engines: Iterable[Engine]) -> dict[str, int]:
        """Tokens of the turn's prompt by the URL of the engine that has them, if it still lives that life."""
        identity, tokens = self._turns.get(turn, (None, 0))
        return {
            engine.url: tokens for engine in engines if identity is not None and engine.identity == identity
        }
