"""Stock engines whose legs fail are avoided for a while, as kvhandoff's own are (`test_circuit.py`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from kvhandoff.router import breaker
from tests.router.upstream_engines import (
    MODEL,
    WAIT_S,
    Script,
    UpstreamCluster,
    UpstreamMock,
    decode,
    failing,
    held,
    plain,
    refusing,
    upstream_cluster,
    waiting,
)

LOCAL = {"x-kvhandoff-path": "local"}


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: Any) -> None:
    """No pause ends while a test runs."""
    monkeypatch.setattr(breaker, "PAUSE_S", 1000.0)


def legs(engine: UpstreamMock) -> int:
    """How many it has got since the last call."""
    count = engine.legs.qsize()
    while not engine.legs.empty():
        engine.legs.get_nowait()
    return count


async def rests(c: UpstreamCluster) -> list[bool]:
    return [engine["rests"] for engine in (await c.get("/ready"))[1]["engines"]]


async def requests(c: UpstreamCluster, n: int, status: int = 200, **headers: str) -> None:
    for _ in range(n):
        assert (await c.post(headers=headers))[0] == status


async def test_a_failing_decode_engine_rests() -> None:
    async with upstream_cluster("nixl", n_decode=2) as c:
        c.d.script = failing
        await requests(c, 12, **LOCAL)
        assert [legs(engine) for engine in c.decode] == [3, 12]
        assert await rests(c) == [False, True, False]


@pytest.mark.parametrize("script", [failing, plain])
@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
async def test_a_failing_prefill_engine_rests(connector: str, script: Script) -> None:
    """Also one that answers, but leaves nothing to be handed over."""
    async with upstream_cluster(connector) as c:
        c.p.script = script
        if connector == "nixl-push":
            c.d.script = waiting
        await requests(c, 4)
        assert legs(c.p) == 3
        assert await rests(c) == [True, False], "the other leg was ended for its sake"
        _, answer = await c.post()
        record = await c.record(answer["id"])
        assert (record["path"], record["attempts"]) == ("local", 1)
        assert record["reasons"] == ["no_prefill_engine"]


async def test_nobody_is_blamed_for_the_other_leg() -> None:
    """A pushed-to engine's leg is ended since the prefill leg has failed; nothing else of it is ever seen."""
    async with upstream_cluster("nixl-push") as c:
        c.p.script, c.d.script = failing, held
        for _ in range(3):
            asked = asyncio.create_task(c.post())
            pushed, local = await c.d.leg(), await c.d.leg()
            assert (pushed.params is None, local.params) == (False, None)
            asked.cancel()  # so that no answer of the engine's ends the row
            for _ in range(2):
                await asyncio.wait_for(c.d.cancelled.get(), WAIT_S)
        assert await rests(c) == [True, False]


async def test_who_works_or_is_late_does_not_rest() -> None:
    """A client's mistake is none of the engine's, and a leg that waits may wait for another."""
    timeouts = {"answer_s": 0.3, "retry_s": 0.01}
    async with upstream_cluster("nixl", timeouts=timeouts) as c:
        c.d.script = refusing
        await requests(c, 5, status=400, **LOCAL)
        c.d.script = held
        await requests(c, 4, status=504, **LOCAL)
        assert await rests(c) == [False, False]


async def test_the_only_decode_engine_is_never_given_up() -> None:
    async with upstream_cluster("nixl") as c:
        c.d.script = failing
        await requests(c, 3, status=502, **LOCAL)
        assert await rests(c) == [False, True]
        c.d.script = decode
        await requests(c, 1, **LOCAL)
        assert await rests(c) == [False, False], "it has answered"


async def test_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(breaker, name, 1e-6)  # over at once
    async with upstream_cluster("nixl", n_decode=2) as c:
        c.d.script = failing
        await requests(c, 12, **LOCAL)
        assert legs(c.d) > 3
        c.d.script = decode
        await requests(c, 12, **LOCAL)
        assert legs(c.d) > 0
        assert True not in await rests(c)


async def test_a_stream_that_has_begun_ends_the_row() -> None:
    """However long it goes on."""

    async def endless(engine: UpstreamMock, leg: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(leg.request)
        await response.write(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n')
        await engine.gate.wait()
        return response

    async with upstream_cluster("nixl") as c:
        c.d.script = failing
        await requests(c, 3, status=502, **LOCAL)
        assert await rests(c) == [False, True]
        c.d.script = endless
        body = {"model": MODEL, "prompt": "a prompt", "stream": True}
        async with c.session.post(f"{c.url}/v1/completions", json=body, headers=LOCAL) as answer:
            assert await asyncio.wait_for(answer.content.readany(), WAIT_S)
            assert await rests(c) == [False, False]
            c.d.gate.set()
