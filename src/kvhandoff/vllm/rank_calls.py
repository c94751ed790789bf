"""What an engine's driver waits for: the answers of all ranks to one call, made into one.

A move is over when all ranks' parts are: DONE if all are done, FAILED only when *every* part has ended,
since a part that has failed stops no other's bytes. So what the protocol hears is a fence for the whole
engine.

No sockets and no time in here: ranks are numbers, and news are told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from kvhandoff.core.ids import Identity
from kvhandoff.transport.api import Operation, TransferState, TransportError
from kvhandoff.transport.mover import Moved
from kvhandoff.vllm.rank_channel import Connected, Ended

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

ConnectDone = Callable[[TransportError | None], None]
MoveDone = Callable[[Moved], None]


@dataclass(eq=False, slots=True)
class _Connecting:
    peer: Identity
    done: ConnectDone
    open: set[int]
    """Ranks that have not answered."""
    errors: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Moving:
    done: MoveDone
    open: set[int]
    """Ranks whose parts have not ended."""
    submitted_at: float
    parts: list[Ended] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def moved(self) -> Moved:
        """The whole move: times are the latest of all parts', bytes and descriptors their sums."""
        failed = bool(self.errors)
        return Moved(
            state=TransferState.FAILED if failed else TransferState.DONE,
            error="; ".join(self.errors) or None,
            submitted_at=self.submitted_at,
            posted_at=max(part.posted_at for part in self.parts),
            done_at=max(part.done_at for part in self.parts),
            descriptors=sum(part.descriptors for part in self.parts),
            bytes=0 if failed else sum(part.bytes for part in self.parts),
        )


class RankCalls:
    """Calls that were made to all ranks and have no answer yet. Used by one thread."""

    def __init__(self, ranks: int, forget: Callable[[Identity], None]) -> None:
        """`forget` is called with a peer that some ranks could connect to and some could not."""
        self._ranks = ranks
        self._forget = forget
        self._numbers = count()
        self._connecting: dict[int, _Connecting] = {}
        self._moving: dict[int, _Moving] = {}

    @property
    def moving(self) -> int:
        """How many moves may still be in flight."""
        return len(self._moving)

    def number(self) -> int:
        """The number of the next call."""
        return next(self._numbers)

    def connecting(self, call: int, peer: Identity, done: ConnectDone) -> None:
        """`done` is called when every rank has answered."""
        self._connecting[call] = _Connecting(peer, done, set(range(self._ranks)))

    def moves(self, call: int, done: MoveDone, submitted_at: float) -> None:
        """`done` is called when every rank's part has ended."""
        self._moving[call] = _Moving(done, set(range(self._ranks)), submitted_at)

    def connected(self, rank: int, news: Connected) -> None:
        """One rank has answered. Unknown calls and second answers are ignored."""
        call = self._connecting.get(news.call)
        if call is None or rank not in call.open:
            return
        call.open.remove(rank)
        if news.error is not None:
            call.errors.append(f"rank {rank}: {news.error}")
        if call.open:
            return
        del self._connecting[news.call]
        if call.errors:
            self._forget(call.peer)
        tell(call.done, TransportError("; ".join(call.errors)) if call.errors else None)

    def ended(self, rank: int, news: Ended) -> None:
        """One rank's part has ended; those of the others may still land. Unknown calls and second answers are
        ignored."""
        call = self._moving.get(news.call)
        if call is None or rank not in call.open:
            return
        call.open.remove(rank)
        call.parts.append(news)
        if news.error is not None:
            call.errors.append(f"rank {rank}: {news.error}")
        if not call.open:
            del self._moving[news.call]
            tell(call.done, call.moved())

    def rank_left(self, rank: int, why: str) -> None:
        """A rank answers no more. Connects move nothing, so that they have failed; its moves stay open."""
        for call in list(self._connecting):
            self.connected(rank, Connected(call, why))

    def process_ended(self, rank: int, now: float) -> None:
        """A rank's process has ended: nothing more of its parts can land."""
        why = "its process has ended"
        self.rank_left(rank, why)
        for call in list(self._moving):
            self.ended(rank, Ended(call, why, now, now, 0, 0))


def refused(
    operation: Operation, peer: Identity, copies: int, why: str, submitted_at: float, now: float
) -> Moved:
    """A move that no rank was told of."""
    error = f"{operation} {peer}: {why}"
    return Moved(TransferState.FAILED, error, submitted_at, now, now, copies, 0)


def tell(callback: Callable[[_T], None], value: _T) -> None:
    """One caller's mistake must not stop the calls of all."""
    try:
        callback(value)
    except Exception:  # noqa: BLE001
        _log.exception("a callback of the mover has failed")
