"""The client to engines: connections that are kept for the next leg."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Awaitable
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

from kvhandoff.router.wire.framing import request_head
from kvhandoff.router.wire.leg import BrokenOff, LegAnswer, LegConnection, Sink

__all__ = ["BrokenOff", "Client", "Leg", "LegAnswer", "NotConnected"]

KEEP_IDLE_S = 3.0
"""Idle connections to engines are kept this long, well below what engines keep theirs: vLLM's server 5 s. One
that the engine closes as a request goes out on it costs that request an attempt."""


class NotConnected(ConnectionError):
    """No connection, so that the engine knows nothing of the request. `refused`: nothing listens there."""

    def __init__(self, why: str, *, refused: bool) -> None:
        super().__init__(why)
        self.refused = refused


class _Place(NamedTuple):
    """Where a URL is."""

    host: str
    port: int
    tls: bool
    name: bytes
    """For the Host header."""


class Client:
    """As many connections as there are legs; no time limits but for connecting (each wait has its own),
    nothing unpacked, nothing taken from the environment or remembered, no redirects followed."""

    def __init__(self, connect_s: float, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: for https URLs; None: the system's roots."""
        self._connect_s = connect_s
        self._tls = tls
        self._idle: defaultdict[_Place, list[LegConnection]] = defaultdict(list)
        self._busy: set[LegConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def post(self, url: str, *, data: bytes, headers: bytes) -> Leg:
        """A request with these `header_lines`: sent at once where a connection is kept, else when its context
        is entered, which follows without an await in between. At the context's end the connection is closed,
        which ends the leg, unless the answer is complete by then. Entering raises NotConnected."""
        place, path = _split(url)
        head = request_head(path, place.name, headers, len(data))
        kept = self.kept(place)
        if kept is not None:
            kept.ask(head, data)
        return Leg(self, place, head, data, kept)

    async def close(self) -> None:
        """End all connections."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            connection.drop()
        self._idle.clear()

    def kept(self, place: _Place) -> LegConnection | None:
        """An open connection that was used before; those that have ended since, or are about to, go."""
        idle = self._idle[place]
        fresh = asyncio.get_running_loop().time() - KEEP_IDLE_S
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since > fresh:
                self._busy.add(connection)
                return connection
            connection.drop()
        return None

    def give_back(self, place: _Place, connection: LegConnection) -> None:
        """It is not needed any more."""
        self._busy.discard(connection)
        if not connection.usable:
            connection.drop()
            return
        connection.rest()
        self._idle[place].append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEP_IDLE_S, self._sweep_idle)

    async def connect(self, place: _Place) -> LegConnection:
        """A new connection. Raises NotConnected."""
        loop = asyncio.get_running_loop()
        tls = None
        if place.tls:
            tls = self._tls = self._tls or ssl.create_default_context()
        where = f"{place.host}:{place.port}"
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(LegConnection, place.host, place.port, ssl=tls)
        except TimeoutError as error:
            raise NotConnected(f"no connection to {where} in {self._connect_s:g} s", refused=False) from error
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            raise NotConnected(f"Cannot connect to {where} ({error})", refused=refused) from error
        self._busy.add(connection)
        return connection

    def _sweep_idle(self) -> None:
        """Close what has been idle for too long; from time to time while there is any."""
        loop = asyncio.get_running_loop()
        self._sweep, stale = None, loop.time() - KEEP_IDLE_S
        for place, idle in list(self._idle.items()):
            for connection in [c for c in idle if c.idle_since <= stale]:
                idle.remove(connection)
                connection.drop()
            if not idle:
                del self._idle[place]
        if self._idle:
            self._sweep = loop.call_later(KEEP_IDLE_S, self._sweep_idle)


class Leg:
    """One request, from its sending to the end of interest in its answer. In between its engine works: what
    can be done by then is done before waiting for the answer."""

    __slots__ = ("_body", "_client", "_connection", "_head", "_place")

    def __init__(
        self, client: Client, place: _Place, head: bytes, body: bytes, connection: LegConnection | None
    ) -> None:
        """`connection`: by which it has been sent."""
        self._client = client
        self._place = place
        self._head = head
        self._body = body
        self._connection = connection

    async def __aenter__(self) -> Leg:
        if self._connection is None:
            self._connection = await self._client.connect(self._place)
            self._connection.ask(self._head, self._body)
        return self

    def answer(self, sink: Sink | None = None) -> Awaitable[LegAnswer]:
        """The engine's answer, when its head is in; it is poured if the sink wants it. Raises BrokenOff."""
        assert self._connection is not None
        return self._connection.answered(sink)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._client.give_back(self._place, self._connection)


@lru_cache(maxsize=1024)
def _split(url: str) -> tuple[_Place, bytes]:
    """Where it is, and its path."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    host = parts.hostname or ""
    name = parts.netloc.rpartition("@")[2].encode("ascii")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Place(host, port, tls, name), path.encode("ascii")
