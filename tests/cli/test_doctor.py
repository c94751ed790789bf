"""`kvhandoff doctor`: what it prints of engines, and its exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import pytest
from aiohttp import web

from kvhandoff.handoff.messages import PROTOCOL_VERSION
from kvhandoff.handoff.tickets import TicketGate, TicketKey
from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig
from tests.router.engines import CLUSTER_KEY, MockEngine
from tests.router.strangers import web_server
from tests.router.vllm_engines import MockVllmEngine


class Done(NamedTuple):
    code: int
    said: str


async def doctor(*engines: str, key: bytes = CLUSTER_KEY) -> Done:
    arguments = [word for engine in engines for word in ("--engine", engine)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvhandoff", "doctor", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "KVHANDOFF_CLUSTER_KEY": key.decode(), "COLUMNS": "200"},
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return Done(process.returncode, said.decode())


class Telling(MockVllmEngine):
    """One with a page that says what is in use."""

    def __init__(self, engine_id: str) -> None:
        super().__init__("decode", engine_id)
        self.about = {
            "protocol_version": str(PROTOCOL_VERSION),
            "integration": "vllm",
            "vllm": "0.32.0",
            "backend": "UCX",
            "options": "[red]",  # no markup
            "layout.block_size": "16",
        }

    def pages(self) -> list[web.RouteDef]:
        return [*super().pages(), web.get("/internal/about", self._about)]

    async def _about(self, request: web.Request) -> web.Response:
        return web.json_response(self.about)


@pytest.fixture
async def engines() -> AsyncIterator[list[Telling]]:
    async with AsyncExitStack() as stack:
        made = [Telling("one"), Telling("two")]
        for engine in made:
            await engine.start()
            stack.push_async_callback(engine.kill)
        yield made


async def test_nothing_wrong(engines: list[Telling]) -> None:
    done = await doctor(*(engine.address for engine in engines))
    assert done.code == 0, done.said
    assert "Nothing is wrong." in done.said
    for engine in engines:
        assert engine.url in done.said
        assert engine.side_url in done.said
        assert engine.identity.epoch in done.said
    requests = "0 running, 0 waiting, 0 loading"
    for fact in ("UCX", "[red]", "0.32.0", "4096 tokens", "8 total, 8 free", requests):
        assert done.said.count(fact) == 2


async def test_another_cluster_key(engines: list[Telling]) -> None:
    engines[0].gatekeeper = TicketGate(TicketKey(b"another"), engines[0].identity)
    done = await doctor(engines[0].address)
    assert done.code == 1
    assert "it refuses the cluster key: " in done.said
    assert "not signed with this cluster's key" in done.said
    done = await doctor(engines[0].address, key=b"")
    assert done.code == 0  # not known, and said so
    assert "The cluster key was not checked" in done.said


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("vllm", "0.33.1", "vLLM: got version 0.33.1, allowed for KVHandoffConnector is 0.29 to 0.32"),
        ("protocol_version", "1", f"protocol_version: got 1, allowed is {PROTOCOL_VERSION}"),
    ],
)
async def test_versions(engines: list[Telling], name: str, value: str, wrong: str) -> None:
    engines[0].about[name] = value
    done = await doctor(engines[0].address)
    assert done.code == 1
    assert wrong in done.said


async def test_engines_that_refuse_each_other(engines: list[Telling]) -> None:
    engines[1].about["layout.block_size"] = "32"
    done = await doctor(*(engine.address for engine in engines))
    assert done.code == 1
    wanted = f"layout.block_size: 16 at {engines[0].url}, 32 at {engines[1].url}"
    assert f"wrong: they refuse each other: {wanted}" in done.said


async def test_unreachable(engines: list[Telling]) -> None:
    await engines[0].kill()
    done = await doctor(engines[0].address, engines[1].address)
    assert done.code == 1
    assert "wrong: Cannot connect to host" in done.said
    assert "UCX" in done.said  # the other one is looked at all the same


async def test_no_engine_of_this_project() -> None:
    """An embedded engine of before, or any other server."""
    other = MockEngine("decode", "old")
    await other.start()
    try:
        done = await doctor(other.url)
    finally:
        await other.kill()
    assert done.code == 1
    assert "what it says of itself is refused with status 404" in done.said


async def test_a_router_and_other_servers(engines: list[Telling]) -> None:
    config = RouterConfig(decode=(engines[0].address,), cluster_key=CLUSTER_KEY, port=0)
    router = await serve(config)
    try:
        async with web_server(404, "nothing here") as url:
            done = await doctor(f"http://127.0.0.1:{router.port}", f"{url},internal={url}")
    finally:
        await router.close()
    assert done.code == 1
    assert "wrong: a router of kvhandoff answers here, allowed is an engine: name those that it" in done.said
    assert "wrong: a server that calls itself 'Plain/1.0' answers here, which is no engine of" in done.said
    assert "its state report is refused with status 404" in done.said


async def test_another_engines_pages(engines: list[Telling]) -> None:
    embedded = MockEngine("decode", "mine")
    await embedded.start()
    try:
        done = await doctor(f"{embedded.url},internal={engines[0].side_url}")
    finally:
        await embedded.kill()
    assert done.code == 1
    wanted = f"wrong: internal: got {engines[0].side_url}, the pages of engine one, but the server at"
    assert f"{wanted} {embedded.url} is engine mine" in done.said


async def test_one_engine_twice(engines: list[Telling]) -> None:
    done = await doctor(engines[0].address, engines[1].address, engines[0].address)
    assert done.code == 2
    assert f"engine: got {engines[0].url} more than once, allowed is once" in done.said
    elsewhere = engines[0].address.replace("127.0.0.1", "localhost")
    done = await doctor(engines[0].address, engines[1].address, elsewhere)
    assert done.code == 1
    there = engines[0].url.replace("127.0.0.1", "localhost")
    assert f"wrong: {engines[0].url} and {there} are one engine, one" in done.said


async def test_bad_input() -> None:
    done = await doctor("http://x:1,side=http://x:2")
    assert done.code == 2
    assert "engine: got 'http://x:1,side=http://x:2', allowed is URL or URL,internal=URL" in done.said
    assert (await doctor()).code == 2
