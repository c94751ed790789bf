"""One connection to an engine: a request out, its answer in, whole or piece by piece.

An answer is complete when its framing says so, and only then: a connection that ends before is `BrokenOff`,
never an end. Whatever comes without having been asked for ends the connection, since the next answer could be
taken for another's.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

from kvhandoff.router.wire.framing import MAX_HEAD_BYTES, BadFraming, Pairs, check_response, whole_chunk
from kvhandoff.router.wire.headers import Headers

MAX_HELD_BYTES = 262_144
"""Of an answer that nobody takes yet; then no more is read until somebody does."""


class BrokenOff(ConnectionError):
    """An engine's answer ended before it was complete, or can't be read."""


class Sink(Protocol):
    """Where an answer is poured."""

    def begin(self, answer: LegAnswer) -> bool:
        """The head is in: whether this answer is for here."""

    def take(self, piece: bytes, *, last: bool) -> None:
        """One more piece. `last`: `finish` follows at once, without an error."""

    def take_chunk(self, chunk: bytes, piece: bytes) -> None:
        """One more piece: a whole chunk as it came, and what is in it."""

    def finish(self, error: BrokenOff | None) -> None:
        """It is complete, or has broken off. Once."""


class LegAnswer:
    """An answer whose head is in. Its body is read whole, by pieces, or poured."""

    def __init__(self, connection: LegConnection, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._pieces: list[bytes] = []
        self._held = 0
        self.complete = False
        """All of it is in."""
        self._error: BrokenOff | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.sink: Sink | None = None
        """Where it is poured."""

    @property
    def content_type(self) -> str:
        """Without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def readany(self) -> bytes:
        """What is in; empty at the end. Raises BrokenOff."""
        if not self._pieces and not self.complete:
            await self._news()
        return self._taken()

    async def read(self) -> bytes:
        """All that is left of it. Raises BrokenOff."""
        if self.complete:
            return self._taken()
        pieces = []
        while piece := await self.readany():
            pieces.append(piece)
        return b"".join(pieces)

    def pour(self, sink: Sink) -> None:
        """Give the sink each piece as it comes, the first one included, without a task being woken."""
        self.sink = sink

    def flow(self, room: bool) -> None:
        """Whether the sink has room."""
        if room:
            self._connection.resume()
        else:
            self._connection.pause()

    def stop(self) -> None:
        """Pour no more."""
        self.sink = None

    # ---- the connection's word ----

    def feed(self, piece: bytes, *, last: bool) -> None:
        """A piece has come in. `last`: it has the answer's end, and `end` follows at once."""
        if self.sink is not None:
            self.sink.take(piece, last=last)
            return
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held > MAX_HELD_BYTES:
            self._connection.pause()
        self._wake()

    def end(self, error: BrokenOff | None) -> None:
        """It is complete, or has broken off."""
        if self.complete or self._error is not None:
            return
        self.complete, self._error = error is None, error
        if self.sink is not None:
            self.sink.finish(error)
        self._wake()

    def _taken(self) -> bytes:
        if self._held > MAX_HELD_BYTES:
            self._connection.resume()
        pieces, self._pieces, self._held = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        if not self._pieces and self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LegConnection(asyncio.Protocol):
    """Speaks HTTP/1.1 with an engine, one request at a time."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[LegAnswer] | None = None
        """Of the request under way."""
        self._answer: LegAnswer | None = None
        self._sink: Sink | None = None
        """Of the answer, if it is a stream."""
        self._unsent: memoryview | None = None
        """The body of the request under way, as long as not all of it is sent."""
        self._pairs: Pairs = []
        self._in_head = True
        self._unused_bytes = 0
        """What has come in since the last head or part of a body: of a head, or of what is around chunks."""
        self._interim = False
        """The head was that of a 1xx, which the answer follows."""
        self._problem: str | None = None
        self._keep_alive = True
        self._body: list[bytes] = []
        self._chunk_over = False
        """The parser has come to a chunk's end, and to no other chunk's beginning."""
        self._between = False
        """All that has come in ends with a chunk's end, and the answer goes on."""
        self._room: asyncio.Future[None] | None = None

    # ---- for its client ----

    @property
    def usable(self) -> bool:
        """Whether another request may be sent: the last one is out, its answer complete, and the connection
        open."""
        if self._unsent is not None:
            return False
        answered = self._head is None or (self._answer is not None and self._answer.complete)
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and answered and self._keep_alive and self._parser is not None

    def ask(self, head: bytes, body: bytes) -> None:
        """Send a request; of a long one the body follows while `answered` is waited for."""
        self._head = self._loop.create_future()
        if self._transport is None:
            self._broken("the connection has ended")
        elif len(body) <= _SLICE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._unsent = memoryview(body)

    async def answered(self, sink: Sink | None = None) -> LegAnswer:
        """The answer, when its head is in; it is poured if the sink wants it. Raises BrokenOff."""
        answered = self._head
        assert answered is not None
        self._sink = sink
        if self._unsent is not None:
            await self._send(self._unsent, answered)
        return await answered

    def drop(self) -> None:
        """End the connection at once, and with it what it asked for."""
        self._broken("it was given up")
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read no more for now."""
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    async def _send(self, body: memoryview, answered: asyncio.Future[LegAnswer]) -> None:
        """A large body goes in pieces, as the engine takes them: as one block it would hold up the loop."""
        for start in range(0, len(body), _SLICE):
            if self._transport is None or answered.done():
                return  # it has answered without wanting all, and waits for the rest
            self._transport.write(body[start : start + _SLICE])
            if self._room is not None:
                await asyncio.wait((self._room, answered), return_when=asyncio.FIRST_COMPLETED)
        self._unsent = None

    # ---- the transport's word ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._parser = None
        self.resume_writing()
        why = f": {error}" if error is not None and str(error) else ""
        self._broken(f"the connection ended before the answer was complete{why}")

    def eof_received(self) -> bool:
        self._keep_alive = False
        return False

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if self._between and answer is not None and answer.sink is not None:
            # The parser need not see a whole chunk: it is between two of them before and after.
            piece = whole_chunk(data)
            if piece is not None:
                answer.sink.take_chunk(data, piece)
                return
        self._parse(data)
        # A line end alone would not do: it may be that of the next chunk's size.
        self._between = self._chunk_over and data.endswith(b"\r\n") and not self._ended

    def _parse(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            return
        if self._head is None or (self._answer is not None and self._answer.complete):
            self._unwanted("it sends what nobody has asked for")
            return
        self._unused_bytes += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._problem = self._problem or f"its answer is not HTTP/1.1 ({str(error)[:200]})"
        answer = self._answer
        if answer is not None and self._body:
            piece = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body = []
            answer.feed(piece, last=self._ended and self._problem is None)
        if self._unused_bytes > 2 * MAX_HEAD_BYTES:
            part = "head" if self._in_head else "trailer"
            self._problem = self._problem or f"the {part} of its answer is too long"
        if self._problem is not None:
            self._unwanted(self._problem)
        elif self._ended and answer is not None:
            answer.end(None)

    # ---- the parser's word ----

    _ended = False

    def on_message_begin(self) -> None:
        if self._ended:
            self._problem = self._problem or "it sends more than one answer"
        self._in_head, self._pairs = True, []

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._pairs.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head, self._unused_bytes = False, 0
        parser, head = self._parser, self._head
        if self._problem is not None or parser is None or head is None:
            return
        status = parser.get_status_code()
        self._interim = 100 <= status < 200
        if self._interim:
            if status == 101:
                self._problem = "it changes to another protocol"
            return
        try:
            check_response(parser.get_http_version(), status, self._pairs)
        except BadFraming as refusal:
            self._problem = str(refusal)
            return
        self._keep_alive = parser.should_keep_alive()
        self._answer = answer = LegAnswer(self, status, Headers(self._pairs))
        if not head.done():  # else whoever has asked has gone
            if self._sink is not None and self._sink.begin(answer):
                answer.pour(self._sink)
            head.set_result(answer)

    def on_chunk_header(self) -> None:
        self._chunk_over = False

    def on_body(self, piece: bytes) -> None:
        self._unused_bytes = 0
        if self._problem is None:
            self._body.append(piece)

    def on_chunk_complete(self) -> None:
        self._chunk_over = True

    def on_message_complete(self) -> None:
        self._in_head, self._unused_bytes = True, 0
        self._ended = not self._interim

    def rest(self) -> None:
        """It waits for another request."""
        self._head = self._answer = self._sink = None
        self._ended = self._chunk_over = False
        self.resume()
        self.idle_since = self._loop.time()

    def _unwanted(self, why: str) -> None:
        self._parser, self._chunk_over = None, False
        self._broken(why)
        if self._transport is not None:
            self._transport.abort()

    def _broken(self, why: str) -> None:
        error = BrokenOff(why)
        if self._answer is not None:
            self._answer.end(error)
        elif self._head is not None and not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # whoever asked may have gone


_SLICE = 1 << 20
"""Bytes of a body that are written at once."""
