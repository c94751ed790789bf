"""Finding the first content (field case 58), however the bytes are cut (field case 35)."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.stream import FirstContent, LastEvent, Passage

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


@settings(deadline=None)  # the machine may be busy
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


async def test_every_piece_moves_the_deadline() -> None:
    """A long stream is bounded between its pieces, not as a whole."""
    moved: list[float] = []

    class Idle:
        def reschedule(self, when: float) -> None:
            moved.append(when)

    class Content:
        pieces: ClassVar = [b"b", b"c", b""]

        async def readany(self) -> bytes:
            return self.pieces.pop(0)

    class Response:
        prepared = True
        written = b""

        async def write(self, piece: bytes) -> None:
            self.written += piece

    fake: Any = Response()
    idle: Any = Idle()
    content: Any = Content()
    request: Any = None
    passage = Passage(request, CHAT, "decode engine d", {}, lambda: None, lambda: None, lambda: None)
    passage.response = fake
    await passage._carry_on(b"a", content, idle, 5.0)
    assert fake.written == b"abc"
    assert len(moved) == 3
    assert moved == sorted(moved)
    assert all(abs(when - asyncio.get_running_loop().time() - 5.0) < 5.0 for when in moved)


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
@settings(deadline=None)  # the machine may be busy
def test_last_event(endpoint: Endpoint, raw: bytes, ends: bool, cuts: list[int]) -> None:
    """Found with its last byte, wherever the bytes are cut, and in no answer's text."""
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    last = LastEvent(endpoint)
    for start, end in pairwise(edges):
        assert last.feed(raw[start:end]) is (ends and end == len(raw))
