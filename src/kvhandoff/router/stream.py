"""A decode engine's stream on its way to the client: byte for byte, piece by piece, unbuffered.

Pieces go from the one connection to the other as they come, without a task being woken for them: `Passage` is
called by the leg's connection, and writes to the client's. It looks into them for two things only: the first
content, for the record of the request, and the last event, for whether a client that leaves has had it all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from kvhandoff.core.errors import RequestError, describe, unavailable
from kvhandoff.core.reasons import Reason
from kvhandoff.router import wire
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.web import CLIENT_LEFT, ClientGone

BROKEN_OFF = 502
"""The status in records and metrics of a stream that broke off; its client has seen a 200, and then an error
event or a cut connection."""


EVENT_STREAM = "text/event-stream"
_KEPT_HEADERS = ("Content-Type", "Cache-Control")
"""Of an engine's stream, for the client."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    def has_content(self) -> bool:
        return bool(
            self.content or self.reasoning_content or self.reasoning or self.refusal or self.tool_calls
        )


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def has_content(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_content())


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

    It is `[DONE]`, or, of `/v1/responses`, an event whose name says so; its data is the whole response. Lines
    end as vLLM writes them, with LF.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        of_response = endpoint is Endpoint.RESPONSES
        self._marks, self._keep = _RESPONSE_ENDS if of_response else _CHAT_ENDS
        self._other = None if of_response else b"}\n\n"
        """How a piece ends that ends with an event which is not the last."""
        self._begun = False
        self.tail = b""

    @property
    def complete(self) -> bool:
        """Whether the last event has been fed, all of it."""
        return self._begun and self.tail.endswith(_EVENT_END)

    def feed(self, piece: bytes) -> bool:
        """`complete`, after this piece."""
        if self._other is not None and piece.endswith(self._other):  # nearly all, and this takes no time
            self.tail = _EVENT_END
            return False
        seen = self.tail + piece
        for mark in self._marks:
            if mark in seen:
                self._begun = True
        self.tail = seen[-self._keep :]
        return self._begun and self.complete


_EVENT_END = b"\n\n"


def _ends(*marks: bytes) -> tuple[tuple[bytes, ...], int]:
    """The marks, and how many bytes one of them may have begun with in the piece before."""
    return marks, max(map(len, marks)) - 1


_CHAT_ENDS = _ends(b"data: [DONE]\n\n")
_RESPONSE_ENDS = _ends(
    *(b"\nevent: response.%s\n" % name for name in (b"completed", b"incomplete", b"failed"))
)  # JSON has no line ends inside its texts, so that these are no part of an answer


def shutting_down() -> RequestError:
    """What a client is told whose request is cut off since the router ends."""
    return unavailable("the router ended before the answer was complete; try again", code=Reason.SHUTDOWN)


class Passage:
    """Carries one stream from `engine` (its name for the client) to a client: made when the engine is asked,
    it is the sink of its answer; then `carry` it, and `end` it.

    `on_byte` is called when the first piece has been written, `on_content` when the first content has (or at
    the end of a stream without any), `on_done` when the client has been sent the last event: what it does
    from then on is no leaving. `idle_s` bounds the wait for each piece but the first, and for the client to
    take it, in seconds.
    """

    def __init__(
        self,
        request: wire.Request,
        endpoint: Endpoint,
        engine: str,
        headers: Mapping[str, str],
        idle_s: float,
        on_byte: Callable[[], None],
        on_content: Callable[[], None],
        on_done: Callable[[], None],
    ) -> None:
        self.response = wire.StreamResponse(headers)
        self.status = CLIENT_LEFT
        """Of the record: 200, BROKEN_OFF, CLIENT_LEFT, or that of `shutting_down`."""
        self.broken: str | None = None
        """Why the stream broke off, in the network's words: for the log."""
        self.error: RequestError | None = None
        """As `broken`, in words for the client."""
        self.reason = Reason.DECODE_FAILED
        """Of a stream that broke off."""
        self.scan = FirstContent(endpoint)
        self._request = request
        self._endpoint = endpoint
        self._engine = engine
        self._idle_s = idle_s
        self._on_byte = on_byte
        self._on_content = on_content
        self._on_done = on_done
        self._last = LastEvent(endpoint)
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancels = task, task.cancelling()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._answer: wire.LegAnswer | None = None
        self._begun = False
        """The client has been sent the first piece."""
        self._too_soon: wire.BrokenOff | None = None
        """How the stream ended before that."""
        self._moved = 0.0
        """When the last piece came, or the client took some again."""
        self._full = False
        """The client takes too little."""
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """The engine's answer is a stream, and comes this way."""
        return self._answer is not None

    async def carry(self) -> None:
        """Until the stream is over. Raises BrokenOff when it ends before its first piece: the client has been
        sent nothing."""
        try:
            if not self._over.done():
                self._alarm = self._loop.call_later(self._idle_s, self._look)
                await self._over
        except asyncio.CancelledError as error:
            if not self._begun or not wire.is_cut_off(error):
                raise
            if self._over.cancelled():  # else it has just ended by itself
                self._cut_off()
        finally:
            self.response.on_flow = None
            if self._answer is not None:
                self._answer.stop()
            if self._alarm is not None:
                self._alarm.cancel()
        if self._too_soon is not None:
            raise self._too_soon

    async def end(self) -> wire.StreamResponse:
        """End the response, properly or so that the client can't take it for whole.

        A broken stream ends with an error event between two events. In the middle of one, that could not be
        told from the text, so the connection is cut. So it is for a client that doesn't read.
        """
        try:
            if self.error is not None and self._last.tail.endswith(_EVENT_END):
                name = b"event: error\n" if self._endpoint is Endpoint.RESPONSES else b""
                self.response.write(name + b"data: " + msgspec.json.encode(self.error.body()) + _EVENT_END)
            elif self.status != 200:
                self.response.cut()
                return self.response
            if not self.response.ended:
                self.response.write_eof()
            if self.response.full:
                async with asyncio.timeout(self._idle_s):
                    await self.response.drained()
        except (ClientGone, TimeoutError):
            self.response.cut()
        return self.response

    # ---- the leg's word ----

    def begin(self, answer: wire.LegAnswer) -> bool:
        """The head is in; what is no stream is nothing for here."""
        if answer.status != 200 or answer.content_type != EVENT_STREAM:
            return False
        self._answer = answer
        for name in _KEPT_HEADERS:
            value = answer.headers.get(name)
            if value is not None:
                self.response.headers[name] = value
        return True

    def take(self, piece: bytes, *, last: bool) -> None:
        """One more piece of the engine's; the end of a complete stream goes out with its last one."""
        if self._over.done():
            return
        try:
            if self._begun:
                self.response.write(piece, last=last)
            elif self._task.cancelling() > self._cancels:
                return  # the leg has been given up: another one may answer
            else:
                self._write_first(piece, last=last)
        except ClientGone:
            self._left()
            self._done()
        else:
            self._seen(piece)

    def take_chunk(self, chunk: bytes, piece: bytes) -> None:
        """One more piece, and the chunk it is in, which goes on as it came."""
        if not self._begun or self._over.done():
            self.take(piece, last=False)
            return
        try:
            self.response.write_chunk(chunk, piece)
        except ClientGone:
            self._left()
            self._done()
        else:
            self._seen(piece)

    def _write_first(self, piece: bytes, *, last: bool) -> None:
        self._begun = True
        self.response.on_flow = self._flow
        self.response.prepare(self._request)
        self.response.write(piece, last=last)
        self._on_byte()
        if self.response.full:  # of what came before it on the client's connection, most likely
            self._flow(room=False)

    def finish(self, error: wire.BrokenOff | None) -> None:
        """The engine's stream is complete, or has broken off."""
        if self._over.done():
            return
        if not self._begun:
            self._too_soon = error or wire.BrokenOff("its stream has ended before the first byte")
        elif error is not None and not self._last.complete:
            self._break(describe(error), "ended")
        else:  # whole, even if the engine's connection was no more after the last event
            self.status = 200
            if not self.scan.found:
                self._on_content()
        self._done()

    def _seen(self, piece: bytes) -> None:
        self._moved = self._loop.time()
        if self._last.feed(piece):
            self._on_done()
        if not self.scan.found and self.scan.feed(piece):
            self._on_content()

    # ---- waiting ----

    def _flow(self, room: bool) -> None:
        """The client takes too little, or enough again: the engine is held up meanwhile."""
        self._full = not room
        self._moved = self._loop.time()
        if self._answer is not None:
            self._answer.flow(room)

    def _look(self) -> None:
        """Whether anything has moved for so long; one timer for a stream, not one for a piece."""
        now = self._loop.time()
        due = (self._moved if self._begun else now) + self._idle_s
        if now < due:
            self._alarm = self._loop.call_at(due, self._look)
            return
        if self._full or self._last.complete:
            self._left()
        else:
            self._break("TimeoutError", f"sent nothing for {self._idle_s:g} s")
        self._done()

    def _left(self) -> None:
        self.status = 200 if self._last.complete else CLIENT_LEFT

    def _break(self, broken: str, what: str) -> None:
        self.status, self.broken = BROKEN_OFF, broken
        why = f"{self._engine} {what} before its answer was complete"
        self.error = RequestError(why, status=BROKEN_OFF, code=Reason.DECODE_FAILED, kind="engine_error")

    def _cut_off(self) -> None:
        """The router ends; the client is still there."""
        if self._last.complete:
            self.status = 200
            return
        self.error, self.reason = shutting_down(), Reason.SHUTDOWN
        self.status, self.broken = self.error.status, "the router ends"

    def _done(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
