"""Transports without a network, and sites without a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from kvhandoff.router.wire import Request, Response, Site, StreamResponse, get, post, read_body
from kvhandoff.router.wire.server import Server

LIMIT = 10_000
"""Bytes of a body that sites take."""


class Wire(asyncio.Transport):
    """A transport that writes down."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self.protocol: Any = protocol
        self.written = bytearray()
        self.reading = True
        self.end = ""
        """How it was ended: `eof`, `close` or `abort`; empty while it is open."""
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        assert not self.is_closing()
        self.written += data

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_closing(self) -> bool:
        return self.end in ("close", "abort")

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.end = "eof"

    def close(self) -> None:
        self._ended("close")

    def abort(self) -> None:
        self._ended("abort")

    def _ended(self, how: str) -> None:
        if not self.is_closing():
            self.end = how
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    async def feed(self, pieces: Iterable[bytes]) -> None:
        """These have come in; none while reading is paused. Raises TimeoutError when that has no end."""
        for piece in pieces:
            for _ in range(1000):
                if self.reading or self.is_closing():
                    break
                await asyncio.sleep(0)
            else:
                raise TimeoutError("it reads no more")
            if self.is_closing():
                return
            if piece:
                self.protocol.data_received(piece)
        await quiet()


async def quiet() -> None:
    """Until everything that is ready has run."""
    for _ in range(30):
        await asyncio.sleep(0)


def cut(raw: bytes, cuts: Iterable[int]) -> list[bytes]:
    """In pieces."""
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    return [raw[start:end] for start, end in pairwise(edges)]


CUTS = st.lists(st.integers(0, 600), max_size=12)

MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, 600),
        st.integers(0, 3),
        st.sampled_from(
            [b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"0", b"\0", b"\xff", b"Content-Length: 5\r\n"]
        ),
    ),
    min_size=1,
    max_size=3,
)


def mutated(raw: bytes, mutations: Iterable[tuple[int, int, bytes]]) -> bytes:
    """With some bytes at a place replaced."""
    for place, length, with_ in mutations:
        place %= len(raw)
        raw = raw[:place] + with_ + raw[place + length :]
    return raw


class Echo:
    """A site that writes down what it is asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.gate: asyncio.Event | None = None
        self.refuse: Callable[[Request], None] = lambda request: None
        self.stream: StreamResponse | None = None
        routes = [post("/echo", self._echo), get("/echo", self._echo), post("/stream", self._stream)]
        self.site = Site(routes, self._admit, max_body_bytes=LIMIT)
        self.server = Server(self.site, 0.01)

    def _admit(self, request: Request) -> None:
        self.refuse(request)

    async def _echo(self, request: Request) -> Response:
        body = await read_body(request, LIMIT, 5.0)
        self.seen.append((request.method, request.path, body))
        if self.gate is not None:
            await self.gate.wait()
        return Response(body=body)

    async def _stream(self, request: Request) -> StreamResponse:
        body = await read_body(request, LIMIT, 5.0)
        self.stream = StreamResponse({"Content-Type": "text/event-stream"})
        self.stream.prepare(request)
        for byte in body:
            self.stream.write(bytes([byte]))
        if self.gate is not None:
            await self.gate.wait()
        self.stream.write_eof()
        return self.stream
