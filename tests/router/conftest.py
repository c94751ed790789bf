"""A router between scripted engines."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import uvloop

from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig, Timeouts
from tests.router.engines import CLUSTER_KEY, MODEL, WAIT_S, MockEngine
from tests.router.valkey_server import BINARY, WHY_NOT

NO_ACCOUNT = {"record_s": 0.05}
"""Timeouts of tests whose engine ends without having written the leg down."""
LONG_PROMPT = "the quick brown fox jumps over the lazy dog"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a Valkey server where there is none."""
    if BINARY is None:
        for item in items:
            if item.get_closest_marker("valkey"):
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say it where nobody overlooks it."""
    if BINARY is None:
        terminalreporter.write_line(f"shared index tests skipped: {WHY_NOT}", yellow=True)


class Cluster:
    """Engines, the router, and a client."""

    def __init__(self, prefill: list[MockEngine], decode: list[MockEngine], url: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self.url = url
        self.session = aiohttp.ClientSession()
        self.server: Any = None
        """The router's."""

    @property
    def p(self) -> MockEngine:
        return self.prefill[0]

    @property
    def d(self) -> MockEngine:
        return self.decode[0]

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "prompt": LONG_PROMPT, "max_tokens": 8} | fields

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": LONG_PROMPT}]} | fields

    async def post(
        self, body: object, *, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """(status, JSON body)."""
        data = io.BytesIO(json.dumps(body).encode())
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    def start(self, body: object, **options: Any) -> asyncio.Task[tuple[int, Any]]:
        return asyncio.create_task(self.post(body, **options))

    async def get(self, path: str, *, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def text(self, path: str) -> str:
        async with self.session.get(self.url + path) as response:
            return await response.text()

    async def record(self, identifier: str) -> dict[str, Any]:
        status, record = await self.get(f"/v1/handoffs/{identifier}")
        assert status == 200
        return record  # type: ignore[no-any-return]

    async def healthy(self) -> None:
        """Until the router has found every engine healthy."""
        async with asyncio.timeout(WAIT_S):
            while not all(engine["healthy"] for engine in (await self.get("/ready"))[1]["engines"]):
                pass

    async def at_rest(self) -> None:
        """Until no request is under way and no engine has a leg."""
        await self.rested(*self.engines, also="kvhandoff_router_in_flight 0.0")

    async def rested(self, *engines: MockEngine, also: str = "") -> None:
        """Until none of these engines has a leg."""
        legs = [f'kvhandoff_router_engine_legs{{engine="{e.url}",role="{e.role}"}} 0.0' for e in engines]
        wanted = [also, *legs]
        async with asyncio.timeout(WAIT_S):
            while True:
                page = await self.text("/metrics")
                if all(line in page for line in wanted):
                    return

    @property
    def engines(self) -> list[MockEngine]:
        return [*self.prefill, *self.decode]


@pytest.fixture
def cluster() -> Callable[..., Any]:
    """`async with cluster(prefill=1, decode=1, **config) as c`."""

    @asynccontextmanager
    async def start(
        prefill: int = 1,
        decode: int = 1,
        timeouts: dict[str, float] | None = None,
        make: type[MockEngine] = MockEngine,
        **config: Any,
    ) -> AsyncIterator[Cluster]:
        async with AsyncExitStack() as stack:
            prefills = [make("prefill", f"p{i}") for i in range(prefill)]
            decodes = [make("decode", f"d{i}" * 2) for i in range(decode)]
            for engine in prefills + decodes:
                await engine.start()
                stack.push_async_callback(engine.kill)
            settings = RouterConfig(
                prefill=tuple(engine.address for engine in prefills),
                decode=(*(engine.address for engine in decodes), *config.pop("more_decode", ())),
                cluster_key=config.pop("cluster_key", CLUSTER_KEY),
                port=0,
                poll_interval_s=config.pop("poll_interval_s", 60.0),
                pair_tests=config.pop("pair_tests", "off"),
                timeouts=replace(Timeouts(), **(timeouts or {})),
                **config,
            )
            server = await serve(settings)
            stack.push_async_callback(server.close)
            made = Cluster(prefills, decodes, f"http://127.0.0.1:{server.port}")
            made.server = server
            stack.push_async_callback(made.session.close)
            yield made

    return start


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the router is served with."""
    return {"uvloop": uvloop.new_event_loop}
