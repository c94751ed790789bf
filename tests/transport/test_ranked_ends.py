"""How transfers of a rank end, over a data plane that does what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import WHOLE, Operation, Part, Region, TransferState, TransportError
from kvhandoff.transport.ranks import RankedPlane, encode_ranks
from tests.transport.caches import rank_caches
from tests.transport.processes import identity

PEER = identity("peer")
DONE: Final = TransferState.DONE
FAILED: Final = TransferState.FAILED
PENDING: Final = TransferState.PENDING
COPIES: list[Copy] = [(0, 1, 2)]


@dataclass(eq=False)
class ScriptedPart:
    bytes: int = 100
    state: TransferState = PENDING
    error: str | None = None

    def fail(self, error: str) -> None:
        self.state, self.error = FAILED, error


@dataclass
class ScriptedPlane:
    """Writes down every call; transfers end when the test says so."""

    kind: str = "scripted"
    calls: list[str] = field(default_factory=list)
    parts: list[ScriptedPart] = field(default_factory=list)
    refuses: str = ""
    """The call that raises."""
    service_interval: float | None = 0.5

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.refuses:
            raise TransportError(f"refused: {call}")

    def register(self, region: Region) -> None:
        self._note("register")

    def metadata(self) -> bytes:
        return b"facts"

    def connect(self, peer: Identity, metadata: bytes, mine: Part = WHOLE, theirs: Part = WHOLE) -> None:
        self._note(f"connect {peer}")

    def disconnect(self, peer: Identity) -> None:
        self._note(f"disconnect {peer}")

    def post(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> ScriptedPart:
        raise AssertionError("parts are posted in two steps")

    def prepare(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> ScriptedPart:
        self._note(f"prepare {operation} {peer}")
        self.parts.append(ScriptedPart())
        return self.parts[-1]

    def start(self, handle: Any) -> None:
        self._note(f"start {self.parts.index(handle)}")

    def discard(self, handle: Any) -> None:
        self._note(f"discard {self.parts.index(handle)}")

    def poll(self, handle: Any) -> TransferState:
        state: TransferState = handle.state
        return state

    def service(self) -> None:
        self._note("service")

    def drain(self, deadline: float) -> None:
        self._note("drain")

    def close(self) -> None:
        self._note("close")


def metadata_of(ranks: int) -> bytes:
    """Of an engine of four KV heads."""
    told = []
    for rank, cache in enumerate(rank_caches(ranks, 4, 4, "layers first")):
        plane = RankedPlane(ScriptedPlane, rank, ranks)
        plane.register(cache.region)
        told.append(plane.metadata())
    return encode_ranks(told)


@pytest.fixture
def inner() -> ScriptedPlane:
    return ScriptedPlane()


@pytest.fixture
def plane(inner: ScriptedPlane) -> RankedPlane:
    """The only rank of an engine, connected to one of two ranks."""
    made = RankedPlane(lambda: inner, 0, 1)
    made.register(rank_caches(1, 4, 4, "layers first")[0].region)
    made.connect(PEER, metadata_of(2))
    inner.calls.clear()
    return made


def test_a_transfer_is_done_when_all_its_parts_are(plane: RankedPlane, inner: ScriptedPlane) -> None:
    handle = plane.post("read", PEER, COPIES)
    assert inner.calls == ["prepare read peer#0@0", "prepare read peer#1@0", "start 0", "start 1"]
    for part in inner.parts:
        assert plane.poll(handle) is PENDING
        part.state = DONE
    assert plane.poll(handle) is DONE
    assert (handle.error, handle.bytes) == (None, 200)


@pytest.mark.parametrize(("failing", "other"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("end", [DONE, FAILED])
def test_a_failed_part_is_no_fence_while_another_is_in_flight(
    plane: RankedPlane, inner: ScriptedPlane, failing: int, other: int, end: TransferState
) -> None:
    """Field case 38."""
    handle = plane.post("write", PEER, COPIES)
    inner.parts[failing].fail("peer lost")
    assert plane.poll(handle) is PENDING
    assert handle.error is None
    inner.parts[other].state = end
    assert plane.poll(handle) is FAILED
    assert handle.error == "peer lost"


def test_a_disconnect_ends_no_transfer(plane: RankedPlane, inner: ScriptedPlane) -> None:
    handle = plane.post("read", PEER, COPIES)
    plane.disconnect(PEER)
    assert inner.calls[-2:] == ["disconnect peer#0@0", "disconnect peer#1@0"]
    inner.parts[0].fail("peer lost")
    assert plane.poll(handle) is PENDING
    inner.parts[1].fail("peer lost, too")
    assert plane.poll(handle) is FAILED
    assert handle.error == "peer lost; peer lost, too"


@pytest.mark.parametrize(("rank", "dropped"), [(0, []), (1, ["discard 0"])])
def test_what_one_rank_refuses_starts_with_none(
    plane: RankedPlane, inner: ScriptedPlane, rank: int, dropped: list[str]
) -> None:
    inner.refuses = f"prepare read peer#{rank}@0"
    with pytest.raises(TransportError, match=f"refused: prepare read peer#{rank}@0"):
        plane.post("read", PEER, COPIES)
    prepared = ["prepare read peer#0@0", "prepare read peer#1@0"][: rank + 1]
    assert inner.calls == prepared + dropped


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_is_connected_with_all_its_ranks_or_with_none(
    plane: RankedPlane, inner: ScriptedPlane, rank: int
) -> None:
    inner.refuses = f"connect peer#{rank}@0"
    with pytest.raises(TransportError, match=f"refused: connect peer#{rank}@0"):
        plane.connect(PEER, metadata_of(2))
    assert inner.calls[-2:] == ["disconnect peer#0@0", "disconnect peer#1@0"]
    with pytest.raises(TransportError, match="read peer@0: not connected"):
        plane.post("read", PEER, COPIES)


def test_the_rest_is_the_inner_planes(plane: RankedPlane, inner: ScriptedPlane) -> None:
    assert (plane.kind, plane.service_interval) == ("scripted", 0.5)
    plane.service()
    plane.close()
    assert inner.calls == ["service", "close"]
