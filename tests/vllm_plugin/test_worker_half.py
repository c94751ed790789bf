from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.engine import names
from kvhandoff.engine.names import hold_name
from kvhandoff.transport.api import TransferState
from kvhandoff.transport.liveness import this_process
from kvhandoff.transport.mover import Moved
from kvhandoff.transport.planes import PlaneOptions
from kvhandoff.vllm import worker_half as module
from kvhandoff.vllm.rank_channel import RankHello
from kvhandoff.vllm.ranked_mover import RankedMover
from kvhandoff.vllm.worker_half import LoadResults, WorkerHalf
from tests.vllm_plugin.caches import BLOCKS, full_content, layer_name
from tests.vllm_plugin.workers import CLUSTER_KEY, DEADLINE, Worker, worker_half, workers

pytestmark = pytest.mark.skipif(not find_spec("nixl_cu12"), reason="NIXL is not installed")


# In this process: one worker, one driver.


@pytest.fixture
def half() -> Iterator[WorkerHalf]:
    made, caches = worker_half("engine", "LBHNC", 2, 1)
    made.register(caches)
    yield made
    made.close()


@asynccontextmanager
async def driver_of(hellos: list[RankHello]) -> AsyncIterator[RankedMover]:
    mover = RankedMover(hellos)
    await asyncio.to_thread(mover.start)
    try:
        yield mover
    finally:
        await asyncio.to_thread(mover.close)


async def test_a_report_comes_out_once(half: WorkerHalf) -> None:
    assert half.results() == LoadResults()
    async with driver_of([half.handshake()]) as driver:
        driver.report("cmpl-1", failed=False, bad_blocks=[])
        driver.report("cmpl-2", failed=True, bad_blocks=[3, 4])
        driver.report("cmpl-3", failed=False, bad_blocks=[4, 7])
        heard = LoadResults()
        while len(heard.finished) < 3:  # each step of vLLM asks
            results = half.results()
            assert not results.finished & heard.finished
            assert results.failed <= results.finished
            heard.finished.update(results.finished)
            heard.failed.update(results.failed)
            heard.bad_blocks.update(results.bad_blocks)
            await asyncio.sleep(0)
    assert heard == LoadResults({"cmpl-1", "cmpl-2", "cmpl-3"}, {"cmpl-2"}, {3, 4, 7})
    assert half.results() == LoadResults()


def test_the_hello_is_plain_and_travels(half: WorkerHalf) -> None:
    hello = half.handshake()
    assert pickle.loads(pickle.dumps(hello)) == hello
    assert (hello.engine_id, hello.rank, hello.ranks, hello.kind) == ("engine", 0, 1, "nixl")
    assert (hello.num_blocks, hello.process) == (BLOCKS, this_process())
    assert hello.kv_layout.order == "layer,head,token,content; CPU_ATTN vec"


def test_calls_out_of_order() -> None:
    half, caches = worker_half("engine", "LBHNC", 2, 1)
    with pytest.raises(RuntimeError, match="the cache is not registered yet"):
        half.handshake()
    half.register(caches)
    with pytest.raises(RuntimeError, match="the cache is registered already"):
        half.register(caches)
    half.close()
    half.close()


def name_is_free(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(names, "PREDECESSOR_S", 0.0)
    try:
        hold_name(name, CLUSTER_KEY).close()
    except ConfigError:
        return False
    return True


def test_a_worker_holds_its_name_while_its_memory_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    half, caches = worker_half("engine", "LBHNC", 4, 1, rank=1, ranks=2)
    assert name_is_free("engine#1", monkeypatch)
    half.register(caches)
    assert not name_is_free("engine#1", monkeypatch)
    assert name_is_free("engine#0", monkeypatch)
    half.close()
    assert name_is_free("engine#1", monkeypatch)


def test_a_worker_whose_predecessor_still_runs_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "PREDECESSOR_S", 0.0)
    movers: list[Any] = []
    monkeypatch.setattr(module, "Mover", lambda *args: movers.append(args))
    half, caches = worker_half("engine", "LBHNC", 2, 1)
    predecessor = hold_name("engine#0", CLUSTER_KEY)
    with pytest.raises(ConfigError, match="got 'engine#0', allowed is a name that no other engine has"):
        half.register(caches)
    assert movers == []
    half.close()
    predecessor.close()


def test_while_bytes_may_land_memory_and_name_stay(half: WorkerHalf, monkeypatch: pytest.MonkeyPatch) -> None:
    mover, kept = half._mover, []
    assert mover is not None
    monkeypatch.setattr(module, "_kept", kept)
    with monkeypatch.context() as patch:
        patch.setattr(mover, "close", lambda: False)
        half.close()
    assert not name_is_free("engine#0", monkeypatch)
    ((caches, name),) = kept
    assert list(caches) == [layer_name(index) for index in range(3)]
    assert isinstance(name, socket.socket)
    assert mover.close()
    name.close()


def test_a_plane_that_cant_be_had_is_said_and_lets_go_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    half, caches = worker_half("engine", "LBHNC", 2, 1)
    half._plane = PlaneOptions(backend="LIBFABRIC")
    with pytest.raises(ConfigError, match="LIBFABRIC"):
        half.register(caches)
    half.close()
    assert name_is_free("engine#0", monkeypatch)


def test_amx_is_asked_for_where_torch_knows_how(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch._C._cpu, "_init_amx", lambda: asked.append(True), raising=False)
    worker_half("engine", "LBHNC", 2, 1)
    assert asked == [True]
    monkeypatch.delattr(torch._C._cpu, "_init_amx")
    worker_half("engine", "LBHNC", 2, 1)


# Real processes: engines of unequal tensor parallelism, and layers that lie elsewhere.


def identity(engine_id: str) -> Identity:
    return Identity(EngineId(engine_id), Epoch("1"))


class Engine:
    """One engine of several workers, with its driver in this process."""

    def __init__(self, engine_id: str, made: list[Worker], mover: RankedMover) -> None:
        self.identity = identity(engine_id)
        self.workers = made
        self.mover = mover

    async def connect(self, peer: Engine) -> str | None:
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.mover.connect(
            peer.identity,
            peer.mover.metadata,
            lambda error: answer.set_result(None if error is None else str(error)),
        )
        return await asyncio.wait_for(answer, DEADLINE)

    def start_move(self, operation: Any, peer: Engine, copies: Any) -> asyncio.Future[Moved]:
        answer: asyncio.Future[Moved] = asyncio.get_running_loop().create_future()
        self.mover.move(operation, peer.identity, copies, answer.set_result)
        return answer

    async def move(self, operation: Any, peer: Engine, copies: Any) -> Moved:
        return await asyncio.wait_for(self.start_move(operation, peer, copies), DEADLINE)

    def content(self) -> torch.Tensor:
        """All ranks' heads together: `[L, B, H, N, C]`."""
        return torch.cat([worker.content() for worker in self.workers], dim=2)


@asynccontextmanager
async def engines(**described: tuple[str, int, int, int]) -> AsyncIterator[list[Engine]]:
    """Engines by name, of (order, ranks, heads, seed), all of their workers at once."""
    with workers() as make:
        made = {
            name: [make(name, order, heads, seed, rank, ranks) for rank in range(ranks)]
            for name, (order, ranks, heads, seed) in described.items()
        }
        started = []
        for name, its in made.items():
            mover = RankedMover([worker.hello() for worker in its])
            await asyncio.to_thread(mover.start)
            started.append(Engine(name, its, mover))
        try:
            yield started
        finally:
            for engine in started:
                await asyncio.to_thread(engine.mover.close, 0.0)


@pytest.mark.processes
async def test_engines_of_two_ranks_and_of_one_read_and_write_each_others_blocks() -> None:
    async with engines(p=("LBHNC", 2, 4, 1), d=("BLHNC", 1, 4, 2)) as (p, d):
        assert p.mover.layout == d.mover.layout
        assert [await p.connect(d), await d.connect(p)] == [None, None]
        ours, theirs = full_content(1, heads=4), full_content(2, heads=4)
        block_bytes = d.mover.layout.block_bytes

        # Pull: d reads what p's two ranks hold into blocks of its own.
        moved = await d.move("read", p, [(1, 3, 2), (4, 0, 1)])
        assert (moved.state, moved.error, moved.bytes) == (TransferState.DONE, None, 3 * block_bytes)
        theirs[:, 3:5], theirs[:, 0] = ours[:, 1:3], ours[:, 4]
        assert torch.equal(d.content(), theirs)

        # Push: each of p's ranks writes its heads.
        moved = await p.move("write", d, [(0, 1, 1), (3, 2, 1)])
        assert (moved.state, moved.error, moved.bytes) == (TransferState.DONE, None, 2 * block_bytes)
        theirs[:, 1], theirs[:, 2] = ours[:, 0], ours[:, 3]
        assert torch.equal(d.content(), theirs)
        assert torch.equal(p.content(), ours)

        # Return, by reading and by writing: one rank's blocks are shared out between two.
        d_now = theirs.clone()
        await p.move("read", d, [(2, 4, 1)])
        await d.move("write", p, [(3, 0, 1)])
        ours[:, 4], ours[:, 0] = d_now[:, 2], d_now[:, 3]
        assert torch.equal(p.content(), ours)

        refused = await d.move("read", p, [(BLOCKS, 0, 1)])
        assert refused.state is TransferState.FAILED
        assert "blocks 5 to 5 of p" in (refused.error or "")

        for engine in (p, d):
            engine.mover.report("cmpl-1", failed=False, bad_blocks=[2])
            for worker in engine.workers:
                await eventually_reported(worker, "cmpl-1")
        for engine in (p, d):
            assert await asyncio.to_thread(engine.mover.close) is True
            for worker in engine.workers:
                worker.close()


async def eventually_reported(worker: Worker, request_id: str) -> None:
    """As vLLM asks at each of its steps."""
    async with asyncio.timeout(DEADLINE):
        while not (results := worker.results()).finished:  # noqa: ASYNC110  another process's
            await asyncio.sleep(0)
    assert results == LoadResults({request_id}, set(), {2})
    assert worker.results() == LoadResults()


@pytest.mark.processes
async def test_a_killed_worker_ends_its_parts_and_with_them_the_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engines(p=("LBHNC", 2, 4, 1), d=("LBHNC", 1, 4, 2)) as (p, d):
        assert [await p.connect(d), await d.connect(p)] == [None, None]
        socket_file = Path(p.mover._hellos[1].address.removeprefix("ipc://"))
        assert not await asyncio.to_thread(socket_file.parent.exists)  # a kill leaves nothing behind
        assert not name_is_free("p#1", monkeypatch)
        await p.move("write", d, [(0, 0, 1)])
        p.workers[1].stop()
        stuck = p.start_move("write", d, [(1, 1, 1)])
        refused = p.start_move("write", d, [(BLOCKS, 0, 1)])
        # Rank 0 writes and refuses; rank 1 says nothing, which proves nothing.
        await first_rank_wrote(d, full_content(1, heads=4))
        assert not stuck.done()
        assert not refused.done()
        assert p.mover.alive
        p.workers[1].kill()
        assert name_is_free("p#1", monkeypatch)
        for move in (stuck, refused):
            moved = await asyncio.wait_for(move, DEADLINE)
            assert moved.state is TransferState.FAILED
            assert "rank 1: its process has ended" in (moved.error or "")
            assert moved.bytes == 0
        assert not p.mover.alive
        late = await p.move("write", d, [(2, 2, 1)])
        assert late.error == "write d@1: rank 1 of p: its process has ended"
        # The peer of a dead worker: its read fails, and it lives on.
        read = await d.move("read", p, [(0, 3, 1)])
        assert read.state is TransferState.FAILED
        assert d.mover.alive


async def first_rank_wrote(d: Engine, source: torch.Tensor) -> None:
    async with asyncio.timeout(DEADLINE):
        while not torch.equal(d.content()[:, 1, :2], source[:, 1, :2]):  # noqa: ASYNC110  other processes'
            await asyncio.sleep(0)
