"""The end of all of a peer's processes, as the operating system tells it."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.transport import liveness
from kvhandoff.transport.liveness import Watcher, this_process

PEER = Identity(EngineId("p"), Epoch("1"))
OTHER = Identity(EngineId("p"), Epoch("2"))
_NAME_AND_WAIT = (
    "import sys; from kvhandoff.transport.liveness import this_process; "
    "print(this_process(), flush=True); sys.stdin.read()"
)


class Sleeper:
    """A process that has told its name, and waits."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _NAME_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.name = self.process.stdout.readline().strip()

    def end(self, *, reap: bool = True) -> None:
        """As kill -9 does. Unreaped, it keeps its process id."""
        self.process.kill()
        if reap:
            self.process.communicate()
        else:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def sleepers() -> Iterator[list[Sleeper]]:
    made = [Sleeper(), Sleeper()]
    yield made
    for sleeper in made:
        sleeper.end()


@pytest.fixture
async def ended() -> asyncio.Queue[Identity]:
    """The lives that `watcher` has told of."""
    return asyncio.Queue()


@pytest.fixture
async def watcher(ended: asyncio.Queue[Identity]) -> AsyncIterator[Watcher]:
    made = Watcher(ended.put_nowait)
    yield made
    made.close()


async def told(ended: asyncio.Queue[Identity]) -> Identity:
    return await asyncio.wait_for(ended.get(), 30.0)


def descriptors() -> int:
    """How many this process has open, without what other tests have left."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def test_the_end_is_told_once(
    watcher: Watcher, ended: asyncio.Queue[Identity], sleepers: list[Sleeper]
) -> None:
    first, second = sleepers
    before = descriptors()
    watcher.watch(PEER, [first.name])
    watcher.watch(PEER, [first.name])
    watcher.watch(OTHER, [second.name])
    assert ended.empty()
    first.end()
    assert await told(ended) == PEER
    second.end()
    assert await told(ended) == OTHER
    assert ended.empty()
    assert descriptors() == before - 4  # the pipes to the sleepers; of the watcher, none is left


async def test_the_end_is_told_when_the_last_process_has_ended(
    watcher: Watcher, ended: asyncio.Queue[Identity], sleepers: list[Sleeper]
) -> None:
    first, last = sleepers
    watcher.watch(PEER, [first.name, last.name, first.name])
    watcher.watch(OTHER, [first.name])
    first.end()
    assert await told(ended) == OTHER  # so the loop has heard of the first's end
    await asyncio.sleep(0)
    assert ended.empty()
    last.end()
    assert await told(ended) == PEER


async def test_one_that_had_ended_before_is_not_awaited(
    watcher: Watcher, ended: asyncio.Queue[Identity], sleepers: list[Sleeper]
) -> None:
    first, last = sleepers
    first.end()
    watcher.watch(PEER, [first.name, last.name])
    assert ended.empty()
    last.end()
    assert await told(ended) == PEER


async def test_what_has_ended_is_told_at_once(
    watcher: Watcher, ended: asyncio.Queue[Identity], sleepers: list[Sleeper]
) -> None:
    for sleeper in sleepers:
        sleeper.end()
    watcher.watch(PEER, [sleeper.name for sleeper in sleepers])
    assert ended.get_nowait() == PEER


async def test_a_later_process_with_its_number_is_another(
    watcher: Watcher, ended: asyncio.Queue[Identity]
) -> None:
    name, _, started = this_process().rpartition("/")
    watcher.watch(PEER, [f"{name}/{int(started) - 1}"])
    assert ended.get_nowait() == PEER
    watcher.watch(OTHER, [this_process()])
    assert ended.empty()


HOST = liveness.host()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nonsense",
        "/",
        "a/b/c/d",
        f"another boot/pid:[1]/{os.getpid()}/1",
        "x/-5/1",
        f"{HOST}/-5/1",
        f"{HOST}/0/1",
        f"{HOST}/²/1",
        f"{HOST}/{10**30}/1",
        f"{HOST}/1/",
    ],
)
async def test_nothing_is_told_of_what_lives_elsewhere(
    watcher: Watcher, ended: asyncio.Queue[Identity], sleepers: list[Sleeper], name: str
) -> None:
    """Nor of a peer that has one process elsewhere, or one without a name."""
    here = sleepers[0]
    here.end()
    watcher.watch(PEER, [name])
    watcher.watch(PEER, [here.name, name])
    watcher.watch(PEER, [name, here.name])
    assert ended.empty()
    watcher.watch(PEER, [])
    assert ended.empty()


async def test_what_the_system_does_not_say_is_no_end(
    watcher: Watcher,
    ended: asyncio.Queue[Identity],
    sleepers: list[Sleeper],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A living process whose entry can't be read is not taken for another one."""
    before = descriptors()

    started = liveness._started
    pids = {sleeper.process.pid for sleeper in sleepers}
    hidden = set(pids)

    def seen(pid: int) -> str:
        if pid in hidden:
            raise FileNotFoundError(f"/proc/{pid}/stat")
        return started(pid)

    monkeypatch.setattr(liveness, "_started", seen)
    names = [sleeper.name for sleeper in sleepers]
    for these in (*({pid} for pid in pids), pids):
        hidden = these
        watcher.watch(PEER, names)
        assert ended.empty()
        assert descriptors() == before
    for sleeper in sleepers:
        sleeper.end(reap=False)
    watcher.watch(PEER, names)
    assert ended.get_nowait() == PEER
    assert descriptors() == before


async def test_a_closed_watcher_tells_nothing(
    ended: asyncio.Queue[Identity], sleepers: list[Sleeper]
) -> None:
    watcher = Watcher(ended.put_nowait)
    before = descriptors()
    watcher.watch(PEER, [sleeper.name for sleeper in sleepers])
    watcher.close()
    assert descriptors() == before
    for sleeper in sleepers:
        sleeper.end()
    await asyncio.sleep(0)
    assert ended.empty()
