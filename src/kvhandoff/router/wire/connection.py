"""One client's connection: requests in, one at a time answered, responses out.

    head ──▶ body ──▶ complete       the handler starts at the head's end
    pipelined                        a request that comes before the one before it is answered waits, and no
                                     more is read
    bad framing                      400 (431, 501) after the answers that are due, and the connection ends
    the client leaves                the handler is cancelled: its legs end with it
    answered before the body is in   `Connection: close`; what still comes is dropped for a moment, so that
                                     the client gets to read the answer

A handler starts before the body is in, so that who may not come in need not send all of it.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Coroutine
from socket import SO_LINGER, SOL_SOCKET
from typing import Any, Protocol, cast

import httptools

from kvhandoff.core.errors import RequestError
from kvhandoff.router.wire.framing import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    BadFraming,
    Pairs,
    bad_field,
    check_request,
    response_head,
    too_large,
)
from kvhandoff.router.wire.headers import Headers
from kvhandoff.router.wire.messages import Request, Response, StreamResponse, error_response
from kvhandoff.web import ClientGone

log = logging.getLogger(__name__)

IDLE_S = 75.0
"""A connection without a request under way is kept so long, and a head may take so long."""
LINGER_S = 2.0
"""The rest of a body that nobody wants is dropped for so long."""


class Host(Protocol):
    """What a connection needs of its server."""

    limit: int
    """Bytes of a body at most."""
    closing: bool

    def joined(self, connection: Connection, /) -> None:
        """It is open."""

    def left(self, connection: Connection, /) -> None:
        """It has ended."""

    def answer(self, request: Request, /) -> Coroutine[Any, Any, Response | StreamResponse]:
        """Raises nothing but CancelledError."""


class Connection(asyncio.Protocol):
    """Parses what comes in, and writes what goes out."""

    def __init__(self, host: Host, *, side_door: bool = False) -> None:
        self.deadline: float | None = None
        """By the loop's clock: when it is ended for want of anything to do. None: it is at work."""
        self.full = False
        """The client takes too little of what is written."""
        self._host = host
        self._side_door = side_door
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        """None: nothing that comes in matters any more."""
        self._in_head = True
        self._unused_bytes = 0
        """What has come in since the last head or part of a body: of a head, or of what is around chunks."""
        self._url = b""
        self._pairs: Pairs = []
        self._reading: Request | None = None
        """Its body is coming in."""
        self._serving: Request | None = None
        self._waiting: deque[Request] = deque()
        self._past_upgrade = False
        """The head that comes is of this file's making."""
        self._refusal: BadFraming | None = None
        """Of what has come in last."""
        self._task: asyncio.Task[None] | None = None
        self._stream: StreamResponse | None = None

    # ---- the transport's word ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._host.joined(self)
        self._rest(IDLE_S)

    def connection_lost(self, _: Exception | None) -> None:
        self._host.left(self)
        self._transport = self._parser = None
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        """A client that sends no more has left."""
        return False

    def pause_writing(self) -> None:
        self.full = True
        if self._stream is not None:
            self._stream.flow(room=False)

    def resume_writing(self) -> None:
        self.full = False
        if self._stream is not None:
            self._stream.flow(room=True)

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            return
        self._unused_bytes += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            if self._refusal is not None:
                self._refuse(self._refusal)
            else:
                self._ignore_upgrade(data[stopped.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or BadFraming(f"request: it is not HTTP/1.1 ({_why(error)})"))
        else:
            if self._refusal is not None:
                self._refuse(self._refusal)
            elif self._unused_bytes > 2 * MAX_HEAD_BYTES:
                self._refuse(too_large("headers" if self._in_head else "trailers", 431))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """A request is answered as if it had not asked for another protocol. The parser has stopped where one
        would begin, behind the head; another one reads the body, told how that is framed. The answer is the
        connection's last."""
        self._parser = parser = httptools.HttpRequestParser(self)
        framing = b"".join(
            b"%b: %b\r\n" % (name, value)
            for name, value in self._pairs
            if name in (b"content-length", b"transfer-encoding")
        )
        self._past_upgrade = True
        parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        self._past_upgrade = False
        if rest and self._reading is not None:
            self.data_received(rest)

    # ---- the parser's word ----

    def on_message_begin(self) -> None:
        if not self._past_upgrade:
            self._in_head, self._url, self._pairs = True, b"", []

    def on_url(self, url: bytes) -> None:
        if self._past_upgrade:
            return
        self._url += url
        if len(self._url) > MAX_HEAD_BYTES:
            self._refusal = self._refusal or too_large("URL", 414)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and not self._past_upgrade:  # else it is a trailer: nothing in it matters
            self._pairs.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head, self._unused_bytes = False, 0
        parser = self._parser
        if self._past_upgrade or self._refusal is not None or parser is None:
            return
        version = parser.get_http_version()
        try:
            check_request(version, self._pairs)
            path = _target(self._url).partition("?")[0]
        except BadFraming as refusal:
            self._refusal = refusal
            return
        request = Request(
            self,
            parser.get_method().decode("ascii"),
            path,
            version,
            Headers(self._pairs),
            keep_alive=parser.should_keep_alive() and not parser.should_upgrade(),
            limit=self._host.limit,
        )
        request.from_sibling = self._side_door
        expects = request.headers.get("Expect")
        request.asks_to_continue = expects is not None and version == "1.1"
        if expects is not None and expects.lower() != "100-continue":
            value = expects.encode("utf-8", "surrogateescape")
            self._refusal = bad_field("Expect", value, "100-continue", 417)
        elif self._serving is None:
            self._reading = request
            self._serve(request)
        elif len(self._waiting) < MAX_PIPELINED:
            self._reading = request
            self._waiting.append(request)
            if self._transport is not None and self._transport.is_reading():
                self._transport.pause_reading()
        else:
            self._refusal = BadFraming(f"more than {MAX_PIPELINED} requests wait for their answers")

    def on_body(self, piece: bytes) -> None:
        self._unused_bytes = 0
        if self._reading is not None and self._refusal is None:
            self._reading.feed(piece)

    def on_message_complete(self) -> None:
        if self._parser is not None and self._parser.should_upgrade():
            return  # only its head is read
        self._in_head, self._unused_bytes = True, 0
        if self._reading is not None and self._refusal is None:
            self._reading.end()
            self._reading = None

    # ---- serving ----

    def _serve(self, request: Request) -> None:
        self.deadline = None
        self._serving = request
        self._task = self._loop.create_task(self._run(request))

    async def _run(self, request: Request) -> None:
        response = await self._host.answer(request)
        if isinstance(response, Response):
            if self._stream is not None:
                log.error("%s %s: answered again within its stream", request.method, request.path)
                self.abort()
            else:
                self._send(request, response)
        elif not response.ended:
            log.error("%s %s: its stream was not ended", request.method, request.path)
            response.cut()
        self._stream = self._task = self._serving = None
        if self._transport is None or self._transport.is_closing():
            return
        if not self._goes_on(request):
            self._end(request)
        elif self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.complete:  # its body may come now
                self._resume()
            self._serve(waiting)
        else:
            self._read_on()

    def _read_on(self) -> None:
        if self._refusal is not None:
            self._refuse(self._refusal)
            return
        self._rest(IDLE_S)
        self._resume()

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    def _goes_on(self, request: Request) -> bool:
        return request.keep_alive and request.complete and not self._host.closing

    def _send(self, request: Request, response: Response) -> None:
        if self._transport is None:
            return  # nobody receives it
        length = b"Content-Length: %d\r\n" % len(response.body)
        head = response_head(response.status, response.headers, length, *self._connection_header(request))
        self._transport.write(head if request.method == "HEAD" else head + response.body)

    def _connection_header(self, request: Request) -> tuple[bytes, ...]:
        if not self._goes_on(request):
            return (b"Connection: close\r\n",)
        return (b"Connection: keep-alive\r\n",) if request.version == "1.0" else ()

    def _refuse(self, refusal: BadFraming) -> None:
        """Answer what can't be read, as the last thing here; after the answers that are due."""
        self._parser = None
        self._refusal = refusal
        if self._reading is not None:  # bad is its body: its handler says so, if it is read at all
            why = f"body: can't be read ({refusal})"
            self._reading.end(RequestError(why, param="body"))
            self._reading = self._refusal = None
        elif self._serving is None and self._transport is not None:
            self._refusal = None
            error = RequestError(str(refusal), status=refusal.status, param=refusal.field)
            response = error_response(error)
            length = b"Content-Length: %d\r\n" % len(response.body)
            head = response_head(response.status, response.headers, length, b"Connection: close\r\n")
            self._transport.write(head + response.body)
            self._linger()

    def _end(self, request: Request) -> None:
        if request.complete and self._transport is not None:
            self._transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Closing at once would reset the connection, and the answer might be lost with it."""
        self._parser = None
        self._rest(LINGER_S)
        self._resume()
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def _rest(self, seconds: float) -> None:
        self.deadline = self._loop.time() + seconds

    # ---- for responses ----

    def say_continue(self) -> None:
        """The client may send the body that it asks about."""
        if self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def begin_stream(self, request: Request, stream: StreamResponse) -> tuple[asyncio.Transport, bytes, bool]:
        """Where it goes, its head, to be sent with the first piece, and whether it goes in chunks. Raises
        ClientGone."""
        if self._transport is None or request is not self._serving:
            raise ClientGone
        if self._stream is not None:
            raise RuntimeError("it is being answered already")
        self._stream = stream
        chunked = request.version == "1.1"
        if not chunked:
            request.keep_alive = False  # its end is the connection's
        more = (b"Transfer-Encoding: chunked\r\n",) if chunked else ()
        head = response_head(stream.status, stream.headers, *more, *self._connection_header(request))
        return self._transport, head, chunked

    def abort(self, *, reset: bool = False) -> None:
        """End the connection at once. `reset`: so that a client can tell whose answer has no other end."""
        if self._transport is None:
            return
        if reset:
            self._transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _AT_ONCE)
        self._transport.abort()

    # ---- for the server ----

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The handler at work."""
        return self._task

    def expire(self) -> None:
        """Its time is up."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """The server closes: end it when what is written has gone out, unless a request is under way, which
        is then its last."""
        if self._serving is None and self._transport is not None:
            self._transport.close()


_AT_ONCE = struct.pack("ii", 1, 0)
"""Linger, for no time: what is not sent yet is dropped, and the client told so."""


def _target(url: bytes) -> str:
    """Path and query. Raises BadFraming."""
    if not url.startswith(b"/"):
        try:
            parsed = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError as error:
            raise bad_field("URL", url, "/PATH or http://HOST/PATH") from error
        query = b"?" + parsed.query if parsed.query else b""
        url = (parsed.path or b"/") + query
    return url.partition(b"#")[0].decode("utf-8", "surrogateescape")


def _why(error: Exception) -> str:
    return str(error)[:200]
