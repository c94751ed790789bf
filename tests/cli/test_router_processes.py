"""`kvhandoff router` as processes before engines: TLS on both sides, and replicas that share an index, one of
which is killed (field case 65)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.callers import bearer, security
from tests.router.certificates import CERT_A, CERT_B, KEY_A
from tests.router.conftest import Cluster
from tests.router.engines import (
    CLUSTER_KEY,
    DONE,
    WAIT_S,
    Leg,
    MockEngine,
    decode,
    events,
    held,
    soon,
    streamed,
    until,
)
from tests.router.test_replicas import lines, written
from tests.router.test_return import LONG, completion, turn
from tests.router.test_security import TlsEngine, trusting
from tests.router.valkey_server import BINARY, WHY_NOT, running_server

STARTS_S = 60.0
"""A process that imports everything, on a busy machine."""

needs_server = pytest.mark.skipif(BINARY is None, reason=WHY_NOT)


class Process:
    """One router."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def kill(self) -> None:
        """As `kill -9`."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def router(*arguments: str, **environment: str) -> AsyncIterator[Process]:
    """A router that serves; it is told to end in the end, and ends in order."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvhandoff", "router", "--port", "0", "--pair-tests", "off", *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "KVHANDOFF_CLUSTER_KEY": CLUSTER_KEY.decode(), **environment},
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), STARTS_S)
        yield Process(process, json.loads(line)["url"])
        if process.returncode is None:
            process.terminate()
            assert await asyncio.wait_for(process.wait(), STARTS_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def pair(make: type[MockEngine] = MockEngine) -> AsyncIterator[tuple[MockEngine, MockEngine]]:
    """A prefill and a decode engine."""
    p, d = make("prefill", "p"), make("decode", "d")
    try:
        await p.start()
        await d.start()
        yield p, d
    finally:
        await p.kill()
        await d.kill()


def before(*engines: MockEngine) -> list[str]:
    """The flags of a router before these engines."""
    return [word for engine in engines for word in (f"--{engine.role}", engine.address)]


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_an_ipv6_host() -> None:
    """What it says of its address is a URL."""
    engine = MockEngine("decode", "d")
    await engine.start()
    try:
        async with router("--host", "::1", *before(engine)) as process, aiohttp.ClientSession() as session:
            assert process.url.startswith("http://[::1]:")
            async with session.get(f"{process.url}/health") as answer:
                assert await answer.json() == {"status": "ok"}
    finally:
        await engine.kill()


# ---- TLS ----


async def test_tls_on_both_sides(tmp_path: Path) -> None:
    """Clients reach the router over TLS, and it reaches engines whose root it was given; another router, that
    was given another root, reaches none."""
    files = {"tls.crt": CERT_A, "tls.key": KEY_A, "ca.crt": CERT_A, "other.crt": CERT_B}
    paths = {name: tmp_path / name for name in files}
    for name, text in files.items():
        paths[name].write_text(text)
    TlsEngine.files = paths["tls.crt"], paths["tls.key"]
    tls = ("--tls-cert", str(paths["tls.crt"]), "--tls-key", str(paths["tls.key"]))
    body = {"model": "tiny", "prompt": "hi"}
    async with pair(TlsEngine) as (p, d):
        flags = (*before(p, d), "--path", "pull", *tls)
        async with router(*flags, "--engine-ca", str(paths["ca.crt"])) as served:
            assert served.url.startswith("https://")
            async with aiohttp.ClientSession(connector=trusting(CERT_A)) as client:
                for stream in (False, True):
                    asked = client.post(f"{served.url}/v1/completions", json=body | {"stream": stream})
                    async with asked as answer:
                        assert answer.status == 200
                        assert (b"[DONE]" in await answer.read()) is stream
            assert (p.legs.qsize(), d.legs.qsize()) == (2, 2)
            async with aiohttp.ClientSession(connector=trusting(CERT_B)) as client:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await client.get(f"{served.url}/health")
            async with aiohttp.ClientSession() as client:
                with pytest.raises(aiohttp.ClientError):
                    await client.get(f"{served.url.replace('https', 'http')}/health")
        async with (
            router(*flags, "--engine-ca", str(paths["other.crt"])) as served,
            aiohttp.ClientSession(connector=trusting(CERT_A)) as client,
        ):
            async with client.post(f"{served.url}/v1/completions", json=body) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, "no_decode_engine")
            async with client.get(f"{served.url}/ready") as answer:
                engines = (await answer.json())["engines"]
                assert all("CERTIFICATE_VERIFY_FAILED" in engine["problem"] for engine in engines)


# ---- the end ----


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_what_is_cut_off_at_the_end_is_told_so(workers: str) -> None:
    """The flag reaches the server, of several workers too."""
    async with pair() as (p, d):
        d.script = held
        flags = ("--shutdown-timeout", "0.01", "--workers", workers, "--return", "off")
        async with router(*before(p, d), *flags) as served, aiohttp.ClientSession() as client:
            url, body = f"{served.url}/v1/completions", {"model": "tiny", "prompt": "hi"}
            asked = asyncio.create_task(client.post(url, json=body))
            await asyncio.wait_for(d.legs.get(), STARTS_S)
            served.process.terminate()
            async with await soon(asked) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, "shutdown")
            assert await asyncio.wait_for(served.process.wait(), STARTS_S) == 0


# ---- replicas ----


async def has_accounts(replica: Cluster) -> None:
    """Until it has all accounts of its engines: asked for one it gets the others with it. Left to itself it
    asks now and then, before the next turn or behind it."""
    other = await completion(replica, LONG)
    assert not (await replica.record(other.id))["incomplete"]


@needs_server
async def test_replicas_share_an_index_and_one_is_killed(tmp_path: Path) -> None:
    """Field case 65: turns alternate between two routers with the hit rate of one; one is killed in the
    middle of a stream, the other has the next turn's history; a cold one has it too."""
    first, second, third, fourth, fifth = lines(5)

    async def endless(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        async def wait(index: int) -> None:
            if index:
                await asyncio.Event().wait()

        return await streamed(engine, leg, [*events(leg, "Hel", "lo"), DONE], before=wait)

    async with running_server(tmp_path) as server, pair() as (p, d):
        flags = (*before(p, d), "--path", "pull")
        flagged, told = ("--index", server.url), {"KVHANDOFF_INDEX": server.url}
        async with router(*flags, *flagged) as one, router(*flags, **told) as other:
            a, b = (Cluster([p], [d], process.url) for process in (one, other))
            try:
                last: Any = None
                for number, (router_of, messages) in enumerate(((a, first), (b, second), (a, third))):
                    taken = await turn(router_of, messages)
                    assert taken.told == (None if last is None else last.kept(d.keeps))
                    await written(server, number + 1)
                    for replica in (a, b):
                        await has_accounts(replica)
                    last = taken

                d.script = endless
                async with a.session.post(
                    a.url + "/v1/chat/completions", json=a.chat_body(messages=fourth, stream=True)
                ) as broken:
                    assert broken.status == 200
                    assert await soon(broken.content.readany())
                    leg = await soon(d.legs.get())
                    await one.kill()
                    with pytest.raises(aiohttp.ClientError):
                        await soon(broken.content.read())
                assert await soon(d.cancelled.get()) is leg
                p.legs.get_nowait()
                d.script = decode
                taken = await turn(b, fourth)
                assert taken.told == last.kept(d.keeps)
                await written(server, 4)
            finally:
                await a.session.close()
                await b.session.close()
        async with router(*flags, *flagged) as cold:
            c = Cluster([p], [d], cold.url)
            try:
                # It has the engines' accounts from the engines.
                assert (await turn(c, fifth)).told == taken.kept(d.keeps)
            finally:
                await c.session.close()


@needs_server
async def test_a_killed_router_s_requests_end_with_its_lease(tmp_path: Path) -> None:
    """Tenants' limits on the command line: two routers count together, and a dead one's share comes back."""
    file = security(tmp_path, {"max_concurrency": 1}).tenants
    async with running_server(tmp_path) as server, pair() as (p, d):
        flags = (*before(p, d), "--path", "local", "--index", server.url, "--tenants", str(file))
        async with router(*flags) as one, router(*flags) as other:
            a, b = (Cluster([p], [d], process.url) for process in (one, other))
            try:
                d.script = held
                request = a.start(a.body(), headers=bearer("acme"))
                await soon(d.legs.get())
                assert (await b.post(b.body(), headers=bearer("acme")))[0] == 429
                d.gate.set()
                assert (await soon(request))[0] == 200

                d.gate.clear()
                request = a.start(a.body(), headers=bearer("acme"))
                await soon(d.legs.get())
                await one.kill()
                with pytest.raises(aiohttp.ClientError):
                    await soon(request)
                await until(lambda: not d.cancelled.empty())
                d.script = decode
                assert (await b.post(b.body(), headers=bearer("acme")))[0] == 429, "its lease still runs"
                # Rather than wait for the lease's end, have it be over.
                [(dead, _)] = await server.client.zrange("kvhandoff:routers", 0, -1, withscores=True)
                await server.client.zadd("kvhandoff:routers", {dead: 1.0})
                async with asyncio.timeout(WAIT_S):
                    while (await b.post(b.body(), headers=bearer("acme")))[0] == 429:
                        pass
            finally:
                await a.session.close()
                await b.session.close()
