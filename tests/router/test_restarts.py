"""Engines that die and come back: refused tickets, many requests in flight, the first request afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.router.engines import held, prefill, soon, until


async def test_restarted_prefill_engine_is_used_at_once(cluster: Any) -> None:
    """403 bad_ticket: the state is read again, and the next attempt has a ticket for the new life."""
    async with cluster() as c:
        old = c.p.identity
        await c.p.restart()
        status, answer = await c.post(c.body())
        assert status == 200
        ticket = c.p.legs.get_nowait().ticket
        assert (ticket.audience, ticket.key.attempt) == (c.p.identity, 1)
        assert c.p.identity != old
        assert c.d.legs.get_nowait().ticket.offer.source == c.p.identity
        record = await c.record(answer["id"])
        assert (record["path"], record["attempts"]) == ("pull", 2)
        assert record["reasons"] == ["epoch_changed"]
        assert c.p.withdrawn.empty()


async def test_restarted_decode_engine_is_used_at_once(cluster: Any) -> None:
    """The ticket was refused, so nothing has begun, and the offer serves the new life."""
    async with cluster() as c:
        await c.d.restart()
        status, answer = await c.post(c.body())
        assert status == 200
        ticket = c.d.legs.get_nowait().ticket
        assert ticket.audience == c.d.identity
        assert c.p.legs.qsize() == 1
        assert ticket.offer.key == c.p.legs.get_nowait().ticket.key
        record = await c.record(answer["id"])
        assert record["reasons"] == ["epoch_changed"]
        assert record["decode"] == {"engine_id": c.d.engine_id, "epoch": c.d.identity.epoch}
        assert record["incomplete"] is False


async def test_every_ticket_is_refused(cluster: Any) -> None:
    """Another cluster key: not ready, and the message says what it is."""
    async with cluster(cluster_key=b"another") as c:
        status, ready = await c.get("/ready")
        assert (status, ready["status"]) == (503, "no decode engine takes requests")
        assert all("not signed with this cluster's key" in engine["problem"] for engine in ready["engines"])
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        assert "not signed with this cluster's key" in answer["error"]["message"]
        assert c.d.legs.empty()


async def test_killed_prefill_engine_with_many_in_flight(cluster: Any) -> None:
    """Field case 13: every paired leg goes on without it, and both engines end at rest."""
    async with cluster(poll_interval_s=0.02) as c:
        c.p.script = held
        requests = [c.start(c.body()) for _ in range(50)]
        await until(lambda: c.p.legs.qsize() == 50)
        await c.p.kill()
        answers = await soon(asyncio.gather(*requests))
        assert [status for status, _ in answers] == [200] * 50
        assert c.d.legs.qsize() == 50
        assert {c.d.legs.get_nowait().ticket.leg for _ in range(50)} == {"local"}
        await c.at_rest()
        c.p.script = prefill
        c.p.new_life()
        await c.p.start()
        await c.healthy()
        assert (await c.post(c.body()))[0] == 200
        assert c.d.legs.get_nowait().ticket.leg == "decode"


async def test_decode_engine_that_is_just_back(cluster: Any) -> None:
    """Nobody has to wait for its next state report."""
    async with cluster() as c:
        await c.d.kill()
        assert (await c.post(c.body()))[0] == 503
        assert (await c.get("/ready"))[0] == 503
        c.d.new_life()
        await c.d.start()
        assert (await c.post(c.body()))[0] == 200
        assert c.d.legs.get_nowait().ticket.audience == c.d.identity
