"""Requests and responses, as handlers see them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from kvhandoff.core.errors import RequestError
from kvhandoff.router.wire.framing import LAST_CHUNK
from kvhandoff.router.wire.headers import Headers
from kvhandoff.web import ClientGone, body_too_large, body_too_slow, encoded_body

if TYPE_CHECKING:
    from kvhandoff.router.wire.connection import Connection

_Value = TypeVar("_Value")

Handler = Callable[["Request"], Awaitable["Response | StreamResponse"]]


class Key(Generic[_Value]):
    """The name of a value that is put into requests."""

    def __init__(self, name: str, kind: type[_Value]) -> None:
        self.name = name
        self.kind = kind


class Request:
    """One request: its head, and its body as it comes in."""

    __slots__ = (
        "_body",
        "_connection",
        "_failure",
        "_limit",
        "_parts",
        "_received",
        "_values",
        "_waiter",
        "asks_to_continue",
        "complete",
        "from_sibling",
        "headers",
        "keep_alive",
        "match_info",
        "method",
        "page",
        "path",
        "version",
    )

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        version: str,
        headers: Headers,
        *,
        keep_alive: bool,
        limit: int,
    ) -> None:
        self.method = method
        self.path = path
        """As it was sent, percent-encoded."""
        self.version = version
        """`1.1` or `1.0`."""
        self.headers = headers
        self.keep_alive = keep_alive
        """The connection may be used again."""
        self.page: str | None = None
        """The page that it asks for, as it is written down; None: there is none with this method."""
        self.match_info: Mapping[str, str] = {}
        self.complete = False
        """The body is in."""
        self.from_sibling = False
        """It came in by the side door."""
        self.asks_to_continue = False
        """Its body comes when it is told to send it."""
        self._connection = connection
        self._limit = limit
        self._received = 0
        self._body: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._values: dict[Key[Any], Any] = {}

    def __getitem__(self, key: Key[_Value]) -> _Value:
        value: _Value = self._values[key]
        return value

    def __setitem__(self, key: Key[_Value], value: _Value) -> None:
        self._values[key] = value

    @property
    def content_length(self) -> int | None:
        """Bytes of the body, where its head says so."""
        given = self.headers.get("Content-Length")
        return None if given is None else int(given)

    @property
    def connection(self) -> Connection:
        """What it came in by."""
        return self._connection

    def feed(self, piece: bytes) -> None:
        """A part of the body is in. Nothing beyond the limit is kept."""
        self._received += len(piece)
        if self._received <= self._limit:
            self._body.append(piece)
        else:
            self._body.clear()
            self._wake()

    def end(self, failure: Exception | None = None) -> None:
        """The body is complete, or what will never be."""
        self.complete = failure is None
        self._failure = failure
        self._wake()

    async def received(self) -> None:
        """Until the body is in, or will never be. Raises ClientGone."""
        if not self.complete and self._received <= self._limit and self._failure is None:
            if self.asks_to_continue and not self._received:
                self._connection.say_continue()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def body(self) -> bytes:
        """What has been received. Raises RequestError (413, 400)."""
        if self._received > self._limit:
            raise body_too_large(self._limit)
        if self._failure is not None:
            raise self._failure
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Response:
    """A whole response; sent when its handler returns it."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self,
        *,
        status: int = 200,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.headers = dict(headers or {})
        if content_type is not None:
            self.headers["Content-Type"] = content_type


class StreamResponse:
    """A 200 that is sent piece by piece: `prepare`, `write`, `write_eof`.

    None of them waits. `on_flow` is called with False when the client takes too little, and with True when
    there is room again; `drained` waits for that.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "_room",
        "_transport",
        "ended",
        "headers",
        "on_flow",
        "status",
    )

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.status = 200
        self.headers = dict(headers)
        self.ended = False
        """Nothing more is to come, properly or not."""
        self.on_flow: Callable[[bool], None] | None = None
        self._connection: Connection | None = None
        self._transport: asyncio.Transport | None = None
        """The connection's, since the head was made."""
        self._head = b""
        self._chunked = True
        self._room: asyncio.Future[None] | None = None

    @property
    def prepared(self) -> bool:
        """Whether its head goes out with the first piece, or has gone."""
        return self._connection is not None

    @property
    def full(self) -> bool:
        """The client takes too little."""
        return self._connection is not None and self._connection.full

    def prepare(self, request: Request) -> None:
        """The client's request is answered with this. Raises ClientGone."""
        self._connection = request.connection
        self._transport, self._head, self._chunked = self._connection.begin_stream(request, self)

    def write(self, piece: bytes, *, last: bool = False) -> None:
        """Send a piece; an empty one is none. `last`: and the end with it. Raises ClientGone."""
        if piece:
            end = LAST_CHUNK if last else b""
            self.write_chunk(b"%x\r\n%b\r\n%b" % (len(piece), piece, end), piece)
            self.ended = last

    def write_chunk(self, chunk: bytes, piece: bytes) -> None:
        """Send a piece that is a chunk already. Raises ClientGone."""
        transport = self._transport
        if transport is None:
            raise RuntimeError("it is not prepared")
        if transport.is_closing():
            raise ClientGone
        if self._head:
            chunk, piece, self._head = self._head + chunk, self._head + piece, b""
        transport.write(chunk if self._chunked else piece)

    def write_eof(self) -> None:
        """The end. Raises ClientGone."""
        self.write_chunk(LAST_CHUNK, b"")
        self.ended = True

    def cut(self) -> None:
        """End it so that nobody can take it for whole."""
        self.ended = True
        if self._connection is not None:
            self._connection.abort(reset=not self._chunked)

    def flow(self, *, room: bool) -> None:
        """The connection's word."""
        if room and self._room is not None and not self._room.done():
            self._room.set_result(None)
        if self.on_flow is not None:
            self.on_flow(room)

    async def drained(self) -> None:
        """Until there is room. Raises ClientGone."""
        if not self.full:
            return
        self._room = asyncio.get_running_loop().create_future()
        await self._room


async def read_body(request: Request, limit_bytes: int, read_s: float) -> bytes:
    """The body. Raises RequestError when it is too large, too slow or garbled, and ClientGone."""
    if (request.content_length or 0) > limit_bytes:
        raise body_too_large(limit_bytes)
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise encoded_body(encoding)
    if not request.complete:
        try:
            async with asyncio.timeout(read_s):
                await request.received()
        except TimeoutError as error:
            raise body_too_slow(read_s) from error
    body = request.body()
    if len(body) > limit_bytes:
        raise body_too_large(limit_bytes)
    return body


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON of anything msgspec can encode."""
    body = msgspec.json.encode(value)
    return Response(status=status, body=body, headers=headers, content_type="application/json")


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The error as OpenAI clients parse it."""
    return json_response(error.body(), status=error.status, headers={**error.headers, **(headers or {})})
