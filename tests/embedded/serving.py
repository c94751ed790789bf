"""A served application for tests: a fake agent behind, a raw HTTP session and the OpenAI client in front."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from kvhandoff.embedded.api import EngineRequest, TokenOutput
from kvhandoff.embedded.server import Limits, create_app
from kvhandoff.embedded.text import TextProcessor
from kvhandoff.web import serve
from tests.embedded.fake_agent import FakeAgent, FakeEngine, FakeLeg, Script
from tests.tinymodels import cached_tiny_model

MODEL = "tiny"
DEADLINE = 30.0
"""Seconds after which a test that waits for something has failed."""

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@cache
def tiny_text() -> TextProcessor:
    return TextProcessor.load(cached_tiny_model("llama"))


def ids_of(text: str) -> list[int]:
    return tiny_text().encode(text, add_special_tokens=False)


@dataclass
class Serving:
    agent: FakeAgent
    engine: FakeEngine
    session: aiohttp.ClientSession
    client: AsyncOpenAI
    port: int

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=BytesIO(data), **more) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any] | str]:
        """All events of a stream: JSON, or `[DONE]`."""
        async with self.session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return [event async for event in read_events(response)]

    async def request(self) -> EngineRequest:
        """The next request that reaches the engine."""
        return await soon(self.agent.arrived.get())

    async def leg(self) -> FakeLeg:
        """The next leg that is opened."""
        return await soon(self.agent.opened.get())


@asynccontextmanager
async def serving(
    script: Script | None = None,
    *,
    max_model_len: int = 512,
    limits: Limits | None = None,
    text: TextProcessor | None = None,
) -> AsyncIterator[Serving]:
    agent, engine = FakeAgent(script), FakeEngine(max_model_len)
    app = create_app(agent, engine, text or tiny_text(), MODEL, limits=limits)
    server = await serve(app, "127.0.0.1", 0, shutdown_s=0.5)
    base = f"http://127.0.0.1:{server.port}"
    try:
        async with (
            aiohttp.ClientSession(base) as session,
            AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=DEADLINE) as client,
        ):
            yield Serving(agent, engine, session, client, server.port)
    finally:
        await server.close()


@asynccontextmanager
async def raw_connection(
    port: int, head: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection that has sent these header lines (and what follows them) of a completion request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def soon(awaitable: Any) -> Any:
    """The awaitable's result, within the deadline."""
    return await asyncio.wait_for(awaitable, DEADLINE)


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | str]:
    """Events as they come."""
    while True:
        raw = await soon(response.content.readuntil(b"\n\n"))
        if not raw:
            return
        assert raw.startswith(b"data: ")
        assert raw.endswith(b"\n\n")
        data = raw[6:-2].decode()
        yield data if data == "[DONE]" else json.loads(data)


def give(request: EngineRequest, token_id: int | None, **more: Any) -> None:
    """As the engine: one output of this request."""
    request.on_output(TokenOutput(request.request_id, token_id, **more))


class Stream:
    """A stream opened by a test that is the engine too."""

    def __init__(self, server: Serving, body: dict[str, Any], path: str = COMPLETIONS) -> None:
        self._post = asyncio.create_task(server.session.post(path, json=body | {"stream": True}))
        self.response: aiohttp.ClientResponse | None = None
        self._events: Any = None

    async def next(self) -> Any:
        """The next event; the first one comes with the response's headers."""
        if self.response is None:
            self.response = await soon(self._post)
            assert self.response.status == 200
            assert self.response.content_type == "text/event-stream"
            self._events = read_events(self.response)
        return await anext(self._events, None)

    @property
    def answered(self) -> bool:
        return self._post.done()

    async def leave(self) -> None:
        """As a client that goes away."""
        if self.response is not None:
            self.response.close()
        self._post.cancel()
        await asyncio.wait([self._post])
