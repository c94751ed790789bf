"""Listening, and ending in order."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from kvhandoff.router.wire.connection import Connection
from kvhandoff.router.wire.ending import cut_off
from kvhandoff.router.wire.messages import Request, Response, StreamResponse
from kvhandoff.router.wire.site import Site
from kvhandoff.web import cannot_listen

_LOOK_S = 1.0
"""Between two looks for connections whose time is up."""
_CUT_S = 2.0
"""Handlers that are cancelled have so long to tell their clients and engines."""
_FLUSH_S = 0.5
"""The last answers have so long to go out when a server closes."""
_BACKLOG = 1024
"""Connections that the system holds for a loop that is busy."""


class Server:
    """A running server."""

    def __init__(self, site: Site, shutdown_s: float) -> None:
        self.limit = site.max_body_bytes
        self.connections: set[Connection] = set()
        self.closing = False
        self.host = ""
        self.port = 0
        """The bound port, also when 0 was asked for."""
        self._site = site
        self._shutdown_s = shutdown_s
        self._empty = asyncio.Event()
        """There is no connection."""
        self._empty.set()
        self._listeners: list[asyncio.Server] = []
        self._running = contextlib.AsyncExitStack()
        self._sweeper: asyncio.Task[None] | None = None

    def answer(self, request: Request) -> Coroutine[Any, Any, Response | StreamResponse]:
        """What the site says."""
        return self._site.answer(request)

    async def start(self) -> None:
        """Enter the site's lifespans."""
        for lifespan in self._site.lifespans:
            await self._running.enter_async_context(contextlib.asynccontextmanager(lifespan)(self._site))
        self._sweeper = asyncio.create_task(self._sweep())

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None, reuse_port: bool) -> None:
        """Raises OSError."""
        listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(self), host, port, ssl=tls, backlog=_BACKLOG, reuse_port=reuse_port or None
        )
        self._listeners.append(listener)
        self.host, self.port = host, int(listener.sockets[0].getsockname()[1])

    async def listen_at(self, path: Path) -> None:
        """At a Unix socket, beside the port. Raises OSError."""
        _clear(path)
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_unix_server(lambda: Connection(self, side_door=True), str(path))
        )

    def joined(self, connection: Connection) -> None:
        """See `Host`."""
        self.connections.add(connection)
        self._empty.clear()

    def left(self, connection: Connection) -> None:
        """See `Host`."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    async def close(self) -> None:
        """Stop listening, give running requests their time, end what is left."""
        self.closing = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.close()
        running = self._tasks()
        if running:
            _, running = await asyncio.wait(running, timeout=self._shutdown_s)
        for task in running:
            cut_off(task)
        if running:
            await asyncio.wait(running, timeout=_CUT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await self._empty.wait()
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._running.aclose()

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {connection.task for connection in self.connections if connection.task is not None}

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = loop.time()
            for connection in list(self.connections):
                if connection.deadline is not None and now >= connection.deadline:
                    connection.expire()


def _clear(path: Path) -> None:
    """The socket of a process that has died."""
    path.unlink(missing_ok=True)


async def serve(
    site: Site,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    shutdown_s: float = 2.0,
    tls: ssl.SSLContext | None = None,
    door: Path | None = None,
) -> Server:
    """Start to listen; requests are cancelled when their client leaves.

    `door`: a Unix socket where the same pages are; with one, other processes may listen at the same port, and
    share what comes in. At the end running requests have `shutdown_s` to end by themselves; what is left is
    cancelled, and can tell that by `is_cut_off`.

    Raises ConfigError when the address can't be had.
    """
    server = Server(site, shutdown_s)
    await server.start()
    try:
        await server.listen(host, port, tls=tls, reuse_port=door is not None)
        if door is not None:
            await server.listen_at(door)
    except OSError as error:
        await server.close()
        raise cannot_listen(host, port, error) from error
    except asyncio.CancelledError:
        await server.close()
        raise
    return server
