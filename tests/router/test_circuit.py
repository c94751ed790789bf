"""Engines whose legs fail are avoided for a while, and healthy ones are not ejected."""

from __future__ import annotations

from typing import Any

import pytest

from kvhandoff.router import breaker
from tests.router.conftest import Cluster
from tests.router.engines import decode, failing, once, prefill, reset

LOCAL = {"x-kvhandoff-path": "local"}


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: Any) -> None:
    """No pause ends while a test runs."""
    monkeypatch.setattr(breaker, "PAUSE_S", 1000.0)


def legs(c: Cluster) -> list[int]:
    """How many each decode engine has got since the last call."""
    counts = [engine.legs.qsize() for engine in c.decode]
    for engine in c.decode:
        while not engine.legs.empty():
            engine.legs.get_nowait()
    return counts


async def requests(c: Cluster, n: int, status: int = 200) -> None:
    for _ in range(n):
        assert (await c.post(c.body(), headers=LOCAL))[0] == status


async def test_a_failing_engine_rests_and_clients_notice_nothing(cluster: Any) -> None:
    async with cluster(decode=2) as c:
        c.d.script = failing(500)
        await requests(c, 12)
        assert legs(c) == [3, 12]  # it is well by its own report
        assert (await c.get("/ready"))[1]["engines"][1]["healthy"]
        assert (await c.get("/ready"))[1]["engines"][1]["rests"]


async def test_transient_errors_eject_nobody(cluster: Any) -> None:
    """One failure now and then, a client's mistake, or an answer that the operator wants to be an error."""
    async with cluster(decode=2) as c:
        for _ in range(5):
            c.d.script = once(reset)
            await requests(c, 4)
        assert not (await c.get("/ready"))[1]["engines"][1]["rests"]
        legs(c)
        c.d.script = c.decode[1].script = failing(400)
        await requests(c, 8, status=400)
        c.d.script = c.decode[1].script = decode
        await requests(c, 8)
        assert legs(c) == [8, 8]


async def test_the_only_decode_engine_is_never_given_up(cluster: Any) -> None:
    async with cluster(decode=1) as c:
        c.d.script = failing(500)
        await requests(c, 3, status=502)
        c.d.script = decode
        await requests(c, 3)
        assert not (await c.get("/ready"))[1]["engines"][1]["rests"]  # it has answered


async def test_it_is_tried_again_and_comes_back(cluster: Any, monkeypatch: Any) -> None:
    for name in ("PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(breaker, name, 1e-6)  # over at once
    async with cluster(decode=2) as c:
        c.d.script = failing(500)
        await requests(c, 12)
        assert legs(c)[0] > 3
        c.d.script = decode
        await requests(c, 12)
        assert legs(c)[0] > 0
        assert not (await c.get("/ready"))[1]["engines"][1]["rests"]


async def test_prompts_are_computed_where_they_are_answered_while_prefill_rests(cluster: Any) -> None:
    async with cluster() as c:
        c.p.script = failing(500)
        for _ in range(4):
            assert (await c.post(c.body()))[0] == 200
        assert c.p.legs.qsize() == 3
        _, answer = await c.post(c.body())
        record = await c.record(answer["id"])
        assert (record["path"], record["attempts"], record["reasons"]) == (
            "local",
            1,
            ["no_prefill_engine"],
        )


async def test_on_miss_error_asks_a_resting_engine(cluster: Any) -> None:
    """Better one that may fail than an error for sure."""
    async with cluster(on_miss="error") as c:
        c.p.script = failing(500)
        for _ in range(4):
            assert (await c.post(c.body()))[0] == 503
        c.p.script = prefill
        assert (await c.post(c.body()))[0] == 200
