"""The end of a peer's process, as the operating system tells it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from kvhandoff.core.ids import EngineId, Epoch, Identity
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

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


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
    return await asyncio.wait_for(ended.get(), 10.0)


async def test_the_end_is_told_once(watcher: Watcher, ended: asyncio.Queue[Identity]) -> None:
    first, second = Sleeper(), Sleeper()
    watcher.watch(PEER, first.name)
    watcher.watch(PEER, first.name)
    watcher.watch(OTHER, second.name)
    assert ended.empty()
    first.end()
    assert await told(ended) == PEER
    second.end()
    assert await told(ended) == OTHER
    assert ended.empty()


async def test_one_that_has_ended_is_told_at_once(watcher: Watcher, ended: asyncio.Queue[Identity]) -> None:
    sleeper = Sleeper()
    sleeper.end()
    watcher.watch(PEER, sleeper.name)
    assert ended.get_nowait() == PEER


async def test_a_later_process_with_its_number_is_another(
    watcher: Watcher, ended: asyncio.Queue[Identity]
) -> None:
    name, _, started = this_process().rpartition("/")
    watcher.watch(PEER, f"{name}/{int(started) - 1}")
    assert ended.get_nowait() == PEER
    watcher.watch(OTHER, this_process())
    assert ended.empty()


@pytest.mark.parametrize(
    "name", ["", "nonsense", "/", "a/b/c/d", f"another boot/pid:[1]/{os.getpid()}/1", "x/-5/1"]
)
async def test_nothing_is_told_of_what_lives_elsewhere(
    watcher: Watcher, ended: asyncio.Queue[Identity], name: str
) -> None:
    watcher.watch(PEER, name)
    assert ended.empty()


async def test_a_closed_watcher_tells_nothing(ended: asyncio.Queue[Identity]) -> None:
    sleeper, watcher = Sleeper(), Watcher(ended.put_nowait)
    watcher.watch(PEER, sleeper.name)
    watcher.close()
    sleeper.end()
    await asyncio.sleep(0)
    assert ended.empty()
