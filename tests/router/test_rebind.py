"""Re-binding by an operator: in each state of a request, and never with two live attempts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvhandoff.core.ids import HandoffKey
from tests.router.conftest import NO_ACCOUNT
from tests.router.engines import MODEL, WAIT_S, Leg, decode, failing, held, soon, until
from tests.router.test_failures import reset
from tests.router.test_leaving import leave
from tests.router.test_push import both, gated_stream, push

SLOW_WITHDRAWAL = {"withdraw_s": 60.0}
"""A withdrawal that a test holds up is waited for."""


async def rebind(c: Any, leg: Leg | str, decode: str | None = None, raw: bytes | None = None) -> Any:
    """(status, JSON body) of the operator's call."""
    handoff_id = leg if isinstance(leg, str) else leg.ticket.key.handoff_id  # type: ignore[union-attr]
    body = raw if raw is not None else b"" if decode is None else f'{{"decode": "{decode}"}}'.encode()
    async with c.session.post(f"{c.url}/v1/handoffs/{handoff_id}/rebind", data=body) as response:
        return response.status, await response.json()


def code(answer: Any) -> tuple[int, str]:
    status, body = answer
    return status, body["error"]["code"]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_pushed_request_while_prefill_runs(cluster: Any, named: bool, stream: bool) -> None:
    """The prefill leg goes on, and the new decode engine is pushed to; the old one's leg is closed and
    withdrawn before the new one's is sent (rule 5)."""
    async with cluster(decode=2, timeouts=SLOW_WITHDRAWAL) as c:
        c.p.script = c.d.script = c.decode[1].script = held
        withdrawing, go_on = asyncio.Event(), asyncio.Event()

        async def hold_withdraw() -> None:
            withdrawing.set()
            await go_on.wait()

        c.d.withdraw_script = hold_withdraw
        request = push(c, stream=stream) if not stream else push_stream(c)
        p, d = await both(c)
        moved = asyncio.create_task(rebind(c, d, c.decode[1].engine_id if named else None))
        assert await soon(c.d.cancelled.get()) is d
        await soon(withdrawing.wait())
        assert c.decode[1].legs.empty()
        go_on.set()
        status, answer = await soon(moved)
        again = await soon(c.decode[1].legs.get())
        assert c.d.withdrawn.get_nowait().key == d.ticket.key
        identity = c.decode[1].identity
        assert (status, answer) == (
            200,
            {
                "handoff_id": p.ticket.key.handoff_id,
                "attempt": 1,
                "path": "push",
                "decode": {"engine_id": identity.engine_id, "epoch": identity.epoch},
            },
        )
        assert again.ticket.key == HandoffKey(p.ticket.key.handoff_id, 1)
        assert again.ticket.push_from == d.ticket.push_from
        assert c.p.cancelled.empty()
        c.p.gate.set()
        c.decode[1].gate.set()
        assert (await soon(request))[0] == 200
        record = await c.record(p.ticket.key.handoff_id)
        assert (record["path"], record["binding"], record["rebound"]) == ("push", "early", 1)
        assert record["reasons"] == ["forced", "rebound"]
        assert record["decode"]["engine_id"] == c.decode[1].engine_id
        assert record["incomplete"] is False
        assert record["phases"]["retry"] > 0
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)
        await c.at_rest()
        assert c.p.legs.empty()
        assert c.p.withdrawn.empty()


def push_stream(c: Any) -> asyncio.Task[tuple[int, str]]:
    async def ask() -> tuple[int, str]:
        async with c.session.post(
            c.url + "/v1/completions", json=c.body(stream=True), headers={"x-kvhandoff-path": "push"}
        ) as response:
            return response.status, await response.text()

    return asyncio.create_task(ask())


@pytest.mark.parametrize("path", ["push", "pull"])
async def test_request_whose_prefill_is_done(cluster: Any, path: str) -> None:
    """The new decode engine pulls, by the offer that was made for the old one."""
    async with cluster(decode=2) as c:
        c.d.script = held
        request = c.start(c.body(), headers={"x-kvhandoff-path": path})
        p, d = await both(c)
        await until(lambda: c.p.records)
        await c.rested(c.p)
        status, answer = await rebind(c, d)
        assert (status, answer["path"], answer["attempt"]) == (200, "pull", 1)
        assert (await soon(c.d.withdrawn.get())).key == d.ticket.key
        leg = await soon(c.decode[1].legs.get())
        assert (leg.ticket.push_from, leg.ticket.offer.key) == (None, p.ticket.key)
        assert leg.ticket.key == HandoffKey(p.ticket.key.handoff_id, 1)
        assert leg.body["kv_transfer_params"]["prompt_token_ids"] == [5, 6, 7, 8]
        assert (await soon(request))[0] == 200
        record = await c.record(p.ticket.key.handoff_id)
        assert (record["path"], record["binding"], record["rebound"]) == ("pull", "late", 1)
        assert record["reasons"] == ["forced", "rebound"]
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=1e-3)
        assert ("prefill_network" in record["phases"]) is (path == "pull")
        assert ("prefill_network" in record["prefill_phases"]) is (path == "push")
        await c.at_rest()
        assert c.p.legs.empty()
        assert c.p.withdrawn.empty()


async def test_again_and_back(cluster: Any) -> None:
    """An order is no failure: it takes none of the attempts."""
    async with cluster(decode=2, max_attempts=2) as c:
        c.p.script = c.d.script = c.decode[1].script = held
        request = push(c)
        p, leg = await both(c)
        for attempt in range(1, 5):
            engine = c.decode[attempt % 2]
            assert (await rebind(c, leg))[0] == 200
            leg = await soon(engine.legs.get())
            assert leg.ticket.key.attempt == attempt
        await c.d.kill()
        leg = await soon(c.decode[1].legs.get())
        assert leg.ticket.key.attempt == 5
        c.p.gate.set()
        c.decode[1].gate.set()
        assert (await soon(request))[0] == 200
        record = await c.record(p.ticket.key.handoff_id)
        assert (record["rebound"], record["attempts"]) == (5, 6)


async def test_prefill_has_failed_before(cluster: Any) -> None:
    """There is no prefill leg to keep: all begins again, on the engine that was asked for."""
    async with cluster(prefill=2, decode=2) as c:
        c.p.script, c.d.script = failing(500), held
        request = push(c)
        first, d = await both(c)
        await soon(c.p.withdrawn.get())
        await c.rested(c.p)
        status, answer = await rebind(c, d, c.decode[1].engine_id)
        assert (status, answer["path"]) == (200, "push")
        leg, p = await soon(c.decode[1].legs.get()), await soon(c.prefill[1].legs.get())
        assert leg.ticket.key == p.ticket.key == HandoffKey(first.ticket.key.handoff_id, 1)
        assert leg.ticket.push_from.key == p.ticket.key
        assert (await soon(request))[0] == 200


async def test_new_decode_engine_fails(cluster: Any) -> None:
    """As any decode leg: the request goes on elsewhere, with the same prefill leg."""
    async with cluster(decode=2) as c:
        c.p.script = c.d.script = held
        c.decode[1].script = reset
        request = push(c)
        p, d = await both(c)
        assert (await rebind(c, d))[0] == 200
        again = await soon(c.d.legs.get())
        assert again.ticket.key.attempt == 2
        assert again.ticket.push_from.key == p.ticket.key
        c.p.gate.set()
        c.d.gate.set()
        assert (await soon(request))[0] == 200
        assert (await c.record(p.ticket.key.handoff_id))["rebound"] == 2


# ---- refused ----


async def test_unknown_and_bad_orders(cluster: Any) -> None:
    async with cluster(decode=2) as c:
        c.p.script = c.d.script = held
        assert code(await rebind(c, "unknown")) == (404, "handoff_not_found")
        request = push(c)
        _, d = await both(c)
        status, answer = await rebind(c, d, "nobody")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (
            400,
            "engine_not_found",
            "decode",
        )
        assert answer["error"]["message"] == "decode: got 'nobody', allowed is d0d0, d1d1"
        for raw, field, said in (
            (b"x", "body", "body: it must be a JSON object ("),
            (b"[]", "body", "body: got [], allowed is an object"),
            (b'{"decode":5}', "decode", "decode: got 5, allowed is a string or null"),
            (b'{"engine":"d1d1"}', "body", "body: got the unknown field 'engine', allowed are decode"),
            (b'{"decode":"d0d0","decode":null}', "decode", "decode: got 'd0d0' and null, allowed is one"),
            (b'{"decode":"\xff"}', "body", "body: it must be a JSON object (it is not valid UTF-8)"),
        ):
            status, answer = await rebind(c, d, raw=raw)
            assert (status, answer["error"]["param"]) == (400, field)
            assert answer["error"]["message"].startswith(said)
        assert code(await rebind(c, d, raw=b" " * 5000)) == (413, "body_too_large")
        assert code(await rebind(c, d, c.d.engine_id)) == (409, "not_rebound")
        async with c.session.get(f"{c.url}/v1/handoffs/x/rebind") as response:
            assert response.status == 405
        # All of it has left the request where it was.
        assert c.d.cancelled.empty()
        c.p.gate.set()
        c.d.gate.set()
        status, answer = await soon(request)
        assert status == 200
        assert (await c.record(answer["id"]))["rebound"] == 0
        # By now it has ended.
        status, refused = await rebind(c, answer["id"])
        assert (status, refused["error"]["code"]) == (409, "not_rebound")
        assert refused["error"]["message"] == "can't re-bind: the request has ended"


async def test_no_other_engine(cluster: Any) -> None:
    async with cluster() as c:
        c.d.script = held
        request = push(c)
        _, d = await both(c)
        status, answer = await rebind(c, d)
        assert (status, answer["error"]["code"]) == (409, "no_decode_engine")
        c.d.gate.set()
        assert (await soon(request))[0] == 200


async def test_engine_that_can_not_take_it(cluster: Any) -> None:
    async with cluster(decode=3, poll_interval_s=0.02) as c:
        c.d.script = held
        other, dead = c.decode[1:]
        other.model = "other"
        await dead.kill()
        await until(lambda: other.cursors)
        async with asyncio.timeout(WAIT_S):
            while (await c.get("/ready"))[1]["engines"][3]["healthy"]:
                pass
        seen = len(other.cursors)
        await until(lambda: len(other.cursors) > seen + 1)
        request = push(c)
        _, d = await both(c)
        assert code(await rebind(c, d, dead.engine_id)) == (409, "no_decode_engine")
        status, answer = await rebind(c, d, other.engine_id)
        assert (status, answer["error"]["code"]) == (409, "not_rebound")
        assert f"serves 'other', not '{MODEL}'" in answer["error"]["message"]
        assert code(await rebind(c, d)) == (409, "no_decode_engine")
        c.d.gate.set()
        assert (await soon(request))[0] == 200


async def test_local_path(cluster: Any) -> None:
    async with cluster(path="local", decode=2) as c:
        c.d.script = held
        request = c.start(c.body())
        d = await soon(c.d.legs.get())
        status, answer = await rebind(c, d)
        assert (status, answer["error"]["code"]) == (409, "not_rebound")
        assert "local" in answer["error"]["message"]
        c.d.gate.set()
        assert (await soon(request))[0] == 200


async def test_answer_has_begun(cluster: Any) -> None:
    async with cluster(decode=2) as c:
        c.d.script = gated_stream
        async with c.session.post(
            c.url + "/v1/completions", json=c.body(stream=True), headers={"x-kvhandoff-path": "push"}
        ) as response:
            await soon(response.content.readany())
            status, answer = await rebind(c, await soon(c.d.legs.get()))
            assert (status, answer["error"]["code"]) == (409, "not_rebound")
            assert "its answer has begun" in answer["error"]["message"]
            c.d.gate.set()
            assert (await soon(response.content.read())).endswith(b"[DONE]\n\n")
        assert c.decode[1].legs.empty()


async def test_pull_that_is_not_bound_yet(cluster: Any) -> None:
    async with cluster(decode=2, path="pull") as c:
        c.p.script = held
        request = c.start(c.body())
        p = await soon(c.p.legs.get())
        status, answer = await rebind(c, p)
        assert (status, answer["error"]["code"]) == (409, "not_rebound")
        assert answer["error"]["message"] == "can't re-bind: it has no decode engine yet"
        c.p.gate.set()
        assert (await soon(request))[0] == 200


async def test_two_orders_at_once(cluster: Any) -> None:
    async with cluster(decode=3, timeouts=SLOW_WITHDRAWAL) as c:
        for engine in c.engines:
            engine.script = held
        withdrawing, go_on = asyncio.Event(), asyncio.Event()

        async def hold_withdraw() -> None:
            withdrawing.set()
            await go_on.wait()

        c.d.withdraw_script = hold_withdraw
        request = push(c)
        _, d = await both(c)
        first = asyncio.create_task(rebind(c, d, c.decode[1].engine_id))
        await soon(withdrawing.wait())
        status, answer = await rebind(c, d, c.decode[2].engine_id)
        assert (status, answer["error"]["code"]) == (409, "not_rebound")
        assert "being moved already" in answer["error"]["message"]
        go_on.set()
        assert (await soon(first))[0] == 200
        await soon(c.decode[1].legs.get())
        for engine in c.engines:
            engine.gate.set()
        assert (await soon(request))[0] == 200
        assert c.decode[2].legs.empty()


async def test_client_leaves_while_it_is_moved(cluster: Any) -> None:
    """The order is told so, and no new leg is sent."""
    async with cluster(decode=2, timeouts=NO_ACCOUNT | SLOW_WITHDRAWAL) as c:
        c.p.script = c.d.script = held
        withdrawing = asyncio.Event()

        async def hold_withdraw() -> None:
            withdrawing.set()
            await asyncio.Event().wait()

        c.d.withdraw_script = hold_withdraw
        request = push(c)
        p, d = await both(c)
        order = asyncio.create_task(rebind(c, d))
        await soon(withdrawing.wait())
        await leave(request)
        assert code(await soon(order)) == (409, "not_rebound")
        assert await soon(c.p.cancelled.get()) is p
        assert (await soon(c.p.withdrawn.get())).key == p.ticket.key
        await c.at_rest()
        assert c.decode[1].legs.empty()


async def test_target_dies_while_it_is_moved(cluster: Any) -> None:
    """Another one takes the request; the order's answer says which."""
    async with cluster(decode=3, poll_interval_s=0.02, timeouts=SLOW_WITHDRAWAL) as c:
        for engine in c.engines:
            engine.script = held
        withdrawing, go_on = asyncio.Event(), asyncio.Event()

        async def hold_withdraw() -> None:
            withdrawing.set()
            await go_on.wait()

        c.d.withdraw_script = hold_withdraw
        request = push(c)
        _, d = await both(c)
        last = c.decode[2]
        last.load, seen = 5, len(last.cursors)  # the engine that it was taken from has less to do
        await until(lambda: len(last.cursors) > seen + 1)
        order = asyncio.create_task(rebind(c, d, c.decode[1].engine_id))
        await soon(withdrawing.wait())
        await c.decode[1].kill()
        async with asyncio.timeout(WAIT_S):
            while (await c.get("/ready"))[1]["engines"][2]["healthy"]:
                pass
        go_on.set()
        status, answer = await soon(order)
        taken = next(engine for engine in c.decode if engine.engine_id == answer["decode"]["engine_id"])
        assert status == 200
        assert taken is last
        assert (await soon(taken.legs.get())).ticket.key.attempt == 1
        for engine in c.engines:
            engine.script = decode if engine.role == "decode" else engine.script
            engine.gate.set()
        assert (await soon(request))[0] == 200


@pytest.mark.parametrize("path", ["push", "pull"])
async def test_answer_that_has_begun_unseen(cluster: Any, path: str) -> None:
    """An answer that is not streamed shows nothing until it is complete: the engine knows, and goes on."""
    async with cluster(decode=2) as c:
        c.d.script = held
        c.d.begun = True
        request = c.start(c.body(), headers={"x-kvhandoff-path": path})
        _, d = await both(c)
        assert code(await rebind(c, d)) == (409, "not_rebound")
        assert c.d.cancelled.empty()
        assert c.d.withdrawn.empty()
        c.d.gate.set()
        assert (await soon(request))[0] == 200
        record = await c.record(d.ticket.key.handoff_id)
        assert (record["rebound"], record["attempts"]) == (0, 1)
        assert c.decode[1].legs.empty()
        await c.at_rest()


async def test_the_engine_is_asked_before_its_leg_is_closed(cluster: Any) -> None:
    async with cluster(decode=2) as c:
        c.p.script = c.d.script = c.decode[1].script = held
        request = push(c, stream=False)
        _, d = await both(c)
        moved = asyncio.create_task(rebind(c, d))
        asked = await soon(c.d.yielded.get())
        assert (asked.leg, asked.key) == ("yield", d.ticket.key)
        assert (await soon(moved))[0] == 200
        for engine in (c.p, c.decode[1]):
            engine.gate.set()
        assert (await soon(request))[0] == 200
        await c.at_rest()


@pytest.mark.parametrize("path", ["push", "pull"])
async def test_whoever_gave_the_order_leaves(cluster: Any, path: str) -> None:
    """The engine has ended its leg by then: the order is carried out, and the client is answered."""
    async with cluster(decode=2) as c:
        c.d.script = held
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            asked.set()
            await go_on.wait()

        c.d.yield_script = hold
        request = c.start(c.body(), headers={"x-kvhandoff-path": path})
        _, d = await both(c)
        order = asyncio.create_task(rebind(c, d))
        await soon(asked.wait())
        await leave(order)
        go_on.set()
        assert (await soon(request))[0] == 200
        record = await c.record(d.ticket.key.handoff_id)
        assert (record["rebound"], record["decode"]["engine_id"]) == (1, c.decode[1].engine_id)
        await c.at_rest()


async def test_requests_under_way_are_listed(cluster: Any) -> None:
    async def listed() -> list[dict[str, Any]]:
        async with c.session.get(f"{c.url}/v1/handoffs") as response:
            running: list[dict[str, Any]] = (await response.json())["running"]
            return running

    async with cluster(decode=2) as c:
        assert await listed() == []
        c.p.script = c.d.script = held
        request = push(c, stream=False)
        _, d = await both(c)
        (record,) = await listed()
        assert (record["handoff_id"], record["path"]) == (d.ticket.key.handoff_id, "push")
        assert record["decode"]["engine_id"] == c.d.engine_id
        for engine in (c.p, c.d):
            engine.gate.set()
        assert (await soon(request))[0] == 200
        assert await listed() == []
        await c.at_rest()
