"""How the embedded engine's server writes to its clients: whole answers and event streams, with limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from kvhandoff.web import ClientGone, Handler, json_response


@dataclass(frozen=True, slots=True)
class Limits:
    """How much and how long the server bears with a client, and with its engine."""

    body_bytes: int = 32 * 2**20
    read_s: float = 60.0
    """For a client to send its whole body; then 408."""
    stall_s: float = 60.0
    """For a client to read some of what was sent to it; then its request is aborted."""
    silence_s: float = 600.0
    """For the engine to give a first or a next token; then 504."""


class StreamFailed(Exception):
    """A stream ended with an error event; the response is complete as it is."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__()
        self.response = response


async def send_json(request: web.Request, data: Any, limits: Limits) -> web.StreamResponse:
    """Write the whole response now, so that the caller knows whether it went out.

    Raises ClientGone when it didn't.
    """
    response = json_response(data)
    async with _to_client(request, limits):
        await response.prepare(request)
        await response.write_eof()
    return response


@web.middleware
async def broken_streams(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A stream that ended with an error event has been answered."""
    try:
        return await handler(request)
    except StreamFailed as failed:
        return failed.response


class EventStream:
    """A stream of server-sent events. Nothing is sent before the first `write`."""

    def __init__(self, request: web.Request, limits: Limits) -> None:
        self._request = request
        self._limits = limits
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    @property
    def begun(self) -> bool:
        """Whether the client has got its status, so that an error has to be an event."""
        return self.response.prepared

    async def write(self, data: bytes) -> None:
        """Send some events; waits while the client is behind. Raises ClientGone."""
        async with _to_client(self._request, self._limits):
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(data)

    async def end(self) -> None:
        """No more events."""
        async with _to_client(self._request, self._limits):
            await self.response.write_eof()


@asynccontextmanager
async def _to_client(request: web.Request, limits: Limits) -> AsyncIterator[None]:
    """Around every write: whatever keeps the client from reading becomes ClientGone."""
    try:
        async with asyncio.timeout(limits.stall_s):
            yield
    except ConnectionError as error:
        raise ClientGone from error
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGone from error
