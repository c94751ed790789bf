"""What follows each failure: another engine, another attempt, or an error; and nothing left behind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.conftest import NO_ACCOUNT
from tests.router.engines import (
    WAIT_S,
    Leg,
    MockEngine,
    events,
    failing,
    reset,
    soon,
    streamed,
)


async def silent(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """No answer, ever."""
    await asyncio.Event().wait()
    raise AssertionError


async def never() -> None:
    await asyncio.Event().wait()


async def no_params(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """A server that is no prefill engine of this cluster (field case 21)."""
    return web.json_response({"id": "x", "choices": []})


async def cut_short(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """The connection ends within the body of a JSON answer."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
    await response.prepare(leg.request)
    await response.write(b'{"id":')
    assert leg.request.transport is not None
    leg.request.transport.abort()
    return response


async def empty_stream(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """Headers, and then nothing."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(leg.request)
    assert leg.request.transport is not None
    leg.request.transport.abort()
    return response


@asynccontextmanager
async def swamped(port: int) -> AsyncIterator[None]:
    """A process at `port` that lives, but accepts nothing, and whose queue of connections is full."""
    loop = asyncio.get_running_loop()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        queued = []
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    waiting = socket.socket()
                    queued.append(waiting)
                    waiting.setblocking(False)
                    try:
                        await asyncio.wait_for(loop.sock_connect(waiting, ("127.0.0.1", port)), 0.1)
                    except TimeoutError:
                        break
            yield
        finally:
            for waiting in queued:
                waiting.close()


# ---- the prefill leg ----


@pytest.mark.parametrize("script", [reset, failing(500), failing(503), no_params, cut_short])
async def test_prefill_fails_then_another_does_it(cluster: Any, script: Any) -> None:
    """Field cases 15b and 47: a new attempt elsewhere, the old one withdrawn first."""
    async with cluster(prefill=2) as c:
        first, second = c.prefill
        first.script = script
        status, answer = await c.post(c.body())
        assert (status, answer["choices"][0]["text"]) == (200, "Hello")
        failed, done = first.legs.get_nowait().ticket, second.legs.get_nowait().ticket
        assert (failed.key.attempt, done.key.attempt) == (0, 1)
        assert failed.key.handoff_id == done.key.handoff_id
        assert first.withdrawn.get_nowait().key == failed.key
        assert second.withdrawn.empty()
        leg = c.d.legs.get_nowait()
        assert leg.ticket.key == done.key
        assert leg.ticket.offer.source == second.identity
        record = await c.record(answer["id"])
        assert (record["attempts"], record["path"]) == (2, "pull")
        assert record["reasons"] == ["prefill_failed"]
        assert record["prefill"]["engine_id"] == second.engine_id
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)
        assert record["phases"]["retry"] > 0


@pytest.mark.parametrize("script", [reset, failing(500)])
async def test_only_prefill_engine_fails_then_local(cluster: Any, script: Any) -> None:
    async with cluster() as c:
        c.p.script = script
        status, answer = await c.post(c.body())
        assert (status, answer["choices"][0]["text"]) == (200, "Hello")
        ticket = c.d.legs.get_nowait().ticket
        assert (ticket.leg, ticket.key.attempt, ticket.offer) == ("local", 1, None)
        record = await c.record(answer["id"])
        assert (record["path"], record["reasons"]) == ("local", ["prefill_failed"])
        assert record["kv_source"] == "local"
        assert record["prefill"] is None


async def test_prefill_late_then_local(cluster: Any) -> None:
    async with cluster(timeouts={"prefill_s": 0.05}) as c:
        c.p.script = silent
        status, _ = await c.post(c.body())
        assert status == 200
        assert c.d.legs.get_nowait().ticket.leg == "local"
        leg = await soon(c.p.cancelled.get())
        assert c.p.withdrawn.get_nowait().key == leg.ticket.key


@pytest.mark.parametrize("prefill", [1, 2])
async def test_prefill_later_than_new_attempts_may_begin(cluster: Any, prefill: int) -> None:
    """The limits are related as by default: the one attempt that may follow needs no other engine."""
    async with cluster(prefill=prefill, timeouts={"prefill_s": 0.1, "retry_s": 0.05}) as c:
        c.p.script = silent
        status, answer = await c.post(c.body())
        assert (status, answer["choices"][0]["text"]) == (200, "Hello")
        failed = await soon(c.p.cancelled.get())
        assert c.p.withdrawn.get_nowait().key == failed.ticket.key
        ticket = c.d.legs.get_nowait().ticket
        assert (ticket.leg, ticket.key.attempt, ticket.offer) == ("local", 1, None)
        record = await c.record(answer["id"])
        assert (record["path"], record["attempts"], record["reasons"]) == ("local", 2, ["prefill_failed"])
        if prefill > 1:
            assert c.prefill[1].legs.empty()


async def test_only_one_attempt_follows_a_prefill_leg_that_was_so_late(cluster: Any) -> None:
    async with cluster(timeouts={"prefill_s": 0.1, "retry_s": 0.05}) as c:
        c.p.script, c.d.script = silent, failing(500)
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (502, "decode_failed")
        assert c.d.legs.qsize() == 1


@pytest.mark.parametrize(("stream", "limit"), [(True, "first_byte_s"), (False, "answer_s")])
async def test_decode_later_than_new_attempts_may_begin(cluster: Any, stream: bool, limit: str) -> None:
    """It was at work, as far as the router can know: another engine is not given the same."""
    async with cluster(decode=2, timeouts={limit: 0.1, "retry_s": 0.05}) as c:
        c.d.script = silent
        status, answer = await c.post(c.body(stream=stream))
        assert (status, answer["error"]["code"]) == (504, "decode_failed")
        assert c.decode[1].legs.empty()
        leg = await soon(c.d.cancelled.get())
        assert (await soon(c.d.withdrawn.get())).key == leg.ticket.key


async def test_prefill_leg_ends_when_its_engine_falls_silent(cluster: Any) -> None:
    """A stopped process takes connections, and does nothing with them."""
    async with cluster(poll_interval_s=0.01, timeouts={"poll_s": 0.05} | NO_ACCOUNT) as c:
        c.p.script = silent
        request = c.start(c.body())
        leg = await soon(c.p.legs.get())
        c.p.state_script = never
        status, answer = await soon(request)
        assert (status, answer["choices"][0]["text"]) == (200, "Hello")
        assert await soon(c.p.cancelled.get()) is leg
        assert c.d.legs.get_nowait().ticket.leg == "local"
        record = await c.record(answer["id"])
        assert (record["path"], record["reasons"]) == ("local", ["prefill_failed"])


async def test_prefill_engines_are_gone_then_local(cluster: Any) -> None:
    """The last attempt is kept for what needs the fewest engines."""
    async with cluster(prefill=4) as c:
        for engine in c.prefill:
            await engine.kill()
        status, answer = await c.post(c.body())
        assert status == 200
        record = await c.record(answer["id"])
        assert (record["path"], record["attempts"]) == ("local", 3)
        assert record["reasons"] == ["prefill_failed"]
        # Two were found dead; the next request finds the others.
        _, ready = await c.get("/ready")
        assert [e["healthy"] for e in ready["engines"]].count(False) == 2


async def test_prefill_fails_and_a_miss_is_an_error(cluster: Any) -> None:
    async with cluster(on_miss="error") as c:
        c.p.script = failing(500)
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (503, "prefill_failed")
        assert c.d.legs.empty()


async def test_forced_pull_without_prefill_engine(cluster: Any) -> None:
    async with cluster(prefill=0) as c:
        status, answer = await c.post(c.body(), headers={"x-kvhandoff-path": "pull"})
        assert status == 200
        record = await c.record(answer["id"])
        assert (record["requested_path"], record["path"]) == ("pull", "local")
        assert record["reasons"] == ["no_prefill_engine"]
    async with cluster(prefill=0, on_miss="error") as c:
        status, answer = await c.post(c.body(), headers={"x-kvhandoff-path": "pull"})
        assert (status, answer["error"]["code"]) == (503, "no_prefill_engine")
        assert (await c.post(c.body()))[0] == 200  # auto chooses local: nothing was missed


async def test_an_offer_of_another_handoff_is_refused(cluster: Any) -> None:
    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        assert leg.ticket is not None
        offer = {
            "key": {"handoff_id": "another", "attempt": 0},
            "source": {"engine_id": "p0", "epoch": "e"},
            "control_address": "tcp://127.0.0.1:1",
            "spans": [[0, 1]],
            "n_tokens": 4,
            "digest": "d",
        }
        return web.json_response({"kv_transfer_params": {"offer": offer, "prompt_token_ids": [1]}})

    async with cluster() as c:
        c.p.script = script
        assert (await c.post(c.body()))[0] == 200
        assert c.d.legs.get_nowait().ticket.leg == "local"


# ---- the decode leg ----


async def test_decode_refuses_the_connection_then_another_with_the_same_offer(cluster: Any) -> None:
    """Field cases 14 and 15a: never dispatched, so the offer is as good as before."""
    async with cluster(decode=2) as c:
        await c.d.kill()
        status, answer = await c.post(c.body())
        assert status == 200
        assert c.p.legs.qsize() == 1
        prefilled = c.p.legs.get_nowait().ticket
        ticket = c.decode[1].legs.get_nowait().ticket
        assert (ticket.leg, ticket.key, ticket.offer.key) == ("decode", prefilled.key, prefilled.key)
        assert c.p.withdrawn.empty()
        record = await c.record(answer["id"])
        assert (record["attempts"], record["reasons"]) == (2, ["decode_failed"])
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)


async def test_only_decode_engine_refuses_the_connection(cluster: Any) -> None:
    """Field case 14: the offer is withdrawn and the client told, at once."""
    async with cluster() as c:
        await c.d.kill()
        status, answer = await c.post(c.body())
        assert status == 503
        assert answer["error"]["code"] == "no_decode_engine"
        leg = c.p.legs.get_nowait()
        assert (await soon(c.p.withdrawn.get())).key == leg.ticket.key
        assert (await c.get("/ready"))[0] == 503
        # From now on no prompt is computed in vain.
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        assert c.p.legs.empty()


async def test_connection_in_time_is_not_had_then_another(cluster: Any) -> None:
    """A burst may be more than a live engine accepts at once: tried elsewhere, but it is not marked down."""
    async with cluster(decode=2, timeouts={"connect_s": 0.3} | NO_ACCOUNT) as c:
        await c.d.kill()
        async with swamped(c.d.port):
            status, _ = await c.post(c.body())
            assert status == 200
            assert c.p.legs.qsize() == 1
            assert c.p.withdrawn.empty()
            assert c.decode[1].legs.get_nowait().ticket.leg == "decode"
            _, ready = await c.get("/ready")
            assert [engine["problem"] for engine in ready["engines"]] == [None] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [reset, failing(500), empty_stream])
async def test_decode_fails_before_its_first_byte(cluster: Any, script: Any, stream: bool) -> None:
    """Field case 15b: it may have begun, so the whole attempt is given up and made anew elsewhere."""
    async with cluster(decode=2) as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", json=c.body(stream=stream)) as response:
            assert response.status == 200
            body = await response.read()
        assert (b"[DONE]" in body) is stream
        first, second = c.p.legs.get_nowait().ticket, c.p.legs.get_nowait().ticket
        assert (first.key.attempt, second.key.attempt) == (0, 1)
        assert c.p.withdrawn.get_nowait().key == first.key
        assert c.d.legs.get_nowait().ticket.key == first.key
        assert c.decode[1].legs.get_nowait().ticket.key == second.key
        record = await c.record(response.headers["X-Request-Id"])
        assert (record["attempts"], record["reasons"]) == (2, ["decode_failed"])
        assert record["decode"]["engine_id"] == c.decode[1].engine_id
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)


async def test_decode_late_then_another(cluster: Any) -> None:
    async with cluster(decode=2, timeouts={"first_byte_s": 0.3, "answer_s": 0.3}) as c:
        c.d.script = silent
        assert (await c.post(c.body()))[0] == 200
        leg = await soon(c.d.cancelled.get())
        assert c.p.withdrawn.get_nowait().key == leg.ticket.key


async def test_attempts_are_bounded_in_number(cluster: Any) -> None:
    async with cluster(max_attempts=3) as c:
        c.d.script = failing(500)
        status, answer = await c.post(c.body())
        assert status == 502
        assert answer["error"]["code"] == "decode_failed"
        assert "status 500" in answer["error"]["message"]
        assert c.d.legs.qsize() == 3
        keys = [c.p.legs.get_nowait().ticket.key for _ in range(3)]
        withdrawn = [await soon(c.p.withdrawn.get()) for _ in range(3)]
        assert [ticket.key for ticket in withdrawn] == keys


async def test_attempts_are_bounded_in_time(cluster: Any) -> None:
    async with cluster(timeouts={"retry_s": 1e-6}) as c:
        c.d.script = failing(500)
        assert (await c.post(c.body()))[0] == 502
        assert c.d.legs.qsize() == 1


async def test_connection_of_the_last_attempt_is_reset(cluster: Any) -> None:
    async with cluster(max_attempts=1) as c:
        c.d.script = reset
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (502, "decode_failed")
        wanted = f"decode engine {c.d.engine_id} at {c.d.url}: it ended before its answer was complete"
        assert answer["error"]["message"] == wanted


async def test_deadline_of_the_last_attempt(cluster: Any) -> None:
    async with cluster(max_attempts=1, timeouts={"answer_s": 0.05}) as c:
        c.d.script = silent
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (504, "decode_failed")
        await soon(c.d.cancelled.get())
        await soon(c.p.withdrawn.get())


async def test_json_answer_breaks_off(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Field case 15c: the engine has answered, so the request is not replayed."""
    async with cluster(decode=2, timeouts=NO_ACCOUNT) as c:
        c.d.script = cut_short
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (502, "decode_failed")
        wanted = f"decode engine {c.d.engine_id} at {c.d.url} ended before its answer was complete"
        assert answer["error"]["message"] == wanted
        assert wanted not in caplog.text  # the log has the network's words
        assert "its answer broke off: the connection ended before the answer was complete" in caplog.text
        assert c.decode[1].legs.empty()
        record = await c.record(c.d.legs.get_nowait().ticket.key.handoff_id)
        assert (record["status"], record["reasons"]) == (502, ["decode_failed"])


@pytest.mark.parametrize("between", [True, False])
async def test_stream_breaks_off(cluster: Any, between: bool) -> None:
    """Field case 15c: an error event between events; in the middle of one a cut connection. No replay."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        whole, last = events(leg, "a", "b")

        async def before(index: int) -> None:
            if index == 1:
                await engine.gate.wait()
                assert leg.request.transport is not None
                leg.request.transport.abort()

        return await streamed(engine, leg, [whole if between else whole + last[:20], b""], before=before)

    async with cluster(decode=2, timeouts=NO_ACCOUNT) as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", json=c.body(stream=True)) as response:
            assert response.status == 200
            leg = c.d.legs.get_nowait()
            whole, last = events(leg, "a", "b")
            assert await soon(response.content.readany()) == (whole if between else whole + last[:20])
            c.d.gate.set()
            if between:
                rest = await soon(response.content.read())
                wanted = f"decode engine {c.d.engine_id} at {c.d.url} ended before its answer was complete"
                assert rest.startswith(f'data: {{"error":{{"message":"{wanted}",'.encode())
                assert rest.endswith(b"}\n\n")
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await soon(response.content.read())
        assert c.decode[1].legs.empty()
        assert c.p.legs.qsize() == 1
        record = await c.record(response.headers["X-Request-Id"])
        assert (record["status"], record["reasons"]) == (502, ["decode_failed"])
        assert record["incomplete"] is True
        await c.at_rest()


async def test_stream_stands_still(cluster: Any) -> None:
    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        async def before(index: int) -> None:
            if index == 1:
                await asyncio.Event().wait()

        return await streamed(engine, leg, events(leg, "a", "b"), before=before)

    async with cluster(timeouts={"idle_s": 0.05}) as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", json=c.body(stream=True)) as response:
            rest = await soon(response.content.read())
        assert b"sent nothing for 0.05 s before its answer was complete" in rest
        await soon(c.d.cancelled.get())
