"""Finding the first content (field case 58), however the bytes are cut (field case 35)."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.router import wire
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.stream import BROKEN_OFF, FirstContent, LastEvent, Passage
from kvhandoff.router.wire.ending import cut_off
from kvhandoff.web import CLIENT_LEFT

CHAT = Endpoint.CHAT

ROLE = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = 'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"日"}}]}\n\n'.encode()


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (ROLE, False),
        (TEXT, True),
        (b'data: {"choices":[{"delta":{"content":null}}]}\n\n', False),
        (b'data: {"choices":[{"delta":{}}]}\n\n', False),
        (b'data: {"choices":[{"text":""}]}\n\n', False),
        (b'data: {"choices":[{"text":"a"}]}\n\n', True),
        (b'data:{"choices":[{"text":"a"}]}\r\n\r\n', True),
        (b'data: {"choices":[{"text":""},{"text":"b"}]}\n\n', True),
        (b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n', True),
        (b'data: {"choices":[{"delta":{"reasoning":"hm"}}]}\n\n', True),
        (b'data: {"choices":[{"delta":{"refusal":"no"}}]}\n\n', True),
        (b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n', True),
        (b'data: {"choices":[{"delta":{"tool_calls":[]}}]}\n\n', False),
        (b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n', False),
        (b'data: {"error":{"message":"x"}}\n\n', False),
        (b"data: [DONE]\n\n", False),
        (b"data: {broken\n\n", False),
        (b'data: {"choices":[{"text":5}]}\n\n', False),
        (b': {"choices":[{"text":"a"}]}\n\n', False),
        (b"event: x\n\n", False),
        (b'data: {"choices":[{"text":"a"}]}', False),  # not whole yet
    ],
)
def test_event(event: bytes, found: bool) -> None:
    assert FirstContent(CHAT).feed(event) is found


@given(st.lists(st.integers(0, len(ROLE) + len(TEXT)), max_size=12))
def test_any_cut(cuts: list[int]) -> None:
    raw = ROLE + TEXT
    edges = [0, *sorted(cuts), len(raw)]
    scan = FirstContent(CHAT)
    for start, end in pairwise(edges):
        # Found with the end of the line that holds it, and not a byte before.
        assert scan.feed(raw[start:end]) is (end >= len(raw) - 1)
    assert scan.found
    assert scan.response_id == "chatcmpl-1"


class Loop:
    """A clock that a test turns, and the alarms that were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alarms: list[tuple[float, Any]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Any) -> Any:
        self.alarms.append((when, callback))
        return self

    def call_later(self, seconds: float, callback: Any) -> Any:
        return self.call_at(self.now + seconds, callback)

    def cancel(self) -> None:
        """Of an alarm."""


class Answer:
    """Of an engine, poured by the test."""

    def __init__(self, status: int = 200, content_type: str = "text/event-stream") -> None:
        self.status = status
        self.content_type = content_type
        self.headers = {"Content-Type": f"{content_type}; charset=utf-8", "Server": "engine"}
        self.flows: list[bool] = []

    def flow(self, room: bool) -> None:
        self.flows.append(room)

    def stop(self) -> None:
        """The passage wants no more."""


class Response:
    on_flow: Any = None
    written = b""
    full = False

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def prepare(self, request: Any) -> None:
        """It is."""

    def write(self, piece: bytes, *, last: bool = False) -> None:
        self.written += piece

    def write_chunk(self, chunk: bytes, piece: bytes) -> None:
        assert chunk == b"<" + piece + b">"
        self.written += chunk


def made(idle_s: float, *calls: Any) -> Any:
    """A passage whose engine has been asked. `calls`: on its first byte, first content and last event."""
    request: Any = None
    calls = calls or (lambda: None, lambda: None, lambda: None)
    passage: Any = Passage(request, CHAT, "decode engine d", {}, idle_s, *calls)
    passage.response, passage._loop = Response(), Loop()
    return passage


async def passing(idle_s: float) -> tuple[Any, Any, Any, asyncio.Task[None]]:
    """A passage under way that has written "a", its clock, its engine's answer, and its task."""
    passage, answer = made(idle_s), Answer()
    assert passage.begin(answer)
    passage.take(b"a", last=False)
    task = asyncio.create_task(passage.carry())
    await asyncio.sleep(0)
    return passage, passage._loop, answer, task


async def test_chunks() -> None:
    """They go on as they came; the first piece of a stream is framed with its head."""
    heard: list[str] = []
    passage = made(5.0, *(lambda what=what: heard.append(what) for what in ("byte", "content", "done")))
    assert passage.begin(Answer())
    passage.take_chunk(b"<" + ROLE + b">", ROLE)
    assert (passage.response.written, heard) == (ROLE, ["byte"])
    passage.take_chunk(b"<" + TEXT + b">", TEXT)
    assert (passage.response.written, heard) == (ROLE + b"<" + TEXT + b">", ["byte", "content"])
    done, before = b"data: [DONE]\n\n", passage.response.written
    passage.take_chunk(b"<" + done + b">", done)
    assert (passage.response.written, heard[2:]) == (before + b"<" + done + b">", ["done"])
    passage.finish(None)
    passage.take_chunk(b"<x>", b"x")
    assert passage.response.written.endswith(b"]\n\n>")
    await passage.carry()
    assert passage.status == 200


async def test_the_first_piece_is_written_as_it_comes() -> None:
    """With the headers of the engine's that matter, and before anybody hears of it."""
    heard: list[tuple[str, bytes]] = []

    def hear(what: str) -> Any:
        return lambda: heard.append((what, passage.response.written))

    passage = made(5.0, hear("byte"), hear("content"), hear("done"))
    assert not passage.open
    assert passage.begin(Answer())
    assert passage.open
    assert passage.response.headers == {"Content-Type": "text/event-stream; charset=utf-8"}
    assert heard == []
    passage.take(TEXT, last=False)
    passage.take(b"data: [DONE]\n\n", last=True)
    done = TEXT + b"data: [DONE]\n\n"
    assert heard == [("byte", TEXT), ("content", TEXT), ("done", done)]
    passage.finish(None)
    await passage.carry()
    assert passage.status == 200


@pytest.mark.parametrize("answer", [Answer(status=503), Answer(content_type="application/json")])
async def test_what_is_no_stream_does_not_come_this_way(answer: Any) -> None:
    passage = made(5.0)
    assert not passage.begin(answer)
    assert not passage.open


@pytest.mark.parametrize("error", [wire.BrokenOff("reset"), None])
async def test_a_stream_that_ends_before_its_first_piece(error: wire.BrokenOff | None) -> None:
    """Another attempt may do better: the client has seen nothing."""
    passage = made(5.0)
    assert passage.begin(Answer())
    passage.finish(error)
    with pytest.raises(wire.BrokenOff, match="reset" if error else "before the first byte"):
        await passage.carry()
    assert passage.response.written == b""


async def test_a_leg_that_is_given_up_writes_nothing() -> None:
    """Its head and its first piece come when it is as good as cancelled: the next attempt's may be the
    client's."""
    passage: Any = None
    head: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def leg() -> None:
        nonlocal passage
        passage = made(5.0)
        await head
        await passage.carry()

    task = asyncio.create_task(leg())
    await asyncio.sleep(0)
    assert passage.begin(Answer())
    head.set_result(None)
    task.cancel()
    passage.take(b"a", last=False)
    assert passage.response.written == b""
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("ends", ["broken", "silent"])
async def test_after_the_last_event_nothing_is_missing(ends: str) -> None:
    """The engine's connection may end badly then: the client has the whole answer."""
    passage, loop, _, task = await passing(5.0)
    passage.take(b"data: [DONE]\n\n", last=False)
    if ends == "broken":
        passage.finish(wire.BrokenOff("reset"))
    else:
        loop.now = 5.0
        loop.alarms.pop()[1]()
    await task
    assert (passage.status, passage.error, passage.broken) == (200, None, None)


async def test_a_client_that_takes_too_little_from_the_start() -> None:
    """Of an answer before this one, on the same connection: the engine is held up at once."""
    passage, answer = made(5.0), Answer()
    assert passage.begin(answer)
    passage.response.full = True
    passage.take(b"a", last=False)
    assert answer.flows == [False]
    passage.response.on_flow(True)
    assert answer.flows == [False, True]


async def test_a_stream_that_ends_as_the_router_does() -> None:
    """It has just ended by itself: there is nothing to cut off."""
    passage, _, _, task = await passing(5.0)
    passage.finish(None)
    cut_off(task)
    await task
    assert (passage.status, passage.error) == (200, None)


async def test_the_wait_for_the_first_piece_is_not_the_passage_s() -> None:
    passage = made(5.0)
    assert passage.begin(Answer())
    task = asyncio.create_task(passage.carry())
    await asyncio.sleep(0)
    for passage._loop.now in (5.0, 10.0):
        passage._loop.alarms.pop()[1]()
        await asyncio.sleep(0)
        assert not task.done()
    passage.take(b"a", last=False)
    passage._loop.now = 15.0
    passage._loop.alarms.pop()[1]()
    await task
    assert passage.status == BROKEN_OFF


async def test_every_piece_moves_the_deadline() -> None:
    """A long stream is bounded between its pieces, not as a whole."""
    passage, loop, _, task = await passing(5.0)
    for loop.now, piece in ((4.0, b"b"), (8.0, b"c")):
        passage.take(piece, last=False)
    when, look = loop.alarms.pop()
    assert when == 5.0
    look()
    assert not task.done()
    assert [when for when, _ in loop.alarms] == [13.0]
    loop.now = 13.0
    loop.alarms.pop()[1]()
    await task
    assert (passage.status, passage.response.written) == (BROKEN_OFF, b"abc")
    assert passage.error.message == "decode engine d sent nothing for 5 s before its answer was complete"


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    """It holds its engine up meanwhile, and is not the engine's failure."""
    passage, loop, answer, task = await passing(5.0)
    loop.now = 4.0
    passage.response.on_flow(False)
    assert answer.flows == [False]
    loop.now = 5.0
    loop.alarms.pop()[1]()
    assert not task.done(), "it has 5 s from when it took its last"
    loop.now = 9.0
    loop.alarms.pop()[1]()
    await task
    assert (passage.status, passage.broken) == (CLIENT_LEFT, None)


async def test_a_client_that_takes_some_again() -> None:
    passage, loop, answer, task = await passing(5.0)
    passage.response.on_flow(False)
    loop.now = 4.0
    passage.response.on_flow(True)
    assert answer.flows == [False, True]
    loop.now = 8.0
    loop.alarms.pop()[1]()
    assert not task.done()
    passage.finish(None)
    await task
    assert passage.status == 200


def test_a_line_without_end_is_not_collected_for_ever() -> None:
    scan = FirstContent(CHAT)
    fed = 0
    while not scan.feed(b"x" * 2**16):
        fed += 2**16
        assert fed <= 2**20


def delta(kind: str, text: object) -> bytes:
    return b"event: x\ndata: " + msgspec.json.encode({"type": kind, "delta": text}) + b"\n\n"


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (delta("response.output_text.delta", "a"), True),
        (delta("response.output_text.delta", ""), False),
        (delta("response.reasoning_text.delta", "hm"), True),
        (delta("response.function_call_arguments.delta", "{"), True),
        (delta("response.output_text.done", "a"), False),
        (b'data: {"type":"response.created","response":{"id":"r"}}\n\n', False),
        (b'data: {"type":"response.output_text.delta"}\n\n', False),
        (delta("response.output_text.delta", {"a": 1}), False),
        (TEXT, False),
    ],
)
def test_event_of_a_response(event: bytes, found: bool) -> None:
    assert FirstContent(Endpoint.RESPONSES).feed(event) is found


COMPLETED = b'event: response.completed\ndata: {"type":"response.completed","response":{"a":"\\n\\n"}}\n\n'


@pytest.mark.parametrize(
    ("endpoint", "raw", "ends"),
    [
        (CHAT, TEXT + b"data: [DONE]\n\n", True),
        (Endpoint.RESPONSES, delta("response.output_text.delta", "a") + COMPLETED, True),
        (Endpoint.RESPONSES, delta("a", "b") + COMPLETED.replace(b"completed", b"incomplete"), True),
        (Endpoint.RESPONSES, delta("a", "b") + COMPLETED.replace(b"completed", b"failed"), True),
        (CHAT, TEXT + TEXT, False),
        (CHAT, delta("a", "b") + COMPLETED, False),
        # An answer that spells it out.
        (Endpoint.RESPONSES, delta("a", "\nevent: response.completed\n"), False),
        (CHAT, delta("a", "data: [DONE]\n\n"), False),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_last_event(endpoint: Endpoint, raw: bytes, ends: bool, cuts: list[int]) -> None:
    """Found with its last byte, wherever the bytes are cut, and in no answer's text."""
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    last = LastEvent(endpoint)
    for start, end in pairwise(edges):
        assert last.feed(raw[start:end]) is (ends and end == len(raw))
