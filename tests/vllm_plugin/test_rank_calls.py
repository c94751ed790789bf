from __future__ import annotations

import pytest

from kvhandoff.core.ids import Identity
from kvhandoff.transport.api import TransferState, TransportError
from kvhandoff.transport.mover import Moved
from kvhandoff.vllm.rank_calls import RankCalls
from kvhandoff.vllm.rank_channel import Connected, Ended
from tests.vllm_plugin.ranks import PEER


class Heard:
    """What the callers and the ranks were told."""

    def __init__(self, ranks: int = 3) -> None:
        self.moves: list[Moved] = []
        self.connects: list[str | None] = []
        self.forgotten: list[Identity] = []
        self.calls = RankCalls(ranks, self.forgotten.append)

    def connected(self, error: TransportError | None) -> None:
        self.connects.append(None if error is None else str(error))

    def move(self) -> int:
        call = self.calls.number()
        self.calls.moves(call, self.moves.append, 0.5)
        return call

    def connect(self) -> int:
        call = self.calls.number()
        self.calls.connecting(call, PEER, self.connected)
        return call


def test_a_move_is_done_when_every_part_is() -> None:
    heard = Heard()
    call = heard.move()
    heard.calls.ended(2, Ended(call, None, 1.0, 9.0, 3, 100))
    heard.calls.ended(0, Ended(call, None, 2.0, 5.0, 4, 200))
    assert heard.moves == []
    heard.calls.ended(1, Ended(call, None, 1.5, 7.0, 5, 0))
    assert heard.moves == [Moved(TransferState.DONE, None, 0.5, 2.0, 9.0, 12, 300)]
    assert heard.calls.moving == 0


def test_a_failed_part_is_no_fence_for_the_others() -> None:
    heard = Heard()
    call = heard.move()
    heard.calls.ended(1, Ended(call, "gone", 1.0, 2.0, 3, 0))
    heard.calls.ended(2, Ended(call, None, 1.0, 3.0, 3, 100))
    assert (heard.moves, heard.calls.moving) == ([], 1)
    heard.calls.ended(0, Ended(call, "lost", 1.0, 8.0, 3, 0))
    error = "rank 1: gone; rank 0: lost"
    assert heard.moves == [Moved(TransferState.FAILED, error, 0.5, 1.0, 8.0, 9, 0)]


def test_a_rank_that_leaves_fails_connects_and_leaves_moves_open() -> None:
    heard = Heard(ranks=2)
    move, connect = heard.move(), heard.connect()
    heard.calls.connected(1, Connected(connect, None))
    heard.calls.rank_left(0, "its channel has failed")
    assert (heard.connects, heard.forgotten) == (["rank 0: its channel has failed"], [PEER])
    heard.calls.ended(1, Ended(move, None, 1.0, 2.0, 1, 100))
    assert (heard.moves, heard.calls.moving) == ([], 1)
    heard.calls.process_ended(0, 6.0)
    error = "rank 0: its process has ended"
    assert heard.moves == [Moved(TransferState.FAILED, error, 0.5, 6.0, 6.0, 1, 0)]


def test_the_end_of_one_process_is_no_fence_for_another_rank() -> None:
    heard = Heard(ranks=2)
    call = heard.move()
    heard.calls.process_ended(0, 6.0)
    assert heard.moves == []
    heard.calls.process_ended(0, 7.0)  # again says nothing new
    assert heard.moves == []
    heard.calls.process_ended(1, 8.0)
    assert [moved.state for moved in heard.moves] == [TransferState.FAILED]
    heard.calls.ended(1, Ended(call, None, 1.0, 2.0, 1, 100))  # it had said so, too late
    assert len(heard.moves) == 1


def test_two_answers_of_one_rank_are_one() -> None:
    heard = Heard(ranks=2)
    move, connect = heard.move(), heard.connect()
    for _ in range(2):
        heard.calls.ended(0, Ended(move, None, 1.0, 2.0, 1, 100))
        heard.calls.connected(0, Connected(connect, None))
    assert (heard.moves, heard.connects) == ([], [])
    heard.calls.ended(1, Ended(move, None, 1.0, 2.0, 1, 100))
    heard.calls.connected(1, Connected(connect, None))
    assert [moved.bytes for moved in heard.moves] == [200]
    assert (heard.connects, heard.forgotten) == ([None], [])


def test_what_some_ranks_are_connected_to_is_forgotten_before_the_failure_is_told() -> None:
    heard = Heard(ranks=2)
    call = heard.calls.number()
    told: list[list[Identity]] = []
    heard.calls.connecting(call, PEER, lambda _: told.append(list(heard.forgotten)))
    heard.calls.connected(0, Connected(call, "unreachable"))
    assert (told, heard.forgotten) == ([], [])
    heard.calls.connected(1, Connected(call, None))
    assert told == [[PEER]]


def test_calls_do_not_mix() -> None:
    heard = Heard(ranks=1)
    first, second = heard.move(), heard.move()
    heard.calls.ended(0, Ended(second, None, 1.0, 2.0, 1, 7))
    heard.calls.ended(0, Ended(99, None, 1.0, 2.0, 1, 8))
    assert [moved.bytes for moved in heard.moves] == [7]
    heard.calls.ended(0, Ended(first, None, 1.0, 2.0, 1, 9))
    assert [moved.bytes for moved in heard.moves] == [7, 9]


def test_one_callers_mistake_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard(ranks=1)
    call = heard.calls.number()

    def fails(_: Moved) -> None:
        raise KeyError("mine")

    heard.calls.moves(call, fails, 0.5)
    other = heard.move()
    heard.calls.process_ended(0, 1.0)
    assert other == call + 1
    assert len(heard.moves) == 1
    assert "a callback of the mover has failed" in caplog.text
