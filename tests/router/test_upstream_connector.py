"""Field case 20: stock engines that run another connector than the router drives are refused before they get
a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from kvhandoff.core.clock import ManualClock
from kvhandoff.router import upstream_probe
from kvhandoff.router.upstream_probe import AGAIN_S
from tests.router.upstream_engines import (
    WAIT_S,
    UpstreamCluster,
    UpstreamLeg,
    UpstreamMock,
    failing,
    upstream_cluster,
)

OTHER = {"nixl": "push", "nixl-push": "pull"}
CLASSES = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}
RUNS = {"pull": "NixlConnector", "push": "NixlPushConnector"}


async def problems(c: UpstreamCluster) -> list[str | None]:
    """Of the engines, prefill engines first; None: it gets legs."""
    return [engine["problem"] for engine in (await c.get("/ready"))[1]["engines"]]


async def modes(c: UpstreamCluster) -> list[str | None]:
    return [engine["transfer_mode"] for engine in (await c.get("/ready"))[1]["engines"]]


@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
async def test_engines_of_the_other_mode_get_no_legs(connector: str) -> None:
    mode = OTHER[connector]

    def other(prefill: list[UpstreamMock], decode: list[UpstreamMock]) -> None:
        for engine in prefill + decode:
            engine.transfer_mode = mode

    async with upstream_cluster(connector, prepare=other) as c:
        why = (
            f"it runs {RUNS[mode]} (transfer_mode {mode}), allowed with --connector {connector} is "
            f"{CLASSES[connector]}"
        )
        assert await problems(c) == [why, why]
        status, ready = await c.get("/ready")
        assert (status, ready["status"]) == (503, "no decode engine takes requests")
        status, answer = await c.post()
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        assert f"decode engine at {c.d.url}: {why}" in answer["error"]["message"]
        assert c.p.legs.empty()
        assert c.d.legs.empty()


async def test_one_engine_of_the_other_mode_is_left_out() -> None:
    def other(prefill: list[UpstreamMock], decode: list[UpstreamMock]) -> None:
        prefill[0].transfer_mode = decode[1].transfer_mode = "push"

    async with upstream_cluster("nixl", n_prefill=2, n_decode=2, prepare=other) as c:
        assert [problem is None for problem in await problems(c)] == [False, True, True, False]
        assert await modes(c) == ["push", "pull", "pull", "push"]
        for _ in range(4):
            assert (await c.post())[0] == 200
        assert [engine.legs.qsize() for engine in c.prefill + c.decode] == [0, 4, 4, 0]


async def test_an_engine_that_asks_for_tickets_gets_no_legs() -> None:
    async def asks(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
        error = {"message": "kv_transfer_params: ticket is missing", "code": "bad_ticket"}
        return web.json_response({"error": error}, status=403)

    def ours(prefill: list[UpstreamMock], decode: list[UpstreamMock]) -> None:
        prefill[0].probed = decode[0].probed = asks

    async with upstream_cluster("nixl", prepare=ours) as c:
        why = (
            "it is an engine of kvhandoff's own, which obeys tickets only, allowed with --connector nixl is "
            "NixlConnector; leave --connector out for it"
        )
        assert await problems(c) == [why, why]
        assert (await c.post())[0] == 503
        assert c.p.legs.empty()
        assert c.d.legs.empty()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_without_a_connector_gets_no_legs(role: str) -> None:
    def plain(prefill: list[UpstreamMock], decode: list[UpstreamMock]) -> None:
        (prefill if role == "prefill" else decode)[0].transfer_mode = None

    async with upstream_cluster("nixl", prepare=plain) as c:
        found = [problem for problem in await problems(c) if problem is not None]
        assert found == [
            "it runs no connector that hands over (a prefill leg is answered without kv_transfer_params), "
            "allowed with --connector nixl is NixlConnector"
        ]


async def test_a_pushing_engine_of_another_name_gets_no_legs() -> None:
    """Decode engines refuse its handshake, request by request."""

    def renamed(prefill: list[UpstreamMock], decode: list[UpstreamMock]) -> None:
        prefill[1].name = decode[0].name = "other"  # a decode engine's name is not given to the router

    async with upstream_cluster("nixl-push", n_prefill=2, prepare=renamed) as c:
        why = "engine_id: got 'p1', allowed is what the engine calls itself, 'other'"
        assert await problems(c) == [None, why, None]


async def test_an_older_engine_does_not_say_and_is_asked_once() -> None:
    clock = ManualClock()

    def older(prefill: list[UpstreamMock], decode: list[UpstreamMock]) -> None:
        prefill[0].transfer_mode = decode[0].transfer_mode = ""

    async with upstream_cluster("nixl", prepare=older, clock=clock, poll_interval_s=0.001) as c:
        assert (await problems(c), await modes(c)) == ([None, None], [None, None])
        assert (await c.post())[0] == 200
        clock.advance(AGAIN_S)
        await polled(c.d)
        assert (c.p.probes.qsize(), c.d.probes.qsize()) == (1, 1)


async def polled(engine: UpstreamMock) -> None:
    """The router has looked twice from now on, so that the first look is over."""
    seen = engine.polls
    async with asyncio.timeout(WAIT_S):
        while engine.polls < seen + 2:  # noqa: ASYNC110  another server's
            await asyncio.sleep(0)


async def test_an_engine_that_does_not_answer_is_used_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_probe, "PROBE_S", 0.01)
    clock = ManualClock()

    async def never(engine: UpstreamMock, leg: UpstreamLeg) -> Any:
        await engine.gate.wait()
        return web.json_response(leg.whole("x", None))

    def silent(prefill: list[UpstreamMock], decode: list[UpstreamMock]) -> None:
        prefill[0].probed, decode[0].probed = never, failing

    async with upstream_cluster("nixl", prepare=silent, clock=clock, poll_interval_s=0.001) as c:
        assert (await problems(c), await modes(c)) == ([None, None], [None, None])
        assert (await c.post())[0] == 200
        await polled(c.d)
        assert (c.p.probes.qsize(), c.d.probes.qsize()) == (1, 1)
        clock.advance(AGAIN_S)
        await polled(c.p)
        await polled(c.d)
        assert (c.p.probes.qsize(), c.d.probes.qsize()) == (2, 2)


async def test_an_engine_that_is_restarted_is_asked_anew() -> None:
    async with upstream_cluster("nixl", n_decode=2, poll_interval_s=0.001) as c:
        assert await problems(c) == [None, None, None]
        await c.d.stop()
        await until(c, lambda found: found[1] is not None)
        c.d.transfer_mode = "push"
        await c.d.start()
        await until(c, lambda found: "NixlPushConnector" in (found[1] or ""))
        assert (await c.post())[0] == 200
        assert c.d.legs.empty()


async def test_an_engine_that_was_refused_is_asked_again() -> None:
    """Whatever is behind its address may have been replaced without a gap."""
    clock = ManualClock()

    def other(prefill: list[UpstreamMock], decode: list[UpstreamMock]) -> None:
        decode[0].transfer_mode = "push"

    async with upstream_cluster("nixl", prepare=other, clock=clock, poll_interval_s=0.001) as c:
        c.d.transfer_mode = "pull"
        await polled(c.d)
        assert "NixlPushConnector" in ((await problems(c))[1] or "")
        clock.advance(AGAIN_S)
        await until(c, lambda found: found[1] is None)


async def until(c: UpstreamCluster, holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds(await problems(c)):
            pass


@pytest.mark.parametrize(("n_prefill", "pair_tests"), [(0, "auto"), (1, "off")])
async def test_nobody_is_asked(n_prefill: int, pair_tests: str) -> None:
    """When it is not wanted; or with nothing to hand over, when any engine will do."""

    def plain(prefill: list[UpstreamMock], decode: list[UpstreamMock]) -> None:
        decode[0].transfer_mode = None

    async with upstream_cluster("nixl", n_prefill=n_prefill, pair_tests=pair_tests, prepare=plain) as c:
        assert (await c.post())[0] == 200
        assert c.d.probes.empty()
