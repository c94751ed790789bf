"""The load generator of the router's benchmark, in a process of its own.

Each connection is kept and asks again when it is answered (a closed loop). Every answer is checked: status
200 and all of its events, or the run ends with an error.

    python -m benchmarks.router_load         takes a `Load` on standard input, prints a `Measured`
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
import msgspec
import uvloop

from benchmarks.router_mocks import MODEL
from kvhandoff.core.clock import monotonic

_STUCK_S = 60.0
"""Without any progress by then the run is given up."""


class Load(msgspec.Struct, kw_only=True):
    """What to ask for."""

    port: int
    connections: int = 1
    requests: int = 0
    """In all; 0: as many as `seconds` allow."""
    seconds: float = 0.0
    tokens: int = 1
    """Events of each answer."""
    prompt_bytes: int = 2000
    key: str = ""
    """Sent as `Authorization: Bearer`."""
    first: int = 0
    """Number of the first request: no two requests of a run have the same prompt."""


class Measured(msgspec.Struct, kw_only=True):
    """What came of it."""

    requests: int
    tokens: int
    seconds: float
    ttft_s: list[float]
    """Of each request, to its first event."""


class _Client(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self._run = run
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._asked = self._first = 0.0
        self._events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._run.fail(f"a connection ended: {error}")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._run.fail(f"an answer can't be read: {error}")

    def on_body(self, piece: bytes) -> None:
        if not self._events:
            self._first = monotonic()
        self._events += piece.count(b"data: ")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        wanted = self._run.load.tokens + 1  # the last one is [DONE]
        if status != 200 or self._events != wanted:
            self._run.fail(f"status {status}, {self._events} events of {wanted}")
            return
        self._run.ended(self._first - self._asked)
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        request = self._run.next()
        if request is None:
            transport, self._transport = self._transport, None
            transport.close()
            return
        self._events = 0
        self._asked = monotonic()
        self._transport.write(request)


class _Run:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ttft_s: list[float] = []
        self.last = 0.0
        self._number = load.first
        self._open = load.connections
        self._until = monotonic() + load.seconds if load.seconds else float("inf")

    def next(self) -> bytes | None:
        """The next request; None when there is to be none."""
        load = self.load
        sent = self._number - load.first
        if (load.requests and sent >= load.requests) or monotonic() >= self._until:
            self._open -= 1
            if self._open == 0 and not self.done.done():
                self.done.set_result(None)
            return None
        self._number += 1
        text = f"{self._number} ".ljust(load.prompt_bytes, "x")
        body = msgspec.json.encode(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": load.tokens,
                "stream": True,
            }
        )
        key = f"Authorization: Bearer {load.key}\r\n" if load.key else ""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{load.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def ended(self, ttft_s: float) -> None:
        self.ttft_s.append(ttft_s)
        self.last = monotonic()

    def fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))


async def _main(load: Load) -> Measured:
    run, loop, started = _Run(load), asyncio.get_running_loop(), monotonic()
    for _ in range(load.connections):
        await loop.create_connection(lambda: _Client(run), "127.0.0.1", load.port)
    seen = -1
    while not run.done.done():
        await asyncio.wait({run.done}, timeout=_STUCK_S)
        if not run.done.done() and len(run.ttft_s) == seen:
            raise RuntimeError(f"no answer in {_STUCK_S:g} s")
        seen = len(run.ttft_s)
    run.done.result()
    answered = len(run.ttft_s)
    return Measured(
        requests=answered, tokens=answered * load.tokens, seconds=run.last - started, ttft_s=run.ttft_s
    )


if __name__ == "__main__":
    measured = uvloop.run(_main(msgspec.json.decode(sys.stdin.buffer.read(), type=Load)))
    sys.stdout.buffer.write(msgspec.json.encode(measured))
