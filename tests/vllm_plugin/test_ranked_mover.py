from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.transport.api import TransferState, TransportError
from kvhandoff.transport.liveness import this_process
from kvhandoff.transport.mover import BlockMover, Moved
from kvhandoff.transport.ranks import decode_ranks
from kvhandoff.vllm import ranked_mover
from kvhandoff.vllm.rank_channel import MAX_MESSAGE_BYTES, RankHello
from kvhandoff.vllm.ranked_mover import RankedMover
from tests.vllm_plugin.ranks import DEADLINE, LAYOUT, PEER, ScriptedRank, moved, scripted_ranks

_T = TypeVar("_T")


@pytest.fixture
def ranks() -> Iterator[list[ScriptedRank]]:
    with scripted_ranks(2) as made:
        yield made


@asynccontextmanager
async def started(hellos: list[RankHello]) -> AsyncIterator[RankedMover]:
    mover = RankedMover(hellos)
    await asyncio.to_thread(mover.start)
    try:
        yield mover
    finally:
        await asyncio.to_thread(mover.close, 0.0)


@pytest.fixture
async def mover(ranks: list[ScriptedRank]) -> AsyncIterator[RankedMover]:
    async with started([rank.hello for rank in ranks]) as made:
        yield made


class Answer(asyncio.Future[_T]):
    """A callback that can be waited for. Called twice, it fails."""

    def __call__(self, value: _T) -> None:
        self.set_result(value)

    async def value(self) -> _T:
        return await asyncio.wait_for(asyncio.shield(self), DEADLINE)


async def asked(rank: ScriptedRank) -> tuple[Any, ...]:
    return await asyncio.to_thread(rank.mover.next)


async def test_every_rank_does_its_part(mover: RankedMover, ranks: list[ScriptedRank]) -> None:
    connected: Answer[TransportError | None] = Answer()
    mover.connect(PEER, b"peer's", connected)
    for rank in ranks:
        kind, peer, metadata, done = await asked(rank)
        assert (kind, peer, metadata) == ("connect", PEER, b"peer's")
        done(None)
    assert await connected.value() is None
    answer: Answer[Moved] = Answer()
    mover.move("read", PEER, [(0, 3, 2)], answer)
    first, second = [await asked(rank) for rank in ranks]
    assert first[:3] == second[:3] == ("read", PEER, ((0, 3, 2),))
    first[3](moved(posted=1.0, done=8.0, size=100))
    second[3](moved(posted=3.0, done=4.0, size=200))
    whole = await answer.value()
    assert (whole.state, whole.error) == (TransferState.DONE, None)
    assert (whole.posted_at, whole.done_at, whole.descriptors, whole.bytes) == (3.0, 8.0, 2, 300)
    mover.disconnect(PEER)
    assert [await asked(rank) for rank in ranks] == [("disconnect", PEER)] * 2


async def test_a_failed_part_is_told_when_all_parts_have_ended(
    mover: RankedMover, ranks: list[ScriptedRank]
) -> None:
    answer: Answer[Moved] = Answer()
    mover.move("write", PEER, [(0, 3, 2)], answer)
    first, second = [await asked(rank) for rank in ranks]
    first[3](moved("peer gone"))
    await all_heard(mover, ranks)
    assert not answer.done()
    second[3](moved())
    whole = await answer.value()
    assert (whole.state, whole.error, whole.bytes) == (TransferState.FAILED, "rank 0: peer gone", 0)


async def all_heard(mover: RankedMover, ranks: list[ScriptedRank]) -> None:
    """What the ranks said before has been heard: a later answer of theirs has, and they keep their order."""
    connected: Answer[TransportError | None] = Answer()
    mover.connect(PEER, b"", connected)
    for rank in ranks:
        (await asked(rank))[3](None)
    await connected.value()


async def test_a_connect_fails_as_a_whole(mover: RankedMover, ranks: list[ScriptedRank]) -> None:
    connected: Answer[TransportError | None] = Answer()
    mover.connect(PEER, b"peer's", connected)
    (await asked(ranks[0]))[3](None)
    (await asked(ranks[1]))[3](TransportError("blocks differ"))
    assert str(await connected.value()) == "rank 1: blocks differ"
    assert [await asked(rank) for rank in ranks] == [("disconnect", PEER)] * 2


async def test_reports_reach_every_rank_once(mover: RankedMover, ranks: list[ScriptedRank]) -> None:
    mover.report("cmpl-1", failed=True, bad_blocks=[4, 5])
    mover.report("cmpl-2", failed=False, bad_blocks=[])
    for rank in ranks:
        for expected in (("cmpl-1", True, (4, 5)), ("cmpl-2", False, ())):
            report = await asyncio.to_thread(rank.reports.get, True, DEADLINE)
            assert (report.request_id, report.failed, report.bad_blocks) == expected
        assert rank.reports.empty()


async def test_what_the_driver_learns_from_the_hellos(mover: RankedMover, ranks: list[ScriptedRank]) -> None:
    as_protocol: BlockMover = mover
    assert (as_protocol.kind, as_protocol.alive) == ("nixl", True)
    assert decode_ranks(mover.metadata) == (b"rank 0", b"rank 1")
    assert mover.layout == ranks[0].hello.kv_layout
    assert mover.num_blocks == 5
    assert mover.processes == (this_process(), this_process())


async def test_calls_of_another_thread_keep_their_order(
    mover: RankedMover, ranks: list[ScriptedRank]
) -> None:
    answer: Answer[Moved] = Answer()
    threads: list[int] = []

    def done(value: Moved) -> None:
        threads.append(threading.get_ident())
        answer(value)

    def run() -> None:
        mover.connect(PEER, b"", lambda _: None)
        mover.move("read", PEER, [(0, 0, 1)], done)
        mover.disconnect(PEER)
        mover.report("cmpl-1", failed=False, bad_blocks=())

    await asyncio.to_thread(run)
    for rank in ranks:
        kinds = [await asked(rank) for _ in range(3)]
        assert [kind[0] for kind in kinds] == ["connect", "read", "disconnect"]
        kinds[1][3](moved())
    await answer.value()
    assert threads == [threading.get_ident()]


async def test_a_rank_whose_mover_has_ended_stops_moves_but_not_reports(
    mover: RankedMover, ranks: list[ScriptedRank], caplog: pytest.LogCaptureFixture
) -> None:
    open_move: Answer[Moved] = Answer()
    connect: Answer[TransportError | None] = Answer()
    mover.move("read", PEER, [(0, 0, 1)], open_move)
    mover.connect(PEER, b"", connect)
    (await asked(ranks[0]))[3](moved())
    (await asked(ranks[0]))[3](None)
    ranks[1].mover.alive = False
    # Its connect has failed: it moves nothing. Its part of the move may still be in flight.
    assert str(await connect.value()) == "rank 1: its data plane has ended"
    assert not mover.alive
    assert not open_move.done()
    refusal: Answer[Moved] = Answer()
    mover.move("read", PEER, [(0, 0, 1)], refusal)
    why = "read peer@1: rank 1 of engine: its data plane has ended"
    assert (refusal.result().state, refusal.result().error) == (TransferState.FAILED, why)
    mover.report("cmpl-1", failed=True, bad_blocks=())
    for rank in ranks:
        assert (await asyncio.to_thread(rank.reports.get, True, DEADLINE)).request_id == "cmpl-1"
    assert not await asyncio.to_thread(mover.close, 0.0)
    assert not open_move.done()  # no fence
    assert "1 moves are in flight at close" in caplog.text


async def test_a_channel_that_ends_leaves_its_moves_open(
    mover: RankedMover, ranks: list[ScriptedRank]
) -> None:
    answer: Answer[Moved] = Answer()
    connect: Answer[TransportError | None] = Answer()
    mover.move("read", PEER, [(0, 0, 1)], answer)
    mover.connect(PEER, b"", connect)
    for rank in ranks:
        await asked(rank)
    await asyncio.to_thread(ranks[1].channel.close)
    (await asked(ranks[0]))[3](None)
    assert str(await connect.value()) == "rank 1: its worker is closed"
    assert not mover.alive
    assert mover._calls.moving == 1
    assert not answer.done()


async def test_after_close_nothing_moves(mover: RankedMover, ranks: list[ScriptedRank]) -> None:
    answer: Answer[Moved] = Answer()
    mover.move("read", PEER, [(0, 0, 1)], answer)
    parts = [(await asked(rank))[3] for rank in ranks]
    closing = asyncio.ensure_future(asyncio.to_thread(mover.close, DEADLINE))
    while mover.alive:  # noqa: ASYNC110  until it has begun
        await asyncio.sleep(0)
    parts[0](moved())
    parts[1](moved())
    assert await closing is True  # having waited for what was in flight
    assert answer.result().state is TransferState.DONE
    late: Answer[Moved] = Answer()
    mover.move("write", PEER, [(0, 0, 1)], late)
    assert late.result().error == "write peer@1: the mover is closed"
    refused: Answer[TransportError | None] = Answer()
    mover.connect(PEER, b"", refused)
    assert str(refused.result()) == "connect peer@1: the mover is closed"
    mover.report("cmpl-1", failed=False, bad_blocks=())
    assert await asyncio.to_thread(mover.close) is True
    assert all(rank.mover.asked.empty() and rank.reports.empty() for rank in ranks)


async def test_a_move_that_is_too_large_to_be_told_moves_nowhere(
    mover: RankedMover, ranks: list[ScriptedRank]
) -> None:
    answer: Answer[Moved] = Answer()
    mover.move("read", PEER, [(2**20, 2**20, 1)] * 1_500_000, answer)
    error = answer.result().error or ""
    assert error.startswith("read peer@1: Move to a rank: ")
    assert error.endswith(f"allowed are {MAX_MESSAGE_BYTES}")
    assert all(rank.mover.asked.empty() for rank in ranks)


async def test_before_the_start_nothing_moves(ranks: list[ScriptedRank]) -> None:
    mover = RankedMover([rank.hello for rank in ranks])
    answer: Answer[Moved] = Answer()
    mover.move("read", PEER, [(0, 0, 1)], answer)
    assert (answer.result().error, mover.alive) == ("read peer@1: the mover is not started", False)
    with pytest.raises(RuntimeError, match="called on the event loop, which it would block"):
        mover.start()
    assert await asyncio.to_thread(mover.close) is True


async def test_a_rank_that_does_not_answer(
    ranks: list[ScriptedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked_mover, "_ATTACH_S", 0.2)
    mover = RankedMover([ranks[0].hello, replace(ranks[1].hello, token=b"another")])
    with pytest.raises(TransportError, match=r"rank 1 of engine: no answer from ipc://\S+ in 0\.2 s$"):
        await asyncio.to_thread(mover.start)
    assert not mover.alive


async def test_all_ranks_that_do_not_answer_are_named(
    ranks: list[ScriptedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked_mover, "_ATTACH_S", 0.05)
    mover = RankedMover([replace(rank.hello, token=b"another") for rank in ranks])
    both = r"^rank 0 of engine: no answer from ipc://\S+ in 0\.05 s; rank 1 of engine: no answer from ipc://"
    with pytest.raises(TransportError, match=both):
        await asyncio.to_thread(mover.start)


async def test_a_rank_whose_process_has_ended_or_lives_elsewhere(ranks: list[ScriptedRank]) -> None:
    other = this_process().rpartition("/")[0] + "/1"  # this process id, started at another time
    mover = RankedMover([ranks[0].hello, replace(ranks[1].hello, process=other)])
    with pytest.raises(TransportError, match=r"^rank 1 of engine: its process has ended$"):
        await asyncio.to_thread(mover.start)
    mover = RankedMover([ranks[0].hello, replace(ranks[1].hello, process="elsewhere/1/2")])
    with pytest.raises(
        TransportError, match=r"^rank 1 of engine: process: got 'elsewhere/1/2', allowed is one"
    ):
        await asyncio.to_thread(mover.start)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a, _: [a], "ranks: got [0], allowed are 0 to 1, once each"),
        (lambda a, _: [a, a], "ranks: got [0, 0], allowed are 0 to 1, once each"),
        (lambda _, __: [], "ranks: got [], allowed are 0 to 0, once each"),
        (
            lambda a, b: [a, replace(b, engine_id="other")],
            "ranks: engine_id is 'engine' on rank 0 and 'other' on rank 1",
        ),
        (lambda a, b: [b, replace(a, num_blocks=9)], "ranks: num_blocks is 9 on rank 0 and 5 on rank 1"),
        (
            lambda a, b: [a, replace(b, layout={**LAYOUT, "layers": 4})],
            "ranks: layout is {",
        ),
    ],
)
async def test_ranks_that_are_not_one_engines(
    ranks: list[ScriptedRank],
    change: Callable[[RankHello, RankHello], list[RankHello]],
    text: str,
) -> None:
    with pytest.raises(ConfigError) as refusal:
        RankedMover(change(ranks[0].hello, ranks[1].hello))
    assert str(refusal.value).startswith(text)


async def test_file_descriptors_are_given_back(ranks: list[ScriptedRank]) -> None:
    async def once() -> None:
        with scripted_ranks(2) as fresh:
            async with started([rank.hello for rank in fresh]):
                pass

    await once()
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    await once()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(autouse=True)
def _all_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
