"""Clients that leave, or stop reading, in every state of a request (field case 30)."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.conftest import NO_ACCOUNT
from tests.router.engines import DONE, Leg, MockEngine, decode, events, failing, held, soon, streamed, until


async def leave(request: asyncio.Task[Any]) -> None:
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_client_leaves_during_prefill(cluster: Any) -> None:
    """Field case 30: the leg is closed and withdrawn, and nothing reaches the decode engine."""
    async with cluster(timeouts=NO_ACCOUNT) as c:
        c.p.script = held
        request = c.start(c.body())
        leg = await soon(c.p.legs.get())
        await leave(request)
        assert await soon(c.p.cancelled.get()) is leg
        assert (await soon(c.p.withdrawn.get())).key == leg.ticket.key
        await c.at_rest()
        assert c.d.legs.empty()
        record = await c.record(leg.ticket.key.handoff_id)
        assert (record["status"], record["reasons"], record["ttft_s"]) == (499, ["client_aborted"], None)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_leaves_before_the_first_byte(cluster: Any, stream: bool) -> None:
    """Field case 30: the offer is withdrawn too."""
    async with cluster() as c:
        c.d.script = held
        request = c.start(c.body(stream=stream))
        leg = await soon(c.d.legs.get())
        await leave(request)
        assert await soon(c.d.cancelled.get()) is leg
        assert (await soon(c.p.withdrawn.get())).key == leg.ticket.offer.key
        await c.at_rest()
        c.d.script = decode
        assert (await c.post(c.body()))[0] == 200


async def test_client_leaves_in_the_stream(cluster: Any) -> None:
    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        async def before(index: int) -> None:
            if index:
                await asyncio.Event().wait()

        return await streamed(engine, leg, [*events(leg, "a", "b"), DONE], before=before)

    async with cluster(timeouts=NO_ACCOUNT) as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", json=c.body(stream=True)) as response:
            await soon(response.content.readany())
            leg = c.d.legs.get_nowait()
            response.close()
        assert await soon(c.d.cancelled.get()) is leg
        await c.at_rest()
        record = await c.record(leg.ticket.key.handoff_id)
        assert record["status"] == 499
        assert record["reasons"] == ["client_aborted"]
        assert record["ttft_s"] > 0
        assert c.p.withdrawn.empty()  # the decode engine has the offer in hand


async def test_client_leaves_when_it_has_everything(cluster: Any) -> None:
    """Clients close their connection at `[DONE]`, before the stream's end has come to the router."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        async def before(index: int) -> None:
            if index == 3:
                await asyncio.Event().wait()

        return await streamed(engine, leg, [*events(leg, "a", "b"), DONE, b":"], before=before)

    async with cluster(timeouts=NO_ACCOUNT) as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", json=c.body(stream=True)) as response:
            got = b""
            while not got.endswith(DONE):
                got += await soon(response.content.readany())
            leg = c.d.legs.get_nowait()
            response.close()
        await soon(c.d.cancelled.get())
        await c.at_rest()
        record = await c.record(leg.ticket.key.handoff_id)
        assert (record["status"], record["reasons"]) == (200, [])


async def test_client_leaves_between_attempts(cluster: Any) -> None:
    """While the failed attempt is being withdrawn."""
    async with cluster() as c:
        withdrawing = asyncio.Event()

        async def hold_withdraw() -> None:
            withdrawing.set()
            await asyncio.Event().wait()

        c.p.withdraw_script = hold_withdraw
        c.d.script = failing(500)
        request = c.start(c.body())
        await soon(withdrawing.wait())
        await leave(request)
        c.p.withdraw_script = None
        await c.at_rest()
        assert c.d.legs.qsize() == 1
        assert (await soon(c.p.withdrawn.get())).key == c.d.legs.get_nowait().ticket.key


async def test_client_stops_reading(cluster: Any) -> None:
    """Both sides' buffers fill, and the request ends by its deadline; the engine's leg with it."""
    event = b"data: " + b"x" * 2**16 + b"\n\n"

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        return await streamed(engine, leg, [event] * 1000)

    async with cluster(timeouts=NO_ACCOUNT | {"idle_s": 0.5}) as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", json=c.body(stream=True)):
            leg = c.d.legs.get_nowait()
            assert await soon(c.d.cancelled.get()) is leg
            await c.at_rest()
        assert (await c.record(leg.ticket.key.handoff_id))["status"] == 499


# ---- the router is told to end ----


async def test_a_request_ends_before_the_router_does(cluster: Any) -> None:
    """Nobody else comes in meanwhile, and what is under way gets its whole answer."""
    async with cluster(timeouts=NO_ACCOUNT, shutdown_s=60.0) as c:
        c.d.script = held
        request = c.start(c.body())
        await soon(c.d.legs.get())
        closing = asyncio.create_task(c.server.close())
        await until(lambda: c.server.closing)
        with pytest.raises(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as other, other.get(c.url + "/health"):
                pass
        assert not closing.done()
        c.d.gate.set()
        assert (await soon(request))[0] == 200
        await soon(closing)


def closed_with(caplog: pytest.LogCaptureFixture) -> list[tuple[Any, Any]]:
    """Status and reasons of the requests that have ended."""
    ended = [vars(record) for record in caplog.records if record.name == "kvhandoff.router.request_log"]
    return [(fields["status"], fields["reasons"]) for fields in ended]


async def test_what_the_router_cuts_off_is_told_so(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is not the client that has left."""
    caplog.set_level(logging.INFO)
    async with cluster(timeouts=NO_ACCOUNT, shutdown_s=0.01) as c:
        c.d.script = held
        request = c.start(c.body())
        leg = await soon(c.d.legs.get())
        await soon(c.server.close())
        status, answer = await soon(request)
        assert (status, answer["error"]["code"]) == (503, "shutdown")
        assert answer["error"]["message"] == "the router ended before the answer was complete; try again"
        assert await soon(c.d.cancelled.get()) is leg
        assert closed_with(caplog) == [(503, ["shutdown"])]


async def test_a_stream_that_the_router_cuts_off_ends_with_an_error(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        async def before(index: int) -> None:
            if index:
                await asyncio.Event().wait()

        return await streamed(engine, leg, [*events(leg, "a", "b"), DONE], before=before)

    async with cluster(timeouts=NO_ACCOUNT, shutdown_s=0.01) as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", json=c.body(stream=True)) as response:
            first = await soon(response.content.readany())
            leg = c.d.legs.get_nowait()
            await soon(c.server.close())
            rest = await soon(response.content.read())
        error = json.loads(rest.removeprefix(b"data: "))["error"]
        assert first.endswith(b"\n\n")
        assert (error["code"], error["type"]) == ("shutdown", "service_unavailable_error")
        assert await soon(c.d.cancelled.get()) is leg
        assert closed_with(caplog) == [(503, ["shutdown"])]
