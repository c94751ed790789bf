"""Which decode engine keeps what of which conversation: metadata only, and no more than a hint.

A conversation is found again by its names (`names.py`) in an index (`index.py`). The longest beginning that
is known wins, so that an edited or branched conversation finds the last turn that it still shares. How much
of a turn is kept, engines tell in their accounts. These come to every replica of the router, since each of
them asks every engine, and one that has just started is given the last ones again: so an index that replicas
share holds nothing that changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvhandoff.core.ids import Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.messages import HistoryRef
from kvhandoff.router.index import Index, Turn
from kvhandoff.router.names import Names


class Place(NamedTuple):
    """Where a life of an engine is reached, as its state report says."""

    control_address: str
    max_tokens: int
    """What a turn can have at most."""


class Found(NamedTuple):
    """The outcome of a look-up."""

    history: HistoryRef | None
    reason: Reason | None
    """Why the index may have kept something back."""


class Conversations:
    """The last turns, by the names of their conversations. `limit` bounds the accounts of engines."""

    def __init__(self, index: Index, limit: int) -> None:
        self._index = index
        self._limit = limit
        self._kept: OrderedDict[str, int] = OrderedDict()
        """Tokens, by turn."""

    def remember(self, names: Iterable[bytes], turn: Turn) -> None:
        """A turn has been answered. `names`: `Names.of_this_turn`."""
        self._index.remember(list(names), turn)

    async def find(self, names: Names, locate: Callable[[Identity], Place | None]) -> Found:
        """What is kept of the turn that shares most with this one.

        `locate`: where a life is that an engine lives now, or None. The history's `n_tokens` is an upper
        bound until the engine's account is in.
        """
        asked = list(names.of_former_turns())
        if not asked:
            return Found(None, None)
        turns, reason = await self._index.look_up(asked)
        for name, turn in zip(asked, turns, strict=False):
            place = locate(turn.source) if turn is not None else None
            if turn is None or place is None:
                continue
            key, source = turn.key, turn.source
            kept = _account(key.handoff_id, key.attempt, source.engine_id, source.epoch)
            n_tokens = self._kept.get(kept, place.max_tokens)
            if n_tokens:
                self._index.renew(name)
                history = HistoryRef(
                    key=turn.key,
                    source=turn.source,
                    control_address=place.control_address,
                    n_tokens=n_tokens,
                )
                return Found(history, reason)
        return Found(None, reason)

    def account(self, leg: LegRecord) -> None:
        """An engine's account of a turn says how much it has kept; 0: nothing, as if it had never been."""
        if leg.leg == "prefill":
            return
        turn = _account(leg.handoff_id, leg.attempt, leg.engine_id, leg.epoch)
        self._kept[turn] = leg.retained_tokens
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)


def _account(handoff_id: str, attempt: int, engine_id: str, epoch: str) -> str:
    """One text: of all that a router keeps, there are most of these."""
    return f"{handoff_id}#{attempt} {engine_id}@{epoch}"
