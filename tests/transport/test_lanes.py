"""Transfers shared by lanes, over lanes that do what the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import WHOLE, Operation, Part, Region, TransferState, TransportError
from kvhandoff.transport.lanes import MIN_COPIES, LanedPlane, split
from tests.transport.processes import DEADLINE, identity

PEER = identity("peer")
DONE: Final = TransferState.DONE
FAILED: Final = TransferState.FAILED
PENDING: Final = TransferState.PENDING

FEW: list[Copy] = [(2 * block, block, 1) for block in range(MIN_COPIES - 1)]
MANY: list[Copy] = [(2 * block, block, 1) for block in range(MIN_COPIES)]


@dataclass
class Share:
    """What a lane made of its share."""

    copies: list[Copy]
    bytes: int = 1000
    state: TransferState = PENDING
    error: str | None = None

    def fail(self, error: str) -> None:
        self.state, self.error = FAILED, error


@dataclass
class ScriptedLane:
    """Writes down every call; parts end when the test says so."""

    kind: str = "scripted"
    calls: list[str] = field(default_factory=list)
    parts: list[Share] = field(default_factory=list)
    refuses: str | None = None
    """With what `connect` and `prepare` raise."""
    stuck: bool = False
    """`drain` raises."""
    on_start: Callable[[Share], Any] = lambda part: None
    interval: float | None = None

    @property
    def service_interval(self) -> float | None:
        return self.interval

    def register(self, region: Region) -> None:
        self.calls.append("register")

    def metadata(self) -> bytes:
        return b"facts"

    def connect(self, peer: Identity, metadata: bytes, mine: Part = WHOLE, theirs: Part = WHOLE) -> None:
        exchanged = "" if (mine, theirs) == (WHOLE, WHOLE) else f" {mine} {theirs}"
        self.calls.append(f"connect {peer} {metadata.decode()}{exchanged}")
        self._check()

    def disconnect(self, peer: Identity) -> None:
        self.calls.append(f"disconnect {peer}")

    def _check(self) -> None:
        if self.refuses:
            raise TransportError(self.refuses)

    def post(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> Share:
        raise AssertionError("lanes are posted to in two steps")

    def prepare(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> Share:
        self.calls.append(f"prepare {operation} {peer}")
        self._check()
        self.parts.append(Share(list(copies)))
        return self.parts[-1]

    def start(self, handle: Any) -> None:
        self.calls.append("start")
        self.on_start(handle)

    def discard(self, handle: Any) -> None:
        assert handle in self.parts
        self.calls.append("discard")

    def poll(self, handle: Any) -> TransferState:
        state: TransferState = handle.state
        return state

    def service(self) -> None:
        self.calls.append("service")

    def drain(self, deadline: float) -> None:
        self.calls.append("drain")
        if self.stuck:
            raise TransportError("still in flight")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def lanes() -> list[ScriptedLane]:
    return [ScriptedLane(), ScriptedLane()]


@pytest.fixture
def plane(lanes: list[ScriptedLane]) -> LanedPlane:
    return LanedPlane(lanes.__getitem__, len(lanes))


def test_a_transfer_of_few_copies_stays_on_the_first_lane(
    plane: LanedPlane, lanes: list[ScriptedLane]
) -> None:
    handle = plane.post("read", PEER, FEW)
    assert plane.poll(handle) is PENDING
    assert [part.copies for part in lanes[0].parts] == [FEW]
    assert lanes[0].calls == ["prepare read peer@0", "start"]
    assert lanes[1].calls == []
    lanes[0].parts[0].state = DONE
    assert plane.poll(handle) is DONE


def test_a_transfer_of_many_is_shared_and_done_when_all_of_it_is(
    plane: LanedPlane, lanes: list[ScriptedLane]
) -> None:
    handle = plane.post("write", PEER, MANY)
    assert [lane.parts[0].copies for lane in lanes] == [MANY[: MIN_COPIES // 2], MANY[MIN_COPIES // 2 :]]
    for lane in lanes:
        assert lane.calls == ["prepare write peer@0", "start"]
        assert plane.poll(handle) is PENDING
        lane.parts[0].state = DONE
    assert plane.poll(handle) is DONE
    assert plane.poll(handle) is DONE
    assert (handle.error, handle.bytes) == (None, 2000)


def test_the_parts_move_at_the_same_time_on_two_threads(plane: LanedPlane, lanes: list[ScriptedLane]) -> None:
    both = threading.Barrier(2, timeout=DEADLINE)
    threads: list[threading.Thread] = []

    def start(part: Share) -> None:
        both.wait()
        threads.append(threading.current_thread())

    for lane in lanes:
        lane.on_start = start
    plane.post("read", PEER, MANY)
    assert len(set(threads)) == 2
    assert threading.current_thread() in threads


def test_no_lane_is_in_use_any_more_when_post_returns(plane: LanedPlane, lanes: list[ScriptedLane]) -> None:
    entered, leave, returned = threading.Event(), threading.Event(), threading.Event()

    def start(part: Share) -> None:
        entered.set()
        assert leave.wait(DEADLINE)

    def post() -> None:
        plane.post("read", PEER, MANY)
        returned.set()

    lanes[1].on_start = start
    threading.Thread(target=post).start()
    assert entered.wait(DEADLINE)
    assert not returned.wait(0.05)
    leave.set()
    assert returned.wait(DEADLINE)


@pytest.mark.parametrize(("failing", "other"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("end", [DONE, FAILED])
def test_a_failed_part_is_no_fence_while_another_is_in_flight(
    plane: LanedPlane, lanes: list[ScriptedLane], failing: int, other: int, end: TransferState
) -> None:
    handle = plane.post("read", PEER, MANY)
    lanes[failing].parts[0].fail("peer lost")
    assert plane.poll(handle) is PENDING
    assert handle.error is None
    lanes[other].parts[0].state = end
    assert plane.poll(handle) is FAILED
    assert handle.error == "peer lost"
    assert plane.poll(handle) is FAILED


@pytest.mark.parametrize(("failing", "other"), [(0, 1), (1, 0)])
def test_a_part_that_can_not_be_started_fails_the_transfer_once_the_other_has_ended(
    plane: LanedPlane, lanes: list[ScriptedLane], failing: int, other: int
) -> None:
    lanes[failing].on_start = lambda part: part.fail("refused by the network")
    handle = plane.post("write", PEER, MANY)
    assert plane.poll(handle) is PENDING
    lanes[other].parts[0].state = DONE
    assert plane.poll(handle) is FAILED
    assert handle.error == "refused by the network"


def test_every_error_is_told(plane: LanedPlane, lanes: list[ScriptedLane]) -> None:
    handle = plane.post("read", PEER, MANY)
    lanes[0].parts[0].fail("timeout")
    lanes[1].parts[0].fail("reset")
    assert plane.poll(handle) is FAILED
    assert handle.error == "timeout; reset"


@pytest.mark.parametrize("refusing", [0, 1])
def test_what_one_lane_refuses_starts_on_none(
    plane: LanedPlane, lanes: list[ScriptedLane], refusing: int
) -> None:
    lanes[refusing].refuses = "the connection is lost"
    with pytest.raises(TransportError, match="the connection is lost"):
        plane.post("read", PEER, MANY)
    prepared = ["prepare read peer@0"]
    assert [lane.calls for lane in lanes] == [[prepared, []], [[*prepared, "discard"], prepared]][refusing]


def test_a_bug_in_a_lane_is_not_hidden_by_its_thread(plane: LanedPlane, lanes: list[ScriptedLane]) -> None:
    lanes[1].on_start = lambda part: 1 // 0
    with pytest.raises(ZeroDivisionError):
        plane.post("read", PEER, MANY)


def test_a_peer_is_connected_on_every_lane(plane: LanedPlane, lanes: list[ScriptedLane]) -> None:
    plane.connect(PEER, b"theirs")
    assert [lane.calls for lane in lanes] == [["connect peer@0 theirs"]] * 2
    assert (plane.kind, plane.metadata()) == ("scripted", b"facts")


def test_of_which_it_exchanges_the_same_parts(plane: LanedPlane, lanes: list[ScriptedLane]) -> None:
    plane.connect(PEER, b"theirs", Part(0, 1, 2), WHOLE)
    call = "connect peer@0 theirs Part(first=0, count=1, of=2) Part(first=0, count=1, of=1)"
    assert [lane.calls for lane in lanes] == [[call]] * 2


def test_a_transfer_can_be_prepared_and_dropped(plane: LanedPlane, lanes: list[ScriptedLane]) -> None:
    plane.discard(plane.prepare("read", PEER, MANY))
    assert [lane.calls for lane in lanes] == [["prepare read peer@0", "discard"]] * 2


@pytest.mark.parametrize("refusing", [0, 1])
def test_or_on_none(plane: LanedPlane, lanes: list[ScriptedLane], refusing: int) -> None:
    lanes[refusing].refuses = "unreachable"
    with pytest.raises(TransportError, match="unreachable"):
        plane.connect(PEER, b"theirs")
    assert [lane.calls[-1] for lane in lanes] == ["disconnect peer@0"] * 2


def test_a_disconnect_ends_no_transfer(plane: LanedPlane, lanes: list[ScriptedLane]) -> None:
    handle = plane.post("read", PEER, MANY)
    plane.disconnect(PEER)
    assert [lane.calls[-1] for lane in lanes] == ["disconnect peer@0"] * 2
    assert plane.poll(handle) is PENDING
    lanes[0].parts[0].fail("peer lost")
    assert plane.poll(handle) is PENDING
    lanes[1].parts[0].state = DONE
    assert plane.poll(handle) is FAILED


def test_the_lane_in_the_greatest_hurry_sets_the_service_interval(
    plane: LanedPlane, lanes: list[ScriptedLane]
) -> None:
    assert plane.service_interval is None
    lanes[1].interval = 0.5
    assert plane.service_interval == 0.5
    lanes[0].interval = 0.0
    assert plane.service_interval == 0.0
    plane.service()
    assert [lane.calls for lane in lanes] == [["service"]] * 2


@pytest.mark.parametrize("stuck", [0, 1])
def test_nothing_is_released_while_one_lane_has_transfers_in_flight(
    plane: LanedPlane, lanes: list[ScriptedLane], stuck: int
) -> None:
    lanes[stuck].stuck = True
    with pytest.raises(TransportError, match="still in flight"):
        plane.close()
    assert "close" not in lanes[0].calls + lanes[1].calls
    lanes[stuck].stuck = False
    plane.close()
    assert [lane.calls[-1] for lane in lanes] == ["close"] * 2


copies_of = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 9)), min_size=3)


@given(copies=copies_of, shares=st.integers(1, 3))
def test_shares_are_even_and_are_the_transfer(copies: list[Copy], shares: int) -> None:
    divided = split(copies, shares)
    assert blocks([copy for share in divided for copy in share]) == blocks(copies)
    sizes = [len(blocks(share)) for share in divided]
    assert len(sizes) == shares
    assert max(sizes) - min(sizes) <= 1
    assert all(count > 0 for share in divided for _, _, count in share)


@pytest.mark.parametrize("count", [0, -1, -(2**70), 2**70])
def test_a_bad_count_is_left_for_the_lanes_to_refuse(count: int) -> None:
    divided = split([*MANY, (7, 7, count)], 2)
    if count > 0:
        assert sum(copy[2] for share in divided for copy in share) == MIN_COPIES + count
    else:
        assert (7, 7, count) in [copy for share in divided for copy in share]


def blocks(copies: Sequence[Copy]) -> list[tuple[int, int]]:
    """Source and destination, block by block."""
    return [(src + at, dst + at) for src, dst, count in copies for at in range(count)]
