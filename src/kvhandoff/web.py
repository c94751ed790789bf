"""What every HTTP server of the project does alike: bodies in, JSON out, errors in OpenAI's form, listening.

Above `core`, below the engines' servers and the router.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import random
import re
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kvhandoff.core.errors import ConfigError, RequestError, excerpt

_log = logging.getLogger(__name__)

_framing_log = logging.getLogger(f"{__name__}.framing")
_framing_log.setLevel(logging.CRITICAL)
"""Where aiohttp writes a traceback for whoever speaks no HTTP: the 400 that it answers says enough. Errors of
handlers never get there; see `errors`."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Result = TypeVar("Result")

_LATER_PORTS = range(15_000, 32_768)
_given: set[int] = set()
"""Ports that this process has been told of, and perhaps does not use yet."""

CLIENT_LEFT = 499
"""The status of a request whose client left; nobody receives it."""

INTERNAL_ERROR = RequestError("internal error", status=500, code="internal_error", kind="server_error")


class ClientGone(Exception):
    """The client left, or has stopped reading."""


def decode_json(raw: bytes) -> Any:
    """The value of a body. Raises RequestError naming the body, or its field that can't be read."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError as error:
        raise _out_of_range(raw) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"body: not valid JSON ({json_fault(raw, error)})", param="body") from error


def json_fault(raw: bytes, error: Exception) -> str:
    """Why a body can't be read, in words. `error`: what msgspec has raised."""
    if not raw.strip():
        return "it is empty"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    why = str(error)
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in why:
        return "it is not valid UTF-8"
    # msgspec takes the first half of a pair without the second for the input's end.
    if "surrogate" in why or ("truncated" in why and _HALF_A_PAIR.search(raw)):
        return (
            r"an escape in it (\ud800 to \udfff) is half of a surrogate pair, which is no Unicode character"
        )
    return why


_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def _out_of_range(raw: bytes) -> RequestError:
    """Valid JSON with a number that no integer or float holds."""
    name, value = _unreadable_field(raw) or ("body", raw)
    shown = excerpt(bytes(value).decode(errors="replace"))[1:-1]  # the JSON itself, not as a string
    return RequestError(f"{name}: got {shown}, allowed are numbers of up to 1.8e308", param=name)


def _unreadable_field(raw: bytes) -> tuple[str, msgspec.Raw] | None:
    """None: the body is no object."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return None
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError:
            return name, value
    return None


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens at now, for a server that starts later; another one at each call. It is not
    of those that the system gives to outgoing connections (32768 and up), one of which could have it by then.
    Raises OSError."""
    for port in random.sample(_LATER_PORTS, 64):
        if port in _given:
            continue
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                _given.add(port)
                return port
    raise OSError(errno.EADDRINUSE, f"no free port on {host} was found from {_LATER_PORTS}")


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach a server there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """JSON of anything msgspec can encode."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def error_response(error: RequestError) -> web.Response:
    """The error as OpenAI clients parse it."""
    return json_response(error.body(), status=error.status, headers=error.headers)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is an OpenAI error body, those of routing (404, 405) too, and none ends the service."""
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(error)
    except web.HTTPException as error:
        return _from_http(request, error)
    except ClientGone:
        # There is nobody to answer, but aiohttp wants something to drop.
        return web.Response(status=CLIENT_LEFT)
    except Exception:  # noqa: BLE001  logged, and answered with a 500
        _log.exception("%s %s failed", request.method, request.path)
        return error_response(INTERNAL_ERROR)


def _from_http(request: web.Request, error: web.HTTPException) -> web.Response:
    where = f"{request.method} {request.path}"
    match error:
        case web.HTTPNotFound():
            return error_response(no_endpoint(where))
        case web.HTTPMethodNotAllowed():
            return error_response(wrong_method(where, error.allowed_methods))
        case _:
            return error_response(RequestError(f"{where}: {error.reason}", status=error.status))


def no_endpoint(where: str) -> RequestError:
    """The 404 for a page that there isn't. `where`: its method and path."""
    return RequestError(f"no such endpoint: {where}", status=404, code="unknown_url")


def wrong_method(where: str, allowed: Iterable[str]) -> RequestError:
    """The 405."""
    names = sorted(allowed)
    why = f"{where}: allowed methods are {', '.join(names)}"
    return RequestError(why, status=405, code="method_not_supported", headers={"Allow": ",".join(names)})


def body_too_large(limit_bytes: int) -> RequestError:
    """The 413."""
    why = f"body: more than the allowed {limit_bytes} bytes"
    return RequestError(why, status=413, param="body", code="body_too_large")


def body_too_slow(read_s: float) -> RequestError:
    """The 408."""
    why = f"body: not complete after {read_s:g} s"
    return RequestError(why, status=408, param="body", code="body_timeout")


def encoded_body(encoding: str) -> RequestError:
    """The 415: a small body could unpack into a huge one."""
    return RequestError(f"Content-Encoding: got {encoding!r}, allowed is none", status=415)


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """An address that can't be had."""
    unknown = isinstance(error, socket.gaierror)
    # asyncio puts words of its own around those of the system.
    why = error.strerror if unknown or error.errno is None else os.strerror(error.errno)
    if unknown or error.errno == errno.EADDRNOTAVAIL:
        allowed = "an address or a name of this machine; 0.0.0.0 or :: is all of them"
        return ConfigError(f"host: got {host!r}, which can't be listened at ({why}), allowed is {allowed}")
    if error.errno == errno.EADDRINUSE:
        why = "the port is in use"
    return ConfigError(f"port {port} on {host}: can't listen ({why})")


async def read_body(request: web.Request, limit_bytes: int, read_s: float) -> bytes:
    """The body. Raises RequestError when it is too large, too slow or garbled, and ClientGone."""
    if (request.content_length or 0) > limit_bytes:
        raise body_too_large(limit_bytes)
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise encoded_body(encoding)
    try:
        async with asyncio.timeout(read_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise body_too_large(limit_bytes) from error
    except TimeoutError as error:
        raise body_too_slow(read_s) from error
    except web.RequestPayloadError as error:
        raise RequestError(f"body: can't be read ({error})", param="body") from error
    except ConnectionError as error:
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
    app: web.Application,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    shutdown_s: float = 2.0,
) -> Server:
    """Start to listen; requests are cancelled when their client leaves.

    At the end running requests have up to twice `shutdown_s`: to end by themselves, then to be cancelled.

    Raises ConfigError when the address can't be had.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,  # a small body could unpack into a huge one; see read_body
        access_log=None,
        logger=_framing_log,
        shutdown_timeout=shutdown_s,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(host, port, error) from error
    return Server(runner, host, runner.addresses[0][1])


def run_main(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a program on uvloop, or on asyncio's own loop where there is no uvloop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
