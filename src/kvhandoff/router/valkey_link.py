"""One connection to a Valkey or Redis server, for what routers share.

One task talks to the server, on one connection: whatever waits goes in one batch, in the order in which it
came, so that many commands are a part of one round trip. Who asks waits no longer than the link's deadline;
the batch goes on without it. While the server can't be reached, whoever asks is answered at once, what it is
told is dropped, and the task tries to connect again now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from valkey.asyncio import Valkey
from valkey.exceptions import ResponseError, ValkeyError

log = logging.getLogger(__name__)

_BATCH = 256
"""Commands of one round trip."""
_MAX_WAITING = 8192
"""Commands that wait for a slow server; what comes then is dropped."""

_BROKEN = (ValkeyError, OSError, TimeoutError, ValueError)
"""What talking to something that isn't a working server ends with: ValueError for what is no RESP."""


class Missing(Enum):
    """Why there is no answer."""

    LOST = "the server can't be reached, or refuses the command"
    LATE = "it takes longer than the deadline"


@dataclass(slots=True)
class _Command:
    """One command, and who waits for its result."""

    args: tuple[Any, ...]
    answer: asyncio.Future[object] | None = None
    on_lost: Callable[[], None] | None = None


class ValkeyLink:
    """A connection to the server at `url`; `name`: what for, in the log. Used on one event loop.

    `deadline_s`: of an answer. `connect_s`: of connecting and of a batch; a server that takes longer is taken
    for lost, and asked again after `retry_s`. `on_connected` is called each time that there is a connection.
    Raises ValueError for a URL that the client doesn't take.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        deadline_s: float,
        connect_s: float,
        retry_s: float = 1.0,
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        # The client's own time limits would only hide ours; a certificate is checked for its host too.
        secure = {"ssl_check_hostname": True} if url.startswith(("valkeys:", "rediss:")) else {}
        url = url.replace("rediss:", "valkeys:", 1).replace("redis:", "valkey:", 1)
        self._client = Valkey.from_url(url, socket_timeout=None, max_connections=1, **secure)
        self._name = name
        self._deadline_s = deadline_s
        self._connect_s = connect_s
        self._retry_s = retry_s
        self._on_connected = on_connected
        self._waiting: deque[_Command] = deque()
        self._wake = asyncio.Event()
        self._connected = False
        self._closing = False
        self._problem: str | None = "not connected yet"
        self._task: asyncio.Task[None] | None = None

    async def ask(self, *args: Any) -> object:
        """The result of a command, or a `Missing`. One that is late may be carried out all the same."""
        if not self._connected:
            return Missing.LOST
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if not self._put(_Command(args, answer)):
            return Missing.LATE
        try:
            async with asyncio.timeout(self._deadline_s):
                return await answer
        except TimeoutError:
            return Missing.LATE

    def tell(self, *args: Any, on_lost: Callable[[], None] | None = None) -> None:
        """Have a command carried out, behind all that came before; `on_lost`: it came to nothing."""
        self._put(_Command(args, on_lost=on_lost))

    async def start(self) -> None:
        """Returns when the first attempt to connect has ended."""
        tried = asyncio.Event()
        self._task = asyncio.create_task(self._run(tried))
        await tried.wait()

    async def close(self) -> None:
        """What waits is carried out if the server takes it within `deadline_s`."""
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
            self._fail([command])
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
                    self._on_connected()
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
            level = logging.WARNING if problem else logging.INFO
            log.log(level, "%s: %s", self._name, problem or "connected")
        self._problem = problem

    def _fail(self, commands: Sequence[_Command]) -> None:
        """They have come to nothing."""
        for command in commands:
            if command.on_lost is not None:
                command.on_lost()
            if command.answer is not None and not command.answer.done():
                command.answer.set_result(Missing.LOST)

    async def _disconnect(self) -> None:
        # A connection that breaks while it is closed is closed, and so is one that takes long.
        with contextlib.suppress(*_BROKEN):
            async with asyncio.timeout(self._deadline_s):
                await self._client.connection_pool.disconnect()
