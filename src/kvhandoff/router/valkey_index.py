"""The index of several replicas, on a Valkey or Redis server.

One task talks to the server, on one connection: whatever waits goes in one batch, so that a look-up of all a
conversation's names, or a turn's remembering, is a part of one round trip, and turns are written in the order
in which they came. A request waits for its own look-up no longer than the index's deadline; then it is one
without a history, and the batch goes on without it. While the server can't be reached, look-ups are answered
at once, turns are dropped and counted, and the task tries to connect again now and then.

A value is a version byte and msgpack. Nothing is unpickled, and what can't be read is a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from valkey.asyncio import Valkey
from valkey.exceptions import ResponseError, ValkeyError

from kvhandoff.core.reasons import Reason
from kvhandoff.router.index import Answer, Turn

log = logging.getLogger(__name__)

PREFIX = b"kvhandoff:turn:"
"""Of all keys; a name follows, which is of one cluster only (`names.py`)."""

_VERSION = b"\x01"
_MAX_VALUE_BYTES = 1024
"""A longer value is nobody's turn."""
_turn = msgspec.msgpack.Decoder(Turn)

_BATCH = 256
"""Commands of one round trip."""
_MAX_WAITING = 8192
"""Commands that wait for a slow server; what comes then is dropped."""

_LOST = object()
"""The result of a command that has come to nothing."""
_BROKEN = (ValkeyError, OSError, TimeoutError, ValueError)
"""What talking to something that isn't a working server ends with: ValueError for what is no RESP."""


def encode(turn: Turn) -> bytes:
    """A turn as a value."""
    return _VERSION + msgspec.msgpack.encode(turn)


def decode(value: bytes) -> Turn | None:
    """The turn of a value; None: it is none of this version."""
    if value[:1] != _VERSION or len(value) > _MAX_VALUE_BYTES:
        return None
    try:
        return _turn.decode(memoryview(value)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@dataclass(slots=True)
class _Command:
    """One command, and who waits for its result."""

    args: tuple[Any, ...]
    answer: asyncio.Future[Any] | None = None
    turns: int = 0
    """Lost with it."""


class ValkeyIndex:
    """Turns on the server at `url`.

    `ttl_s`: an entry is kept so long after it was written or used. `deadline_s`: of a look-up. `connect_s`:
    of connecting and of a batch; a server that takes longer is taken for lost, and asked again after
    `retry_s`. `on_lost_turns` is told how many turns could not be remembered. Raises ValueError for a URL
    that the client doesn't take.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float,
        deadline_s: float,
        connect_s: float,
        on_lost_turns: Callable[[int], None],
        retry_s: float = 1.0,
    ) -> None:
        # The client's own time limits would only hide ours; a certificate is checked for its host too.
        secure = {"ssl_check_hostname": True} if url.startswith(("valkeys:", "rediss:")) else {}
        url = url.replace("rediss:", "valkeys:", 1).replace("redis:", "valkey:", 1)
        self._client = Valkey.from_url(url, socket_timeout=None, max_connections=1, **secure)
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._deadline_s = deadline_s
        self._connect_s = connect_s
        self._retry_s = retry_s
        self._on_lost_turns = on_lost_turns
        self._waiting: deque[_Command] = deque()
        self._wake = asyncio.Event()
        self._connected = False
        self._closing = False
        self._problem: str | None = "not connected yet"
        self._task: asyncio.Task[None] | None = None

    async def look_up(self, names: Sequence[bytes]) -> Answer:
        if not self._connected:
            return Answer((), Reason.INDEX_FAILED)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if not self._put(_Command(("MGET", *(PREFIX + name for name in names)), answer)):
            return Answer((), Reason.INDEX_TIMEOUT)
        try:
            async with asyncio.timeout(self._deadline_s):
                values = await answer
        except TimeoutError:
            return Answer((), Reason.INDEX_TIMEOUT)
        if values is _LOST:
            return Answer((), Reason.INDEX_FAILED)
        if not isinstance(values, list) or len(values) != len(names):
            return Answer((), Reason.INDEX_FOREIGN)
        turns = [decode(value) if isinstance(value, bytes) else None for value in values]
        foreign = sum(value is not None for value in values) > sum(turn is not None for turn in turns)
        return Answer(turns, Reason.INDEX_FOREIGN if foreign else None)

    def remember(self, names: Sequence[bytes], turn: Turn) -> None:
        value = encode(turn)
        # The turn counts once, with the first of its names.
        for first, name in enumerate(names):
            self._put(_Command(("SET", PREFIX + name, value, "PX", self._ttl_ms), turns=int(first == 0)))

    def renew(self, name: bytes) -> None:
        self._put(_Command(("PEXPIRE", PREFIX + name, self._ttl_ms)))

    async def start(self) -> None:
        """Returns when the first attempt to connect has ended."""
        tried = asyncio.Event()
        self._task = asyncio.create_task(self._run(tried))
        await tried.wait()

    async def close(self) -> None:
        """What waits is written if the server takes it within `deadline_s`."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            if self._connected:
                await asyncio.wait((self._task,), timeout=self._deadline_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._disconnect()

    def _put(self, command: _Command) -> bool:
        if not self._connected or len(self._waiting) >= _MAX_WAITING:
            self._on_lost_turns(command.turns)
            return False
        self._waiting.append(command)
        self._wake.set()
        return True

    async def _run(self, tried: asyncio.Event) -> None:
        while not self._closing:
            try:
                try:
                    async with asyncio.timeout(self._connect_s):
                        if not await self._client.ping():
                            raise ValueError("it doesn't answer PING with PONG")
                    self._set_problem(None)
                    self._connected = True
                finally:
                    tried.set()
                await self._exchange()
            except _BROKEN as error:
                self._set_problem(str(error) or f"no answer in {self._connect_s:g} s")
                self._connected = False
                self._fail(list(self._waiting))
                self._waiting.clear()
                await self._disconnect()
                await asyncio.sleep(self._retry_s)

    async def _exchange(self) -> None:
        """Carry commands until the server is lost, or, when this one is closing, until none is left."""
        while self._waiting or not self._closing:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _BATCH))]
            batch = [command for command in batch if command.answer is None or not command.answer.done()]
            try:
                async with asyncio.timeout(self._connect_s), self._client.pipeline(transaction=False) as pipe:
                    for command in batch:
                        pipe.execute_command(*command.args)
                    results = await pipe.execute(raise_on_error=False)
            except _BROKEN:
                self._fail(batch)
                raise
            for command, result in zip(batch, results, strict=True):
                self._take(command, result)

    def _take(self, command: _Command, result: object) -> None:
        if isinstance(result, ResponseError):
            self._set_problem(f"{command.args[0]} is refused: {result}")
            self._fail([command])
        elif command.answer is not None and not command.answer.done():
            command.answer.set_result(result)

    def _set_problem(self, problem: str | None) -> None:
        if problem != self._problem:
            log.log(logging.WARNING if problem else logging.INFO, "index: %s", problem or "connected")
        self._problem = problem

    def _fail(self, commands: Sequence[_Command]) -> None:
        """They have come to nothing."""
        for command in commands:
            self._on_lost_turns(command.turns)
            if command.answer is not None and not command.answer.done():
                command.answer.set_result(_LOST)

    async def _disconnect(self) -> None:
        # A connection that breaks while it is closed is closed, and so is one that takes long.
        with contextlib.suppress(*_BROKEN):
            async with asyncio.timeout(self._deadline_s):
                await self._client.connection_pool.disconnect()
