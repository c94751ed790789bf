"""An engine registers with routers as long as it lives, whatever happens to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.engine.register import EVERY_S, LEASE_S, RETRY_S, Registrar, check_registration
from kvhandoff.handoff.registration import Registration, RegistrationKey
from kvhandoff.web import Server, serve

ME = Identity(EngineId("d"), Epoch("1"))
WAIT_S = 30.0


class Router:
    """Takes registrations, or refuses them."""

    def __init__(self) -> None:
        self.taken: asyncio.Queue[Registration] = asyncio.Queue()
        self.status = 200

    async def start(self) -> Server:
        app = web.Application()
        app.add_routes([web.post("/internal/engines", self._post)])
        return await serve(app)

    async def _post(self, request: web.Request) -> web.Response:
        signed = (await request.json())["registration"]
        self.taken.put_nowait(RegistrationKey(b"key").open(signed))
        return web.json_response({}, status=self.status)

    async def next(self) -> Registration:
        return await asyncio.wait_for(self.taken.get(), WAIT_S)


class Naps:
    """Sleeps that the test ends."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self._go = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.asked.put_nowait(seconds)
        await self._go.acquire()

    async def end(self) -> float:
        seconds = await asyncio.wait_for(self.asked.get(), WAIT_S)
        self._go.release()
        return seconds


@pytest.fixture
async def router() -> AsyncIterator[tuple[Router, str]]:
    router = Router()
    server = await router.start()
    yield router, f"http://127.0.0.1:{server.port}"
    await server.close()


async def test_again_and_again_until_it_leaves(router: tuple[Router, str]) -> None:
    r, url = router
    naps = Naps()
    registrar = Registrar([url + "/"], b"key", ME, "decode", "http://d:1", internal="http://d:2", sleep=naps)
    async with registrar:
        first = await r.next()
        assert first == Registration(
            engine=ME,
            number=1,
            role="decode",
            url="http://d:1",
            internal="http://d:2",
            lease_s=LEASE_S,
        )
        assert await naps.end() == EVERY_S
        assert (await r.next()).number == 2
    last = await r.next()
    assert (last.number, last.lease_s) == (3, 0.0)
    assert r.taken.empty()


async def test_a_router_that_refuses_or_is_not_there_is_asked_again(
    router: tuple[Router, str], caplog: pytest.LogCaptureFixture
) -> None:
    r, url = router
    r.status = 403
    naps = Naps()
    async with Registrar([url], b"key", ME, "decode", "http://d:1", sleep=naps):
        for _ in range(3):
            await r.next()
            assert await naps.end() == RETRY_S
        refused = [m for m in caplog.messages if "status 403" in m]
        assert len(refused) == 1, "said once"
        r.status = 200
        while await naps.end() == RETRY_S:
            pass
    async with Registrar(["http://127.0.0.1:1"], b"key", ME, "decode", "http://d:1", sleep=naps):
        assert await naps.end() == RETRY_S
    assert any("127.0.0.1:1" in m for m in caplog.messages)


@pytest.mark.parametrize(
    ("routers", "role", "url", "host", "said"),
    [
        (["r:1"], "decode", None, "h", "register: got 'r:1'"),
        (["http://r:1/v1"], "decode", None, "h", "register: got 'http://r:1/v1'"),
        (["http://r:x"], "decode", None, "h", "register: got 'http://r:x'"),
        (["http://r:1"], "decode", "d", "h", "register_url: got 'd'"),
        ([], "decode", "http://d:1", "h", "register_url: got 'http://d:1' without register, allowed is with"),
        (["http://r:1"], "both", None, "h", "register: got the role both, allowed is prefill or decode"),
        (["http://r:1"], "decode", None, "0.0.0.0", "register: got the host 0.0.0.0"),
    ],
)
def test_what_can_t_work(routers: list[str], role: str, url: str | None, host: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_registration(routers, role, url, host)
    assert said in str(refused.value)


def test_what_can() -> None:
    check_registration([], "both", None, "0.0.0.0")
    check_registration(["http://r:1"], "decode", "http://d:1", "0.0.0.0")
    check_registration(["http://r:1", "https://r:2"], "prefill", None, "10.0.0.1")
