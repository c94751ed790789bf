"""HTTP odds and ends of the embedded engine's server: bodies in, JSON and events out, errors as OpenAI's."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kvhandoff.core.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Result = TypeVar("Result")


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


class ClientGone(Exception):
    """The client has left, or reads nothing any more."""


class StreamFailed(Exception):
    """A stream ended with an error event; the response is complete as it is."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__()
        self.response = response


def error_response(error: RequestError) -> web.Response:
    """The error as OpenAI clients parse it."""
    return json_response(error.body(), status=error.status)


def json_response(data: Any, *, status: int = 200) -> web.Response:
    """JSON of anything msgspec can encode."""
    return web.Response(body=msgspec.json.encode(data), status=status, content_type="application/json")


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
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is an OpenAI error body, and none ends the service."""
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(error)
    except web.HTTPException as error:
        return _from_http(request, error)
    except StreamFailed as failed:
        return failed.response
    except ClientGone:
        # There is nobody to answer, but aiohttp wants something to drop.
        return web.Response(status=499)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(INTERNAL_ERROR)


INTERNAL_ERROR = RequestError("internal error", status=500, code="internal_error", kind="server_error")


def _from_http(request: web.Request, error: web.HTTPException) -> web.Response:
    where = f"{request.method} {request.path}"
    match error:
        case web.HTTPNotFound():
            said = RequestError(f"no such endpoint: {where}", status=404, code="unknown_url")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            said = RequestError(
                f"{where}: allowed methods are {allowed}", status=405, code="method_not_supported"
            )
        case _:
            said = RequestError(f"{where}: {error.reason}", status=error.status)
    response = error_response(said)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """The body. Raises RequestError when it is too large, too slow or garbled."""
    too_large = RequestError(
        f"body: more than the allowed {limits.body_bytes} bytes", status=413, code="body_too_large"
    )
    if (request.content_length or 0) > limits.body_bytes:
        raise too_large
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise RequestError(f"Content-Encoding: got {encoding!r}, allowed is none", status=415)
    try:
        async with asyncio.timeout(limits.read_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except TimeoutError as error:
        raise RequestError(
            f"body: not complete after {limits.read_s:g} s", status=408, code="body_timeout"
        ) from error
    except web.RequestPayloadError as error:
        raise RequestError(f"body: can't be read ({error})") from error
    except ConnectionError as error:
        raise ClientGone from error


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


class Server:
    """A running server."""

    def __init__(self, runner: web.AppRunner, host: str, port: int) -> None:
        self._runner = runner
        self.host = host
        self.port = port
        """The bound port, also when 0 was asked for."""

    async def close(self) -> None:
        """Stop listening, give running requests a moment, end what is left."""
        await self._runner.cleanup()


async def serve(
    app: web.Application, host: str = "127.0.0.1", port: int = 0, *, shutdown_s: float = 5.0
) -> Server:
    """Start to listen; requests are cancelled when their client leaves.

    Raises ConfigError when the address can't be had.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,  # a small body could unpack into a huge one; see read_body
        access_log=None,
        shutdown_timeout=shutdown_s,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"port {port} on {host}: can't listen ({why})") from error
    return Server(runner, host, runner.addresses[0][1])


def run_main(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a program on uvloop, or on asyncio's own loop where there is no uvloop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
