"""The mover thread, over a data plane that does what the test says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any, Final

import pytest

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import Operation, Region, TransferState, TransportError
from kvhandoff.transport.mover import Moved, Mover
from kvhandoff.transport.planes import allocate_region, create_plane
from kvhandoff.transport.region import SharedRegion
from tests.transport.processes import DEADLINE, identity

PEER = identity("peer")
DONE: Final = TransferState.DONE
FAILED: Final = TransferState.FAILED
PENDING: Final = TransferState.PENDING


@dataclass
class ScriptedHandle:
    state: TransferState = PENDING
    error: str | None = None
    bytes: int = 3000
    polls: int = 0
    lasts: int | None = None
    """Polls after which it is done; None: when the test says so."""


@dataclass
class ScriptedPlane:
    """Writes down every call and its thread; transfers end when the test says so."""

    kind: str = "scripted"
    interval: float | None = None
    rounds: int = 0
    """How often the mover's loop has gone round: it asks for the interval each time."""
    calls: list[str] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    handles: dict[str, ScriptedHandle] = field(default_factory=dict)
    serviced: threading.Event = field(default_factory=threading.Event)
    polled: SimpleQueue[str] = field(default_factory=SimpleQueue)
    fail_close: bool = False

    @property
    def service_interval(self) -> float | None:
        self.rounds += 1
        return self.interval

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)

    def register(self, region: Region) -> None:
        self.note("register")

    def metadata(self) -> bytes:
        return b"facts"

    def connect(self, peer: Identity, metadata: bytes) -> None:
        self.note(f"connect {peer}")
        if metadata == b"bad":
            raise TransportError("bad metadata")

    def disconnect(self, peer: Identity) -> None:
        self.note(f"disconnect {peer}")

    def post(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> ScriptedHandle:
        self.note(f"{operation} {copies[0][0]}")
        match copies[0][0]:
            case 404:
                raise TransportError("no such blocks")
            case 666:
                raise RuntimeError("a bug in the plane")
        return self.handles.setdefault(str(copies[0][0]), ScriptedHandle())

    def poll(self, handle: Any) -> TransferState:
        handle.polls += 1
        if handle.polls == handle.lasts:
            handle.state = DONE
        state: TransferState = handle.state
        if handle.polls == 2:
            self.polled.put("twice")
        return state

    def service(self) -> None:
        self.note("service")
        self.serviced.set()

    def close(self) -> None:
        self.note("close")
        if self.fail_close:
            raise TransportError("still in flight")


class Answers:
    """A callback whose calls can be waited for."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, str]] = SimpleQueue()

    def __call__(self, answer: Any) -> None:
        self._queue.put((answer, threading.current_thread().name))

    def next(self) -> Any:
        answer, self.thread = self._queue.get(timeout=DEADLINE)
        return answer

    @property
    def empty(self) -> bool:
        return self._queue.empty()


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    made = SharedRegion.allocate(8, 1000)
    yield made
    made.close()


@pytest.fixture
def plane() -> ScriptedPlane:
    return ScriptedPlane()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def mover(plane: ScriptedPlane, region: SharedRegion, clock: ManualClock) -> Iterator[Mover]:
    made = Mover(lambda: plane, region, clock)
    made.start()
    yield made
    made.close(timeout=0)


def test_the_plane_lives_on_the_movers_thread_alone(mover: Mover, plane: ScriptedPlane) -> None:
    answers = Answers()
    assert (mover.kind, mover.metadata, mover.alive) == ("scripted", b"facts", True)
    mover.connect(PEER, b"good", answers)
    assert answers.next() is None
    mover.connect(PEER, b"bad", answers)
    assert str(answers.next()) == "bad metadata"
    assert answers.thread == "kvhandoff-mover"
    mover.disconnect(PEER)
    assert mover.close()
    assert not mover.alive
    assert plane.calls == [
        "register",
        "connect peer@0",
        "connect peer@0",
        "disconnect peer@0",
        "close",
    ]
    assert plane.threads == {"kvhandoff-mover"}


def test_a_mover_that_never_started_is_closed(plane: ScriptedPlane, region: SharedRegion) -> None:
    mover, answers = Mover(lambda: plane, region), Answers()
    mover.move("read", PEER, [(1, 0, 1)], answers)
    assert mover.close()
    assert answers.next().error == "read peer@0: the mover is closed"
    mover.move("read", PEER, [(2, 0, 1)], answers)
    assert answers.next().error == "read peer@0: the mover is closed"
    assert plane.calls == []


def test_no_pause_lasts_for_ever(mover: Mover, plane: ScriptedPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause that is over before the mover has looked at its queue is over. On busy cores that happens to
    20 us too; here, to one of a thousand pauses."""
    monkeypatch.setattr("kvhandoff.transport.mover._FIRST_PAUSE", 1e-6)
    monkeypatch.setattr("kvhandoff.transport.mover._LONGEST_PAUSE", 1e-6)
    answers = Answers()
    for _ in range(8000):
        plane.handles["1"] = ScriptedHandle(lasts=3)
        mover.move("read", PEER, [(1, 0, 1)], answers)
        assert answers.next().state is DONE


def test_a_move_is_reported_once_with_its_times(
    mover: Mover, plane: ScriptedPlane, clock: ManualClock
) -> None:
    answers = Answers()
    handle = plane.handles["3"] = ScriptedHandle()
    mover.move("read", PEER, [(3, 0, 2), (7, 5, 1)], answers)
    assert plane.polled.get(timeout=DEADLINE) == "twice"
    assert answers.empty
    clock.advance(2.5)
    handle.state = DONE
    assert answers.next() == Moved(
        state=DONE,
        error=None,
        submitted_at=100.0,
        posted_at=100.0,
        done_at=102.5,
        descriptors=2,
        bytes=3000,
    )
    assert mover.close()
    assert answers.empty


def test_a_failed_transfer_says_why(mover: Mover, plane: ScriptedPlane) -> None:
    answers = Answers()
    plane.handles["1"] = ScriptedHandle(FAILED, "peer lost")
    mover.move("write", PEER, [(1, 0, 1)], answers)
    moved = answers.next()
    assert (moved.state, moved.error, moved.bytes) == (FAILED, "peer lost", 0)


def test_a_refused_transfer_is_failed(mover: Mover) -> None:
    answers = Answers()
    mover.move("read", PEER, [(404, 0, 1)], answers)
    moved = answers.next()
    assert (moved.state, moved.error, moved.bytes) == (FAILED, "no such blocks", 0)
    assert mover.alive


def test_transfers_end_in_any_order(mover: Mover, plane: ScriptedPlane) -> None:
    slow, fast = Answers(), Answers()
    plane.handles["2"] = ScriptedHandle(DONE)
    mover.move("read", PEER, [(1, 0, 1)], slow)
    mover.move("read", PEER, [(2, 0, 1)], fast)
    assert fast.next().state is DONE
    assert slow.empty
    plane.handles["1"].state = DONE
    assert slow.next().state is DONE
    assert plane.calls == ["register", "read 1", "read 2"]


def test_a_callback_that_fails_stops_nobody_else(mover: Mover, caplog: pytest.LogCaptureFixture) -> None:
    def broken(answer: object) -> None:
        raise ZeroDivisionError

    answers = Answers()
    mover.connect(PEER, b"good", broken)
    mover.move("read", PEER, [(404, 0, 1)], broken)
    mover.connect(PEER, b"good", answers)
    assert answers.next() is None
    assert [record.message for record in caplog.records] == ["a callback of the mover has failed"] * 2


def test_close_lets_what_is_in_flight_end_and_refuses_the_rest(mover: Mover, plane: ScriptedPlane) -> None:
    in_flight, late = Answers(), Answers()
    mover.move("read", PEER, [(1, 0, 1)], in_flight)
    assert plane.polled.get(timeout=DEADLINE) == "twice"
    closing = threading.Thread(target=mover.close, args=(DEADLINE,))
    closing.start()
    plane.handles["1"].state = DONE
    assert in_flight.next().state is DONE
    closing.join(DEADLINE)
    assert mover.close()
    mover.move("read", PEER, [(1, 0, 1)], late)
    moved = late.next()
    assert (moved.state, moved.error) == (FAILED, "read peer@0: the mover is closed")
    mover.connect(PEER, b"good", late)
    assert str(late.next()) == "connect peer@0: the mover is closed"
    assert plane.calls == ["register", "read 1", "close"]


def test_a_timeout_at_close_is_no_fence(
    mover: Mover, plane: ScriptedPlane, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers()
    mover.move("read", PEER, [(1, 0, 1)], answers)
    assert plane.polled.get(timeout=DEADLINE) == "twice"
    assert mover.close(timeout=0) is False
    assert mover.close() is False
    assert answers.empty
    assert "close" not in plane.calls
    assert "must stay" in caplog.text


def test_a_plane_that_cannot_close_is_told(mover: Mover, plane: ScriptedPlane) -> None:
    plane.fail_close = True
    assert mover.close() is False


def test_after_a_bug_in_the_plane_nothing_in_flight_is_called_fenced(
    mover: Mover, plane: ScriptedPlane, caplog: pytest.LogCaptureFixture
) -> None:
    in_flight, fatal, later = Answers(), Answers(), Answers()
    mover.move("read", PEER, [(1, 0, 1)], in_flight)
    mover.move("read", PEER, [(666, 0, 1)], fatal)
    assert mover.close() is False
    mover.move("read", PEER, [(2, 0, 1)], later)
    moved = later.next()
    assert moved.state is FAILED
    assert "the data plane has crashed: RuntimeError('a bug in the plane')" in moved.error
    assert in_flight.empty
    assert fatal.empty
    assert not mover.alive
    assert "close" not in plane.calls
    assert [record.levelno for record in caplog.records if "crashed" in record.message] == [logging.ERROR]


def test_the_plane_is_serviced_when_it_asks_for_it(region: SharedRegion) -> None:
    plane = ScriptedPlane(interval=0.001)
    mover = Mover(lambda: plane, region)
    mover.start()
    for _ in range(3):
        assert plane.serviced.wait(DEADLINE)
        plane.serviced.clear()
    plane.handles["1"] = ScriptedHandle()
    mover.move("read", PEER, [(1, 0, 1)], lambda moved: None)
    assert plane.polled.get(timeout=DEADLINE) == "twice"
    plane.serviced.clear()
    assert plane.serviced.wait(DEADLINE)  # also while a transfer is in flight
    plane.handles["1"].state = DONE
    assert mover.close()


def test_an_idle_mover_sleeps(mover: Mover, plane: ScriptedPlane) -> None:
    answers = Answers()
    plane.handles["1"] = ScriptedHandle(DONE)
    mover.move("read", PEER, [(1, 0, 1)], answers)
    answers.next()
    mover.connect(PEER, b"good", answers)
    answers.next()
    assert plane.handles["1"].polls == 1
    assert plane.rounds <= 3
    assert "service" not in plane.calls


def test_a_plane_that_cannot_be_made_fails_the_start(region: SharedRegion) -> None:
    def factory() -> ScriptedPlane:
        raise ConfigError("no such device")

    mover = Mover(factory, region)
    with pytest.raises(ConfigError, match="no such device"):
        mover.start()
    answers = Answers()
    mover.move("read", PEER, [(0, 0, 1)], answers)
    assert answers.next().state is FAILED
    assert not mover.alive
    assert mover.close()


@pytest.mark.parametrize("kind", ["shm", "nixl"])
def test_blocks_move_between_two_movers(kind: str) -> None:
    if kind == "nixl" and not find_spec("nixl_cu12"):
        pytest.skip("NIXL is not installed")
    mine, theirs = allocate_region(kind, 8, 1000), allocate_region(kind, 8, 1000)
    theirs.buffer[:] = bytes(range(250)) * 32
    here = Mover(lambda: create_plane(kind, identity("me")), mine)
    there = Mover(lambda: create_plane(kind, PEER), theirs)
    here.start()
    answers = Answers()
    here.connect(PEER, there.start(), answers)
    assert answers.next() is None
    here.move("read", PEER, [(0, 4, 2), (7, 0, 1)], answers)
    moved = answers.next()
    assert (moved.state, moved.descriptors, moved.bytes) == (DONE, 2, 3000)
    assert moved.submitted_at <= moved.posted_at <= moved.done_at
    assert mine.buffer[4000:6000] == theirs.buffer[:2000]
    assert mine.buffer[:1000] == theirs.buffer[7000:]
    assert here.close()
    assert there.close()
    mine.close()
    theirs.close()
