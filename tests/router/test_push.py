"""Push: both legs at once, what follows the failure of each, and nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from kvhandoff.core.clock import monotonic
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.phases import Phase
from kvhandoff.handoff.messages import OfferRef
from tests.router.conftest import NO_ACCOUNT
from tests.router.engines import (
    DONE,
    WAIT_S,
    Leg,
    MockEngine,
    decode,
    events,
    failing,
    held,
    once,
    prefill,
    reset,
    soon,
    streamed,
    until,
)
from tests.router.test_failures import cut_short, empty_stream, never, no_params, silent
from tests.router.test_leaving import leave

PUSH = {"x-kvhandoff-path": "push"}


def push(c: Any, **fields: Any) -> asyncio.Task[tuple[int, Any]]:
    return c.start(c.body(**fields), headers=PUSH)  # type: ignore[no-any-return]


async def both(c: Any) -> tuple[Leg, Leg]:
    """The two legs of one request."""
    return await soon(c.p.legs.get()), await soon(c.d.legs.get())


async def gated_stream(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """A first content, and the rest after the gate."""

    async def before(index: int) -> None:
        if index == 1:
            await engine.gate.wait()

    return await streamed(engine, leg, [*events(leg, "a", "b"), DONE], before=before)


@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_are_sent_at_once(cluster: Any, stream: bool) -> None:
    """The decode leg is there while the prefill leg is unanswered, and the answer is the decode leg's."""
    async with cluster() as c:
        c.p.script = c.d.script = held
        request = asyncio.create_task(
            c.session.post(
                c.url + "/v1/completions", json=c.body(stream=stream, cache_salt="s"), headers=PUSH
            )
        )
        p, d = await both(c)
        key = p.ticket.key
        assert (p.ticket.leg, p.ticket.push, p.ticket.audience) == ("prefill", True, c.p.identity)
        assert p.ticket.peers == (f"tcp://127.0.0.1:{c.d.port + 1}",)
        assert p.body["max_tokens"] == 1
        assert (d.ticket.leg, d.ticket.offer, d.ticket.key) == ("decode", None, key)
        assert d.ticket.push_from == OfferRef(
            key=key, source=c.p.identity, control_address=f"tcp://127.0.0.1:{c.p.port + 1}"
        )
        assert d.ticket.on_miss == "recompute"
        assert (p.ticket.cache_salt, d.ticket.cache_salt) == ("s", "s")
        assert set(d.body["kv_transfer_params"]) == {"ticket"}  # it tokenizes by itself
        c.p.gate.set()
        c.d.gate.set()
        async with await request as response:
            assert response.status == 200
            text = await response.text()
        assert ("[DONE]" in text) is stream
        record = await c.record(key.handoff_id)
        assert (record["path"], record["binding"], record["rebound"]) == ("push", "early", 0)
        assert (record["kv_source"], record["reasons"]) == ("transferred", ["forced"])
        assert record["incomplete"] is False
        assert record["prefill"]["engine_id"] == c.p.engine_id
        # The client waits for the decode leg alone; the prefill leg ran beside it.
        order = [phase.value for phase in Phase]
        assert list(record["phases"]) == ["route", "decode_network", "decode_queue", "first_step"]
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)
        beside = ["prefill_network", "prefill_queue", "prefill_compute", "prefill_offer"]
        assert list(record["prefill_phases"]) == sorted(beside, key=order.index)
        assert all(seconds >= 0 for seconds in record["prefill_phases"].values())
        await c.at_rest()
        assert c.p.withdrawn.empty()


async def test_no_prefill_engine(cluster: Any) -> None:
    async with cluster(prefill=0) as c:
        status, answer = await c.post(c.body(), headers=PUSH)
        record = await c.record(answer["id"])
        assert (status, record["path"], record["reasons"]) == (200, "local", ["no_prefill_engine"])
        assert record["binding"] is None
    async with cluster(prefill=0, on_miss="error") as c:
        status, answer = await c.post(c.body(), headers=PUSH)
        assert (status, answer["error"]["code"]) == (503, "no_prefill_engine")


async def test_no_decode_engine(cluster: Any) -> None:
    """No prompt is computed for a fleet that can't decode."""
    async with cluster(poll_interval_s=0.02) as c:
        await c.d.kill()
        await until(lambda: c.p.cursors)
        async with asyncio.timeout(WAIT_S):
            while (await c.get("/ready"))[0] == 200:
                pass
        status, answer = await c.post(c.body(), headers=PUSH)
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        assert c.p.legs.empty()


@pytest.mark.parametrize(
    ("fields", "waiting", "free", "path"),
    [
        ({"prompt": [7] * 16}, 0, 1000, "local"),
        ({"prompt": [7] * 512}, 0, 1000, "pull"),
        ({"prompt": [7] * 513}, 0, 1000, "push"),
        ({"prompt": [7] * 513}, 0, 33, "push"),
        ({"prompt": [7] * 513}, 0, 32, "pull"),
        ({"prompt": [7] * 513}, 1, 1000, "pull"),
    ],
)
async def test_auto(cluster: Any, fields: dict[str, Any], waiting: int, free: int, path: str) -> None:
    """Pushed when there is more than one chunk, and room for it on the decode engine."""
    async with cluster(poll_interval_s=0.01) as c:
        c.d.waiting, c.d.free = waiting, free
        seen = len(c.d.cursors)
        await until(lambda: len(c.d.cursors) > seen + 1)
        _, answer = await c.post(c.body(**fields))
        record = await c.record(answer["id"])
        assert (record["requested_path"], record["path"]) == ("auto", path)
        assert record["reasons"] == (["short_prompt"] if path == "local" else [])


async def test_load_is_reserved_on_both_at_the_decision(cluster: Any) -> None:
    async with cluster(prefill=2, decode=2) as c:
        for engine in c.engines:
            engine.script = held
        requests = [push(c) for _ in range(10)]
        await until(lambda: sum(engine.legs.qsize() for engine in c.engines) == 20)
        assert [engine.legs.qsize() for engine in c.engines] == [5, 5, 5, 5]
        for engine in c.engines:
            engine.gate.set()
        assert [status for status, _ in await soon(asyncio.gather(*requests))] == [200] * 10
        await c.at_rest()


# ---- the prefill leg fails ----


@pytest.mark.parametrize("script", [reset, failing(500), failing(503), no_params, cut_short])
async def test_prefill_fails(cluster: Any, script: Any) -> None:
    """The decode engine is told by the withdrawal and computes the prompt; the client sees nothing of it."""
    async with cluster(prefill=2) as c:
        c.p.script, c.d.script = script, held
        request = push(c)
        p, d = await both(c)
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        assert c.d.cancelled.empty()
        c.d.gate.set()
        status, answer = await soon(request)
        assert (status, answer["choices"][0]["text"]) == (200, "Hello")
        assert c.d.legs.empty()
        assert c.prefill[1].legs.empty()
        record = await c.record(answer["id"])
        assert (record["path"], record["attempts"], record["rebound"]) == ("push", 1, 0)
        assert record["reasons"] == ["forced", "prefill_failed"]
        assert (record["prefill"], record["prefill_phases"], record["incomplete"]) == (None, {}, False)
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)
        await c.at_rest()
        assert c.p.withdrawn.empty()  # once
        assert d.ticket.key == p.ticket.key


async def test_prefill_is_late(cluster: Any) -> None:
    async with cluster(timeouts={"prefill_s": 0.05}) as c:
        c.p.script, c.d.script = silent, held
        request = push(c)
        p, _ = await both(c)
        assert await soon(c.p.cancelled.get()) is p
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        c.d.gate.set()
        assert (await soon(request))[0] == 200


async def test_prefill_engine_falls_silent(cluster: Any) -> None:
    async with cluster(poll_interval_s=0.01, timeouts={"poll_s": 0.05} | NO_ACCOUNT) as c:
        c.p.script, c.d.script = silent, held
        request = push(c)
        p, _ = await both(c)
        c.p.state_script = never
        assert await soon(c.p.cancelled.get()) is p
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        c.d.gate.set()
        status, answer = await soon(request)
        record = await c.record(answer["id"])
        assert (status, record["attempts"], record["reasons"]) == (200, 1, ["forced", "prefill_failed"])


async def test_prefill_engine_is_gone(cluster: Any) -> None:
    async with cluster() as c:
        c.d.script = held
        await c.p.kill()
        request = push(c)
        await soon(c.d.legs.get())
        async with asyncio.timeout(WAIT_S):
            while (await c.get("/ready"))[1]["engines"][0]["healthy"]:
                pass
        c.d.gate.set()
        status, answer = await soon(request)
        record = await c.record(answer["id"])
        assert (status, record["reasons"]) == (200, ["forced", "prefill_failed"])
        assert record["incomplete"] is False


async def test_prefill_engine_has_restarted(cluster: Any) -> None:
    async with cluster() as c:
        c.d.script = held
        await c.p.restart()
        request = push(c)
        await soon(c.d.legs.get())
        await until(lambda: len(c.p.cursors) > 1)  # the router has looked what became of it
        c.d.gate.set()
        status, answer = await soon(request)
        record = await c.record(answer["id"])
        assert (status, record["reasons"]) == (200, ["forced", "epoch_changed"])
        c.d.script = decode
        assert (await c.post(c.body(), headers=PUSH))[0] == 200
        assert c.p.legs.get_nowait().ticket.audience == c.p.identity


@pytest.mark.parametrize("also", [True, False])
async def test_prefill_refuses_the_request(cluster: Any, also: bool) -> None:
    """A 4xx is the client's when the decode engine says so too; it is no failure of the prefill engine. When
    only the prefill engine's limits are too small, the decode engine goes on alone (field case 7)."""
    async with cluster() as c:
        c.p.script, c.d.script = failing(400, "context_length_exceeded"), held
        request = push(c)
        p, _ = await both(c)
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        c.d.script = decode
        if also:
            c.d.script = failing(400, "context_length_exceeded")
            await leave(request)
            await soon(c.d.cancelled.get())
            status, answer = await c.post(c.body(), headers=PUSH)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert c.d.legs.qsize() == 1
            return
        c.d.gate.set()
        status, answer = await soon(request)
        record = await c.record(answer["id"])
        assert (status, record["reasons"], record["prefill"]) == (200, ["forced"], None)


# ---- the decode leg fails ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [reset, failing(500), empty_stream])
async def test_decode_fails_while_prefill_runs(cluster: Any, script: Any, stream: bool) -> None:
    """Another decode engine is pushed to; the prefill leg goes on. The old leg is withdrawn before."""
    async with cluster(decode=2) as c:
        c.p.script, c.d.script, c.decode[1].script = held, script, held
        request = asyncio.create_task(
            c.session.post(c.url + "/v1/completions", json=c.body(stream=stream), headers=PUSH)
        )
        p, d = await both(c)
        again = await soon(c.decode[1].legs.get())
        assert c.d.withdrawn.get_nowait().key == d.ticket.key == p.ticket.key
        assert again.ticket.key == HandoffKey(p.ticket.key.handoff_id, 1)
        assert again.ticket.push_from == d.ticket.push_from
        assert again.ticket.push_from.key == p.ticket.key
        c.p.gate.set()
        c.decode[1].gate.set()
        async with await request as response:
            assert response.status == 200
            await response.read()
        record = await c.record(p.ticket.key.handoff_id)
        assert (record["path"], record["attempts"], record["rebound"]) == ("push", 2, 1)
        assert record["reasons"] == ["forced", "decode_failed", "rebound"]
        assert record["decode"]["engine_id"] == c.decode[1].engine_id
        assert record["incomplete"] is False
        assert record["phases"]["retry"] > 0
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)
        await c.at_rest()
        assert c.p.legs.empty()
        assert c.p.withdrawn.empty()


async def test_decode_is_late_when_prefill_is_done(cluster: Any) -> None:
    """It has its time from there on; then another one pulls what has been computed."""
    async with cluster(decode=2, timeouts={"answer_s": 0.3}) as c:
        c.d.script = silent
        request = push(c)
        p, d = await both(c)
        assert await soon(c.d.cancelled.get()) is d
        assert (await soon(c.d.withdrawn.get())).key == d.ticket.key
        assert (await soon(c.decode[1].legs.get())).ticket.offer.key == p.ticket.key
        assert (await soon(request))[0] == 200


async def test_a_late_prefill_leg_takes_no_time_from_the_decode_leg(cluster: Any) -> None:
    """The decode engine computes from when the prefill leg has come to nothing, and has its whole time."""
    limit_s = 1.0
    async with cluster(timeouts={"prefill_s": limit_s, "answer_s": limit_s, "retry_s": 0.05}) as c:

        async def alone(engine: MockEngine, leg: Leg) -> web.StreamResponse:
            began = monotonic()
            await soon(c.p.withdrawn.get())
            # Later than it would have had to answer, counted from the leg's sending.
            await until(lambda: monotonic() > began + 1.2 * limit_s)
            return await decode(engine, leg)

        c.p.script, c.d.script = silent, alone
        status, answer = await soon(push(c))
        assert status == 200, answer
        record = await c.record(answer["id"])
        assert (record["attempts"], record["reasons"]) == (1, ["forced", "prefill_failed"])


async def test_decode_fails_when_prefill_is_done(cluster: Any) -> None:
    """The other decode engine pulls: the offer is as good for it."""

    async def fail_later(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        await engine.gate.wait()
        return await reset(engine, leg)

    async with cluster(decode=2) as c:
        c.d.script = fail_later
        request = push(c)
        p, _ = await both(c)
        await until(lambda: c.p.records)
        await c.rested(c.p)
        c.d.gate.set()
        status, answer = await soon(request)
        leg = c.decode[1].legs.get_nowait()
        assert status == 200
        assert (leg.ticket.push_from, leg.ticket.offer.key) == (None, p.ticket.key)
        assert leg.ticket.key.attempt == 1
        assert leg.body["kv_transfer_params"]["prompt_token_ids"] == [5, 6, 7, 8]
        record = await c.record(answer["id"])
        assert (record["path"], record["binding"], record["rebound"]) == ("pull", "late", 1)
        assert record["reasons"] == ["forced", "decode_failed", "rebound"]
        assert record["prefill_phases"]["prefill_network"] > 0
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)
        await c.at_rest()
        assert c.p.withdrawn.empty()


async def test_decode_refuses_the_connection(cluster: Any) -> None:
    """It never began: the key is as good as before."""
    async with cluster(decode=2) as c:
        c.p.script = held
        await c.d.kill()
        request = push(c)
        p = await soon(c.p.legs.get())
        leg = await soon(c.decode[1].legs.get())
        assert leg.ticket.key == leg.ticket.push_from.key == p.ticket.key
        c.p.gate.set()
        status, answer = await soon(request)
        record = await c.record(answer["id"])
        assert (status, record["attempts"], record["rebound"]) == (200, 2, 1)


async def test_only_decode_engine_refuses_the_connection(cluster: Any) -> None:
    """Field case 14: the prefill leg is closed and withdrawn, and the client told, at once."""
    async with cluster() as c:
        c.p.script = held
        await c.d.kill()
        status, answer = await soon(push(c))
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        p = await soon(c.p.legs.get())
        assert await soon(c.p.cancelled.get()) is p
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        await c.at_rest()


async def test_only_decode_engine_fails(cluster: Any) -> None:
    """It is tried again with the same prefill leg, which ends with the last attempt (field case 13)."""
    async with cluster(timeouts=NO_ACCOUNT) as c:
        c.p.script, c.d.script = held, failing(500)
        status, answer = await soon(push(c))
        assert (status, answer["error"]["code"]) == (502, "decode_failed")
        legs = [c.d.legs.get_nowait() for _ in range(3)]
        p = c.p.legs.get_nowait()
        assert [leg.ticket.key.attempt for leg in legs] == [0, 1, 2]
        assert {leg.ticket.push_from.key for leg in legs} == {p.ticket.key}
        assert await soon(c.p.cancelled.get()) is p
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        await c.at_rest()
        record = await c.record(p.ticket.key.handoff_id)
        assert (record["rebound"], record["reasons"]) == (0, ["forced", "decode_failed"])


async def test_both_fail(cluster: Any) -> None:
    """All begins again, with another prefill engine."""
    async with cluster(prefill=2, decode=2) as c:
        c.p.script, c.d.script = failing(500), held
        request = push(c)
        first, d = await both(c)
        await soon(c.p.withdrawn.get())
        assert c.d.records == []
        await c.d.kill()
        status, answer = await soon(request)
        assert status == 200
        p, again = c.prefill[1].legs.get_nowait(), c.decode[1].legs.get_nowait()
        assert p.ticket.key == again.ticket.key == again.ticket.push_from.key
        assert p.ticket.key == HandoffKey(first.ticket.key.handoff_id, 1)
        record = await c.record(answer["id"])
        assert (record["path"], record["attempts"], record["rebound"]) == ("push", 2, 0)
        assert record["reasons"] == ["forced", "prefill_failed", "decode_failed"]
        assert record["prefill"]["engine_id"] == c.prefill[1].engine_id
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)
        assert d.ticket.key == first.ticket.key


async def test_both_fail_and_no_other_prefill_engine(cluster: Any) -> None:
    async with cluster(decode=2) as c:
        c.p.script, c.d.script = failing(500), held
        request = push(c)
        await both(c)
        await soon(c.p.withdrawn.get())
        await c.d.kill()
        status, answer = await soon(request)
        leg = c.decode[1].legs.get_nowait()
        assert (status, leg.ticket.leg, leg.ticket.key.attempt) == (200, "local", 1)
        assert (await c.record(answer["id"]))["path"] == "local"


async def test_refusal_of_the_decode_engine_ends_the_prefill_leg(cluster: Any) -> None:
    async with cluster(decode=2) as c:
        c.p.script, c.d.script = held, failing(400)
        assert (await soon(push(c)))[0] == 400
        p = c.p.legs.get_nowait()
        assert await soon(c.p.cancelled.get()) is p
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        assert c.decode[1].legs.empty()


async def test_miss_shown_as_error(cluster: Any) -> None:
    async with cluster(on_miss="error", decode=2) as c:
        c.p.script, c.d.script = held, once(failing(503, "push_timeout"))
        status, answer = await soon(push(c))
        assert (status, answer["error"]["code"]) == (503, "push_timeout")
        assert c.d.legs.get_nowait().ticket.on_miss == "error"
        await soon(c.p.cancelled.get())
        await soon(c.p.withdrawn.get())
        assert c.decode[1].legs.empty()


# ---- the answer comes first, or the client leaves ----


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_answers_a_moment_after_decode(cluster: Any, stream: bool) -> None:
    """It is waited for: a leg that is about to end by itself is not aborted."""
    async with cluster(timeouts={"linger_s": 60.0}) as c:
        c.p.script = held
        async with c.session.post(
            c.url + "/v1/completions", json=c.body(stream=stream), headers=PUSH
        ) as response:
            assert response.status == 200
            await response.read()
        c.p.gate.set()
        record = await c.record(response.headers["X-Request-Id"])
        assert (record["incomplete"], record["prefill"]["engine_id"]) == (False, c.p.engine_id)
        await c.at_rest()
        assert c.p.cancelled.empty()
        assert c.p.withdrawn.empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_is_not_needed_any_more(cluster: Any, stream: bool) -> None:
    """The decode engine did without: what is computed for nobody is ended, while the answer still streams."""
    async with cluster(timeouts={"linger_s": 0.05} | NO_ACCOUNT) as c:
        c.p.script = silent
        c.d.script = gated_stream if stream else decode
        request = asyncio.create_task(
            c.session.post(c.url + "/v1/completions", json=c.body(stream=stream), headers=PUSH)
        )
        p = await soon(c.p.legs.get())
        assert await soon(c.p.cancelled.get()) is p
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        c.d.gate.set()
        async with await request as response:
            assert response.status == 200
            await response.read()
        await c.at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_leaves_before_the_first_byte(cluster: Any, stream: bool) -> None:
    """Field case 30: both legs end, and the offer to be is withdrawn."""
    async with cluster(timeouts=NO_ACCOUNT) as c:
        c.p.script = c.d.script = held
        request = push(c, stream=stream)
        p, d = await both(c)
        await leave(request)
        assert await soon(c.d.cancelled.get()) is d
        assert await soon(c.p.cancelled.get()) is p
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        await c.at_rest()
        record = await c.record(p.ticket.key.handoff_id)
        assert (record["status"], record["reasons"]) == (499, ["forced", "client_aborted"])


async def test_client_leaves_when_prefill_is_done(cluster: Any) -> None:
    async with cluster() as c:
        c.d.script = held
        request = push(c)
        p, d = await both(c)
        await until(lambda: c.p.records)
        await c.rested(c.p)
        await leave(request)
        assert await soon(c.d.cancelled.get()) is d
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        await c.at_rest()


async def test_client_leaves_in_the_stream(cluster: Any) -> None:
    async with cluster(timeouts=NO_ACCOUNT) as c:
        c.d.script = gated_stream
        async with c.session.post(
            c.url + "/v1/completions", json=c.body(stream=True), headers=PUSH
        ) as response:
            await soon(response.content.readany())
            response.close()
        assert await soon(c.d.cancelled.get()) is await soon(c.d.legs.get())
        await c.at_rest()
        assert c.p.withdrawn.empty()  # the decode engine has what was offered


async def test_client_leaves_between_attempts(cluster: Any) -> None:
    """While the decode leg that failed is being withdrawn."""
    async with cluster(decode=2) as c:
        withdrawing = asyncio.Event()

        async def hold_withdraw() -> None:
            withdrawing.set()
            await asyncio.Event().wait()

        c.d.withdraw_script = hold_withdraw
        c.p.script, c.d.script = held, failing(500)
        request = push(c)
        p = await soon(c.p.legs.get())
        await soon(withdrawing.wait())
        await leave(request)
        assert await soon(c.p.cancelled.get()) is p
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        await c.at_rest()
        assert c.decode[1].legs.empty()


async def test_killed_prefill_engine_with_many_in_flight(cluster: Any) -> None:
    """Field case 13: every request goes on without it, under its own decode leg."""
    async with cluster() as c:
        c.p.script = c.d.script = held
        requests = [push(c) for _ in range(50)]
        await until(lambda: c.p.legs.qsize() == c.d.legs.qsize() == 50)
        await c.p.kill()
        c.d.gate.set()
        answers = await soon(asyncio.gather(*requests))
        assert [status for status, _ in answers] == [200] * 50
        assert c.d.legs.qsize() == 50
        await c.at_rest()
        c.p.script = prefill
