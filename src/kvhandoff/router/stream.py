"""A decode engine's stream on its way to the client: byte for byte, piece by piece, unbuffered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import aiohttp
import msgspec
from aiohttp import web

from kvhandoff.core.errors import RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.engine import describe
from kvhandoff.web import CLIENT_LEFT, ClientGone

BROKEN_OFF = 502
"""The status in records and metrics of a stream that broke off; its client has seen a 200, and then an error
event or a cut connection."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def has_content(self) -> bool:
        delta = self.delta or _Delta()
        parts = (
            self.text,
            delta.content,
            delta.reasoning_content,
            delta.reasoning,
            delta.refusal,
            delta.tool_calls,
        )
        return any(parts)


class _Event(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []

    def has_content(self) -> bool:
        return any(choice.has_content() for choice in self.choices)


class _ResponseEvent(msgspec.Struct):
    """Of `/v1/responses`: text, reasoning, a refusal or a call's arguments come as deltas."""

    type: str
    delta: str = ""

    def has_content(self) -> bool:
        return self.type.endswith(".delta") and bool(self.delta)


_event = msgspec.json.Decoder(_Event)
_response_event = msgspec.json.Decoder(_ResponseEvent)
_LONGEST_LINE = 2**20
"""Bytes; a line without an end by then is not waited for."""


class FirstContent:
    """Finds the first event with content in a stream of events, whatever pieces its bytes come in.

    A chunk with only a role, or with an empty text, is no content (field case 58).
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.found = False
        self.response_id: str | None = None
        """The `id` of the first event that has one."""
        self._rest = b""
        self._of_response = endpoint is Endpoint.RESPONSES

    def feed(self, piece: bytes) -> bool:
        """Whether content has been found, in this piece or before."""
        if not self.found:
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self.found = any(map(self._has_content, lines)) or len(self._rest) > _LONGEST_LINE
        return self.found

    def _has_content(self, line: bytes) -> bool:
        if not line.startswith(b"data:"):
            return False
        try:
            if self._of_response:
                return _response_event.decode(line[5:]).has_content()
            event = _event.decode(line[5:])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False  # [DONE], or something that only the client may know
        self.response_id = self.response_id or event.id
        return event.has_content()


class LastEvent:
    """Finds the event that says that the answer is whole, at the end of what has been fed.

    It is `[DONE]`, or, of `/v1/responses`, an event whose name says so; its data is the whole response.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._marks = _RESPONSE_ENDS if endpoint is Endpoint.RESPONSES else (_DONE,)
        self._keep = max(map(len, self._marks)) - 1
        self._begun = False
        self.tail = b""

    @property
    def complete(self) -> bool:
        """Whether the last event has been fed, all of it."""
        return self._begun and self.tail.endswith(_EVENT_END)

    def feed(self, piece: bytes) -> bool:
        """`complete`, after this piece."""
        if not self._begun:
            seen = self.tail + piece
            self._begun = any(mark in seen for mark in self._marks)
        self.tail = (self.tail + piece[-self._keep :])[-self._keep :]
        return self.complete


_EVENT_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_RESPONSE_ENDS = tuple(
    b"\nevent: response.%s\n" % name for name in (b"completed", b"incomplete", b"failed")
)  # JSON has no line ends inside its texts, so that these are no part of an answer


class Passage:
    """Carries one stream from `engine` (its name for the client) to a client: `carry` it, then `end` it.

    `on_byte` is called when the first piece has been written, `on_content` when the first content has (or at
    the end of a stream without any), `on_done` when the client has been sent the last event: what it does
    from then on is no leaving.
    """

    def __init__(
        self,
        request: web.Request,
        endpoint: Endpoint,
        engine: str,
        headers: Mapping[str, str],
        on_byte: Callable[[], None],
        on_content: Callable[[], None],
        on_done: Callable[[], None],
    ) -> None:
        self.response = web.StreamResponse(headers=headers)
        self.status = CLIENT_LEFT
        """Of the record: 200, BROKEN_OFF or CLIENT_LEFT."""
        self.broken: str | None = None
        """Why the engine's stream broke off, in the network's words: for the log."""
        self.scan = FirstContent(endpoint)
        self._request = request
        self._endpoint = endpoint
        self._engine = engine
        self._why = ""
        """As `broken`, in words for the client."""
        self._on_byte = on_byte
        self._on_content = on_content
        self._on_done = on_done
        self._writing = False
        self._last = LastEvent(endpoint)

    async def carry(self, first: bytes, content: aiohttp.StreamReader, idle_s: float) -> None:
        """Write `first` and all of `content` to the client.

        `idle_s` bounds the wait for each piece and for the client to take it, in seconds.
        """
        try:
            async with asyncio.timeout(idle_s) as idle:
                await self._carry_on(first, content, idle, idle_s)
        except ClientGone:
            self.status = 200 if self._last.complete else CLIENT_LEFT
        except (aiohttp.ClientError, OSError) as error:
            if not self._writing:  # else it is the client that holds it up
                self.status, self.broken = BROKEN_OFF, describe(error)
                silent = isinstance(error, TimeoutError)
                what = f"sent nothing for {idle_s:g} s" if silent else "ended"
                self._why = f"{self._engine} {what} before its answer was complete"
        else:
            self.status = 200

    async def end(self, idle_s: float) -> web.StreamResponse:
        """End the response, properly or so that the client can't take it for whole.

        A broken stream ends with an error event between two events. In the middle of one, that could not be
        told from the text, so the connection is cut. So it is for a client that doesn't read.
        """
        try:
            async with asyncio.timeout(idle_s):
                if self.broken is not None and self._last.tail.endswith(_EVENT_END):
                    error = RequestError(
                        self._why, status=502, code=Reason.DECODE_FAILED, kind="engine_error"
                    )
                    name = b"event: error\n" if self._endpoint is Endpoint.RESPONSES else b""
                    await self._write(name + b"data: " + msgspec.json.encode(error.body()) + _EVENT_END)
                elif self.status != 200:
                    self._cut()
                    return self.response
                await self.response.write_eof()
        except (ClientGone, OSError):
            self._cut()
        return self.response

    async def _carry_on(
        self, first: bytes, content: aiohttp.StreamReader, idle: asyncio.Timeout, idle_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        scan = self.scan
        await self._write(first)
        self._on_byte()
        piece = first
        while piece:
            if not scan.found and scan.feed(piece):
                self._on_content()
            piece = await content.readany()
            idle.reschedule(loop.time() + idle_s)
            await self._write(piece)
        if not scan.found:
            self._on_content()

    async def _write(self, piece: bytes) -> None:
        self._writing = True
        try:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(piece)
        except ConnectionError as error:
            raise ClientGone from error
        self._writing = False
        if self._last.feed(piece):
            self._on_done()

    def _cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
