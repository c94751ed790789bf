"""Field case 47: a prefill engine whose queue is full says 503. Another one is tried, then the decode engine
computes, within bounds of time and number, and the reason is seen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.conftest import NO_ACCOUNT
from tests.router.engines import failing, held, soon, until
from tests.router.test_choices import TOKENS, reported

FULL = failing(503, "queue_full")
PULL, PUSH = {"x-kvhandoff-path": "pull"}, {"x-kvhandoff-path": "push"}


def attempts(c: Any) -> list[tuple[str, int]]:
    """(engine, attempt) of each leg that was sent."""
    legs = []
    for engine in c.engines:
        while not engine.legs.empty():
            legs.append((engine.engine_id, engine.legs.get_nowait().ticket.key.attempt))
    return sorted(legs, key=lambda leg: leg[1])


async def test_another_prefill_engine_then_the_decode_engine(cluster: Any) -> None:
    async with cluster(prefill=2) as c:
        c.p.script = FULL
        status, answer = await c.post(c.body(), headers=PULL)
        record = await c.record(answer["id"])
        assert (status, record["path"], record["kv_source"]) == (200, "pull", "transferred")
        assert record["reasons"] == ["forced", "prefill_failed"]
        assert attempts(c) == [("p0", 0), ("p1", 1), (c.d.engine_id, 1)]

        c.prefill[1].script = FULL
        status, answer = await c.post(c.body(), headers=PULL)
        record = await c.record(answer["id"])
        assert (status, record["path"], record["kv_source"]) == (200, "local", "local")
        assert record["reasons"] == ["forced", "prefill_failed"]
        sent = attempts(c)
        assert {name for name, _ in sent[:2]} == {"p0", "p1"}
        assert sent[2:] == [(c.d.engine_id, 2)]
        page = await c.text("/metrics")
        assert 'kvhandoff_router_reasons_total{kind="failure",reason="prefill_failed"} 2.0' in page
        await c.at_rest()


async def test_a_pushed_prompt_is_computed_where_it_waits(cluster: Any) -> None:
    """The decode engine has its blocks: it goes on at once, and nobody else begins."""
    async with cluster(prefill=2) as c:
        c.p.script, c.d.script = FULL, held
        request = c.start(c.body(), headers=PUSH)
        assert (await soon(c.p.withdrawn.get())).key.attempt == 0  # which tells the decode engine
        c.d.gate.set()
        status, answer = await soon(request)
        record = await c.record(answer["id"])
        assert (status, record["attempts"]) == (200, 1)
        assert record["reasons"] == ["forced", "prefill_failed"]
        assert c.prefill[1].legs.empty()


async def test_whoever_is_full_is_left_alone_for_a_while(cluster: Any) -> None:
    """Three times in a row, and no request runs into it any more; then one tries it out."""
    async with cluster(prefill=2) as c:
        for engine in c.prefill:
            engine.script = FULL
        for _ in range(3):
            assert (await c.post(c.body(), headers=PULL))[0] == 200
        attempts(c)
        status, answer = await c.post(c.body(), headers=PULL)
        record = await c.record(answer["id"])
        assert (status, record["path"], record["attempts"]) == (200, "local", 1)
        assert record["reasons"] == ["forced", "no_prefill_engine"]
        assert attempts(c) == [(c.d.engine_id, 0)]


async def test_the_prompt_goes_to_the_decode_engine_with_the_least_to_do(cluster: Any) -> None:
    """The guard of those that decode: whatever was bound before, it is computed where it harms least."""
    async with cluster(decode=2, poll_interval_s=0.01, timeouts=NO_ACCOUNT) as c:
        c.p.script = c.d.script = held
        waiting = c.start(c.body(prompt=TOKENS), headers=PULL)
        await soon(c.p.legs.get())
        c.d.load = 20
        await reported(c.d)
        c.p.script = FULL
        other = c.start(c.body(prompt=TOKENS), headers=PULL)
        assert (await soon(c.decode[1].legs.get())).ticket.leg == "local"
        assert (await soon(other))[0] == 200
        c.p.gate.set()
        c.d.gate.set()
        assert (await soon(waiting))[0] == 200


@pytest.mark.parametrize("code", [503, 429])
async def test_decode_engines_that_are_full_too(cluster: Any, code: int) -> None:
    """Each is asked once, or as often as attempts are left; then the client hears it."""
    async with cluster(prefill=1, decode=2) as c:
        c.p.script = FULL
        for engine in c.decode:
            engine.script = failing(code, "queue_full")
        status, answer = await c.post(c.body(), headers=PULL)
        sent = attempts(c)
        if code == 429:  # a refusal is the client's
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert len(sent) == 2
        else:
            assert (status, answer["error"]["code"]) == (502, "decode_failed")
            assert "says no" in answer["error"]["message"]
            assert [name for name, _ in sent] == ["p0", *sorted(e.engine_id for e in c.decode)]
        await c.at_rest()


async def test_the_time_is_bounded(cluster: Any) -> None:
    """Prefill engines that answer nothing: each has its deadline, and there is no third one."""
    async with cluster(prefill=3, timeouts={"prefill_s": 0.05} | NO_ACCOUNT) as c:
        for engine in c.prefill:
            engine.script = held
        status, answer = await soon(c.start(c.body(), headers=PULL))
        record = await c.record(answer["id"])
        assert (status, record["path"], record["attempts"]) == (200, "local", 3)
        assert sum(not engine.legs.empty() for engine in c.prefill) == 2
        await until(lambda: sum(engine.cancelled.qsize() for engine in c.prefill) == 2)
        for engine in c.prefill:
            engine.gate.set()
        await asyncio.sleep(0)
