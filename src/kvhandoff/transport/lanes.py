"""A data plane of several like ones, its lanes: they share one large scattered transfer.

Why: a data plane that copies inside `post` does so on one thread, with a system call or more for each piece.
Two lanes halve that time where a second core is free.

Why that is as safe as one lane: every lane has connections of its own, so what happens on one says nothing
of the others. A transfer is over when all its parts are, and each part's end is its lane's fence. A lane is
never used by two threads at once: the threads that start parts beside the owner's are awaited before `post`
returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import (
    WHOLE,
    Handle,
    Operation,
    Part,
    Region,
    StagedPlane,
    TransferState,
    TransportError,
)

DRAIN_S = 5.0
"""How long `close` waits for transfers in flight."""

MIN_COPIES = 128
"""Transfers of fewer copies stay on one lane: sharing them would save a millisecond or two."""


@dataclass(eq=False, slots=True)
class _Shared:
    """A transfer: its parts, each on the lane that moves it."""

    parts: list[tuple[StagedPlane, Handle]]
    error: str | None = None

    @property
    def bytes(self) -> int:
        return sum(part.bytes for _, part in self.parts)


class LanedPlane:
    """Implements `api.StagedPlane`. One thread owns it.

    Peers see the first lane only: all lanes of this engine connect to the first lane of the peer, so the
    number of lanes is each engine's own business.
    """

    def __init__(self, make_lane: Callable[[int], StagedPlane], lanes: int) -> None:
        """`make_lane` is called with 0, 1, … `lanes` - 1; raises what it raises."""
        self._first, *self._others = [make_lane(index) for index in range(lanes)]
        self._lanes = [self._first, *self._others]
        self._threads = ThreadPoolExecutor(max(1, len(self._others)), "kvhandoff-lane")
        self.kind = self._first.kind

    def register(self, region: Region) -> None:
        for lane in self._lanes:
            lane.register(region)

    def metadata(self) -> bytes:
        return self._first.metadata()

    def connect(self, peer: Identity, metadata: bytes, mine: Part = WHOLE, theirs: Part = WHOLE) -> None:
        """On every lane, or on none."""
        try:
            for lane in self._lanes:
                lane.connect(peer, metadata, mine, theirs)
        except TransportError:
            self.disconnect(peer)
            raise

    def disconnect(self, peer: Identity) -> None:
        for lane in self._lanes:
            lane.disconnect(peer)

    def post(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> _Shared:
        """Returns when every part is started; on lanes that copy inside `start`, when all is copied."""
        shared = self.prepare(operation, peer, copies)
        self.start(shared)
        return shared

    def prepare(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> _Shared:
        """All parts or none: what raises does so before any byte moves."""
        shares = split(copies, len(self._lanes)) if len(copies) >= MIN_COPIES else [copies]
        shared = _Shared([])
        try:
            for lane, share in zip(self._lanes, shares, strict=False):
                shared.parts.append((lane, lane.prepare(operation, peer, share)))
        except TransportError:
            self.discard(shared)
            raise
        return shared

    def start(self, handle: _Shared) -> None:
        (first, its_part), *others = handle.parts
        started = [self._threads.submit(lane.start, part) for lane, part in others]
        first.start(its_part)
        for future in started:
            future.result()

    def discard(self, handle: _Shared) -> None:
        for lane, part in handle.parts:
            lane.discard(part)

    def poll(self, handle: _Shared) -> TransferState:
        """PENDING until every part is over: a part that has failed doesn't stop the others' bytes."""
        states = [lane.poll(part) for lane, part in handle.parts]
        if TransferState.PENDING in states:
            return TransferState.PENDING
        if TransferState.FAILED in states:
            handle.error = "; ".join(part.error for _, part in handle.parts if part.error) or None
            return TransferState.FAILED
        return TransferState.DONE

    @property
    def service_interval(self) -> float | None:
        """That of the lane that is in the greatest hurry."""
        intervals = [lane.service_interval for lane in self._lanes]
        return min((interval for interval in intervals if interval is not None), default=None)

    def service(self) -> None:
        for lane in self._lanes:
            lane.service()

    def drain(self, deadline: float) -> None:
        for lane in self._lanes:
            lane.drain(deadline)

    def close(self) -> None:
        """Waits up to DRAIN_S for transfers in flight.

        Raises TransportError if some remain on any lane; then no lane is released.
        """
        self.drain(time.monotonic() + DRAIN_S)
        for lane in self._lanes:
            lane.close()
        self._threads.shutdown()


def split(copies: Sequence[Copy], shares: int) -> list[list[Copy]]:
    """`copies` in their order as `shares` lists of as many blocks each, give or take one; for that a copy may
    be cut in two. Copies of less than one block are left for `prepare` to refuse."""
    blocks = sum(count for _, _, count in copies)
    divided: list[list[Copy]] = [[]]
    filled = 0
    for source, destination, count in copies:
        while len(divided) < shares and filled + count > (room_to := blocks * len(divided) // shares):
            taken = room_to - filled
            if taken > 0:
                divided[-1].append((source, destination, taken))
                source, destination, count = source + taken, destination + taken, count - taken
                filled += taken
            divided.append([])
        divided[-1].append((source, destination, count))
        filled += count
    return divided
