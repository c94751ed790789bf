"""Where an engine's pages for the router are found, and what counts as its health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from kvhandoff.core.clock import monotonic
from kvhandoff.core.errors import ConfigError
from kvhandoff.router import address as addresses
from kvhandoff.router.address import EngineAddress, parse_address
from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig
from kvhandoff.router.engine import Engine
from kvhandoff.router.fleet import Fleet
from tests.router.engines import CLUSTER_KEY, MockEngine, soon
from tests.router.vllm_engines import MockVllmEngine

URL = "http://10.0.0.1:8000"


class Ground:
    """Engines, and a fleet of them."""

    def __init__(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._session = session

    async def vllm(self, engine_id: str = "d") -> MockVllmEngine:
        engine = MockVllmEngine("decode", engine_id)
        await engine.start()
        self._stack.push_async_callback(engine.kill)
        return engine

    async def fleet(self, *decode: str, **config: Any) -> Fleet:
        settings = self.config(*decode, **config)
        fleet = Fleet(settings, self._session, monotonic, lambda legs: None)
        self._stack.push_async_callback(fleet.close)
        await fleet.start()
        return fleet

    def config(self, *decode: str, **config: Any) -> RouterConfig:
        return RouterConfig(
            decode=decode,
            cluster_key=CLUSTER_KEY,
            port=0,
            **({"poll_interval_s": 60.0, "pair_tests": "off"} | config),
        )


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Ground(stack, session)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (URL, EngineAddress(URL)),
        (f"{URL}/", EngineAddress(URL)),
        (f"{URL},internal=http://10.0.0.1:1/", EngineAddress(URL, "http://10.0.0.1:1")),
        ("https://[::1]:8000", EngineAddress("https://[::1]:8000")),
    ],
)
def test_addresses(text: str, wanted: EngineAddress) -> None:
    assert parse_address("decode", text) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10.0.0.1:8000", "decode: got '10.0.0.1:8000', allowed is http://HOST:PORT or https://HOST:PORT"),
        ("http://me:secret@h:1", "decode: got 'http://…@h:1' with a user or a password, allowed is http://"),
        (f"{URL}/v1", f"decode: got '{URL}/v1', allowed is http://HOST:PORT"),
        ("http://x:99999", "decode: got 'http://x:99999' (Port out of range"),
        (f"{URL},internal=", "decode,internal: got '', allowed is http://HOST:PORT"),
        (f"{URL},internal=http://x:1/internal", "decode,internal: got 'http://x:1/internal', allowed is"),
        (f"{URL},side=http://x:1", "allowed is URL or URL,internal=URL"),
        (f"{URL},internal=http://x:1,http://y:1", "allowed is URL or URL,internal=URL"),
    ],
)
def test_bad_addresses(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_address("decode", text)
    assert said in str(error.value)


def test_candidates() -> None:
    assert EngineAddress(URL).candidates() == (URL, "http://10.0.0.1:14579")
    assert EngineAddress("https://[::1]:8000").candidates()[1] == "http://[::1]:14579"
    assert EngineAddress(URL, "http://y:1").candidates() == ("http://y:1",)


@pytest.mark.parametrize(
    "given", [[URL, f"{URL}/"], [f"{URL},internal=http://x:1", "http://b:1,internal=http://x:1"]]
)
def test_an_address_is_given_once(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="more than once, allowed is once"):
        RouterConfig(decode=tuple(given), cluster_key=b"k")


async def test_pages_at_an_address_of_their_own(ground: Ground) -> None:
    d = await ground.vllm()
    fleet = await ground.fleet(d.address)
    (engine,) = fleet.decode
    assert (engine.url, engine.healthy, engine.integration) == (d.url, True, "vllm")
    assert engine.identity == d.identity
    assert (await soon(d.peers.get())).audience == d.identity  # tickets are posted there too


async def test_pages_at_the_usual_port(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers 404 has its connector's pages beside it."""
    d = await ground.vllm()
    monkeypatch.setattr(addresses, "SIDE_PORT", d.side_port)
    fleet = await ground.fleet(d.url)
    assert fleet.decode[0].identity == d.identity
    assert fleet.decode[0].healthy
    await d.restart()
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].identity == d.identity


async def test_no_pages_anywhere(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    d = await ground.vllm()
    gone = MockEngine("decode", "gone")
    await gone.start()
    await gone.kill()
    monkeypatch.setattr(addresses, "SIDE_PORT", gone.port)
    problem = str((await ground.fleet(d.url)).decode[0].problem)
    assert f"nothing answers at http://127.0.0.1:{gone.port}" in problem
    assert ",internal=URL" in problem


async def test_another_kind_of_engine_at_the_same_address(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pages were found is no longer where they are."""
    d = await ground.vllm()
    monkeypatch.setattr(addresses, "SIDE_PORT", d.side_port)
    fleet = await ground.fleet(d.url)
    await d.kill()
    embedded = MockEngine("decode", "e")
    embedded.port = d.port
    beside = MockVllmEngine("decode", "unused")  # something else has taken the side port
    await beside.listen(d.side_port, [])
    await embedded.start()
    try:
        await fleet.poll(fleet.engines)
        assert fleet.decode[0].problem == "its state report is refused with status 404"
        await fleet.poll(fleet.engines)
        assert fleet.decode[0].identity == embedded.identity
        assert (fleet.decode[0].healthy, fleet.decode[0].integration) == (True, "embedded")
    finally:
        await embedded.kill()
        await beside.kill()


async def test_two_engines_are_not_taken_for_one(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers of a host, and only one connector found: whose it is, is not known."""
    one, two = await ground.vllm("one"), await ground.vllm("two")
    monkeypatch.setattr(addresses, "SIDE_PORT", one.side_port)
    fleet = await ground.fleet(one.url, two.url)
    await fleet.poll(fleet.engines)
    for engine, other in (fleet.decode, fleet.decode[::-1]):
        assert f"its state report is that of the engine at {other.url}" in str(engine.problem)
        assert "URL,internal=URL" in str(engine.problem)
    fleet = await ground.fleet(one.address, two.address)
    assert [engine.identity for engine in fleet.decode] == [one.identity, two.identity]
    assert all(engine.healthy for engine in fleet.decode)


async def test_the_server_s_health_counts(ground: Ground) -> None:
    d = await ground.vllm()
    fleet = await ground.fleet(d.address)
    d.health = 503
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].problem == "its server's health is refused with status 503"
    d.health = 200
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].healthy


async def test_a_server_that_is_not_up_yet(ground: Ground) -> None:
    """The connector's pages are there before vLLM listens."""
    d = await ground.vllm()
    await d.kill()
    await d.listen(d.side_port, d.pages())
    fleet = await ground.fleet(d.address)
    assert "Connect call failed" in str(fleet.decode[0].problem)
    await d.listen(d.port, d.server())
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].healthy


async def test_on_miss_error_is_refused_at_start(ground: Ground) -> None:
    d = await ground.vllm()
    with pytest.raises(ConfigError, match="on_miss: got 'error', allowed with vLLM engines is recompute"):
        await serve(ground.config(d.address, on_miss="error"))


async def test_on_miss_error_is_refused_later(ground: Ground) -> None:
    """Of an engine that comes up after the router: it gets no legs."""
    d = await ground.vllm()
    await d.kill()
    fleet = await ground.fleet(d.address, on_miss="error")
    await d.start()
    await fleet.poll(fleet.engines)
    engine: Engine = fleet.decode[0]
    assert "allowed with vLLM engines is recompute" in str(engine.problem)
    assert not fleet.view().decode[0].healthy


async def test_pages_of_another_engine(ground: Ground) -> None:
    """Its server would refuse every ticket: it is for the other one."""
    d = await ground.vllm("theirs")
    embedded = MockEngine("decode", "mine")
    await embedded.start()
    try:
        fleet = await ground.fleet(f"{embedded.url},internal={d.side_url}")
        for _ in range(2):
            wanted = f"internal: got {d.side_url}, the pages of engine theirs, but the server at "
            assert f"{wanted}{embedded.url} is engine mine" in str(fleet.decode[0].problem)
            await fleet.poll(fleet.engines)
        await embedded.kill()
        embedded.engine_id = "theirs"  # as when the right one is started there
        embedded.new_life()
        await embedded.start()
        await fleet.poll(fleet.engines)
        assert fleet.decode[0].healthy, fleet.decode[0].problem
        own = f"{embedded.url},internal={embedded.url.replace('127.0.0.1', 'localhost')}"
        assert (await ground.fleet(own)).decode[0].healthy
    finally:
        await embedded.kill()
