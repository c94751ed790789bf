"""Engines of the transport tests: processes that own a region and a data plane and do as they are told."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.transport.api import DataPlane, TransferState, TransportError
from kvhandoff.transport.planes import allocate_region, create_plane

DEADLINE = 30.0
_spawn = multiprocessing.get_context("spawn")


def identity(engine_id: str, epoch: str = "0") -> Identity:
    return Identity(EngineId(engine_id), Epoch(epoch))


def block_of(seed: int, block: int, size: int) -> bytes:
    """Content that differs between any two blocks of any two engines, and within a block."""
    unit = f"[{seed}:{block}]".encode()
    return (unit * (size // len(unit) + 1))[:size]


class Engine:
    """The test's end of one engine process."""

    def __init__(self, kind: str, name: str, *, epoch: str = "0", blocks: int = 16, block_bytes: int = 4096):
        self.identity = identity(name, epoch)
        self.blocks = blocks
        self.block_bytes = block_bytes
        self._pipe, theirs = _spawn.Pipe()
        args = (theirs, kind, self.identity, blocks, block_bytes)
        self.process = _spawn.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.metadata: bytes = self.answer()

    def tell(self, command: str, *args: Any) -> None:
        self._pipe.send((command, args))

    def answer(self) -> Any:
        assert self._pipe.poll(DEADLINE), f"{self.identity} does not answer"
        return self._pipe.recv()

    def ask(self, command: str, *args: Any) -> Any:
        self.tell(command, *args)
        return self.answer()

    def connect(self, peer: Engine) -> str | None:
        refusal: str | None = self.ask("connect", peer.identity, peer.metadata)
        return refusal

    def move(self, operation: str, peer: Engine, copies: Sequence[tuple[int, int, int]]) -> str:
        """`done`, `failed: why` or `refused: why`."""
        outcome: str = self.ask("move", operation, peer.identity, copies)
        return outcome

    def fill(self, seed: int) -> None:
        self.ask("fill", seed)

    def content(self) -> list[bytes]:
        raw = self.ask("content")
        return [raw[i : i + self.block_bytes] for i in range(0, len(raw), self.block_bytes)]

    def expected(self, seed: int) -> list[bytes]:
        return [block_of(seed, block, self.block_bytes) for block in range(self.blocks)]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, f"{self.identity}: the condition does not come true"
            time.sleep(0.01)

    def mapped(self) -> int:
        """How many shared regions the process has in its address space, its own included."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        return len(set(re.findall(r"/memfd:(kvhandoff-\w+)", maps)))

    def kill(self) -> None:
        """As kill -9 does; returns when the process is gone."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(DEADLINE)
        assert self.process.exitcode == -signal.SIGKILL

    def stop(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def quit(self) -> None:
        """End in order: the data plane closes without an error, and the process exits with 0."""
        assert self.ask("close") == "closed"
        self.process.join(DEADLINE)
        assert self.process.exitcode == 0

    def discard(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(DEADLINE)
        self._pipe.close()


@contextmanager
def engines() -> Iterator[type[Engine]]:
    """Makes engines, and ends those that are left."""
    made: list[Engine] = []

    class Tracked(Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    try:
        yield Tracked
    finally:
        for engine in made:
            engine.discard()


def _serve(pipe: Connection, kind: str, me: Identity, blocks: int, block_bytes: int) -> None:
    region = allocate_region(kind, blocks, block_bytes)
    plane = create_plane(kind, me)
    plane.register(region)
    pipe.send(plane.metadata())
    while True:
        interval = plane.service_interval
        if not pipe.poll(interval):
            plane.service()
            continue
        command, args = pipe.recv()
        match command:
            case "connect":
                pipe.send(_error_of(plane.connect, *args))
            case "disconnect":
                plane.disconnect(*args)
                pipe.send(None)
            case "move":
                pipe.send(_move(plane, *args))
            case "post":
                handle = plane.post(*args)
                pipe.send(plane.poll(handle).value)
            case "wait":
                pipe.send(_wait(plane, handle))
            case "service_interval":
                pipe.send(plane.service_interval)
            case "fill":
                region.buffer[:] = b"".join(block_of(args[0], block, block_bytes) for block in range(blocks))
                pipe.send(None)
            case "content":
                pipe.send(ctypes.string_at(region.address, blocks * block_bytes))
            case "close":
                plane.close()
                region.close()
                pipe.send("closed")
                return


def _error_of(call: Any, *args: Any) -> str | None:
    try:
        call(*args)
    except TransportError as error:
        return str(error)
    return None


def _move(plane: DataPlane, operation: Any, peer: Identity, copies: Any) -> str:
    try:
        handle = plane.post(operation, peer, copies)
    except TransportError as error:
        return f"refused: {error}"
    return _wait(plane, handle)


def _wait(plane: DataPlane, handle: Any) -> str:
    deadline = time.monotonic() + DEADLINE / 2
    while (state := plane.poll(handle)) is TransferState.PENDING:
        if time.monotonic() > deadline:
            return "pending"
        time.sleep(0.001)
    assert plane.poll(handle) is state  # asking again is fine
    return "done" if state is TransferState.DONE else f"failed: {handle.error}"
