"""Limits that routers share: what tenants get of all of them together, on a real server; and without it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhandoff.core.errors import RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig, Timeouts
from kvhandoff.router.limits import Excess, Limits, Meter, Usage, reserve, settle
from kvhandoff.router.shared_limits import SharedLimits
from tests.router.callers import bearer, security
from tests.router.conftest import Cluster
from tests.router.engines import CLUSTER_KEY, WAIT_S, held, soon, until
from tests.router.valkey_server import ValkeyServer, running_server

pytestmark = pytest.mark.valkey

LOST = Reason.LIMITS_NOT_SHARED
FAR = 10.0**12
"""A time of the server's that does not come."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    async with running_server(tmp_path) as running:
        yield running


@asynccontextmanager
async def opened(server: ValkeyServer, **options: Any) -> AsyncIterator[SharedLimits]:
    """One router's part."""
    given: dict[str, Any] = {"deadline_s": WAIT_S, "connect_s": WAIT_S, "retry_s": 0.01, **options}
    limits = SharedLimits(server.url, CLUSTER_KEY, **given)
    await soon(limits.start())
    try:
        yield limits
    finally:
        await soon(limits.close())


async def known(limits: SharedLimits) -> None:
    """Until all that was told before has been carried out: commands go in their order."""
    assert await limits.begin("nobody", 0, 1) is None


async def admitted(limits: SharedLimits, *, running: int, limit: int) -> None:
    """Until there is room."""
    async with asyncio.timeout(WAIT_S):
        while await limits.begin("acme", running, limit) is not None:
            limits.state("acme", running - 1)


# ---- requests under way ----


async def test_requests_of_all_routers_count(server: ValkeyServer) -> None:
    async with opened(server) as a, opened(server) as b:
        assert await a.begin("acme", 1, 3) is None
        assert await b.begin("acme", 1, 3) is None
        assert await a.begin("acme", 2, 3) is None
        full = Excess("max_concurrency", 1.0, running=3)
        assert await b.begin("acme", 2, 3) == full
        assert await a.begin("acme", 3, 3) == full
        assert await b.begin("beta", 1, 1) is None, "another tenant's are its own"
        assert await b.begin("acme", 2, 4) is None, "a new limit holds at once"
        a.state("acme", 1)
        b.state("acme", 1)
        await known(a)
        await known(b)
        assert await b.begin("acme", 2, 3) is None
        assert await a.begin("acme", 2, 3) == full


async def test_a_dead_router_s_share_comes_back(server: ValkeyServer) -> None:
    """Nobody says that it has ended; its lease does."""
    async with opened(server) as a:
        async with opened(server, lease_s=1000.0) as dead:
            assert await dead.begin("acme", 2, 2) is None
            assert isinstance(await a.begin("acme", 1, 2), Excess)
            a.state("acme", 0)
        # It is gone without a word of its requests. Rather than wait for the lease's end, have it be over.
        [name] = await server.client.zrange("kvhandoff:routers", 0, -1)
        await server.client.zadd("kvhandoff:routers", {name: 1.0})
        await admitted(a, running=1, limit=2)
        assert len(await server.client.zrange("kvhandoff:routers", 0, -1)) == 1


async def test_a_living_router_s_share_stays(server: ValkeyServer) -> None:
    """However long its request takes: it renews its lease."""
    async with opened(server, lease_s=1.0) as a, opened(server) as b:
        assert await a.begin("acme", 1, 1) is None
        ends = set()
        async with asyncio.timeout(WAIT_S):
            while len(ends) < 6:  # more than one lease
                [(_, end), *_] = await server.client.zrange("kvhandoff:routers", 0, -1, withscores=True)
                ends.add(end)
        assert isinstance(await b.begin("acme", 1, 1), Excess)


async def test_nothing_is_left_behind(server: ValkeyServer) -> None:
    async with opened(server) as a:
        await a.begin("acme", 1, 1)
        a.state("acme", 0)
        await known(a)
        [left] = await server.client.keys()
        assert left == b"kvhandoff:routers"
        assert 0 < await server.client.pttl(left) <= 10_000
        await a.begin("acme", 1, 1)
        await a.reserve("acme", 30, 60)
        for key in await server.client.keys():
            assert 0 < await server.client.pttl(key) <= 61_000


async def test_names_say_nothing(server: ValkeyServer) -> None:
    async with opened(server) as a:
        await a.begin("acme", 1, 1)
        await a.reserve("acme", 1, 60)
        assert not any(b"acme" in key for key in await server.client.keys())


# ---- tokens ----


STEPS = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 1500), st.booleans()), min_size=1, max_size=12)
"""(bound, used, whether much time has passed before)."""


async def test_the_bucket_is_that_of_one_router(server: ValkeyServer) -> None:
    """The server's arithmetic is that of `limits.py`, whatever is asked for and used."""
    room, limits = 600, Limits(tokens_per_minute=600)

    async def bucket(at: float | None = None) -> float:
        """What is spent; `at`: and was so at that time, of which there is much more to come, or none."""
        [key] = await server.client.keys("kvhandoff:bucket:*")
        if at is not None:
            await server.client.hset(key, "at", at)
        return float(await server.client.hget(key, "spent"))

    async def play(sequence: list[tuple[int, int, bool]]) -> None:
        await server.client.flushall()
        usage, now, first = Usage(), 0.0, True
        for bound, used, later in sequence:
            if not first:
                await bucket(0.0 if later else FAR)
            now += FAR if later else 0.0
            wanted, tokens = reserve(limits, usage, bound, now), min(bound, room)
            verdict = await a.reserve("acme", tokens, room)
            if isinstance(wanted, Excess):
                assert isinstance(verdict, Excess)
                assert verdict.retry_after_s == pytest.approx(wanted.retry_after_s)
                continue
            assert verdict is None
            first = False
            await bucket(FAR)
            a.settle("acme", used - tokens, room)
            await known(a)
            usage = settle(limits, wanted.usage, wanted.tokens, used, now)
            assert await bucket() == pytest.approx(usage.spent)

    async with opened(server) as a:
        loop = asyncio.get_running_loop()

        @settings(max_examples=40)
        @given(STEPS)
        def examples(sequence: list[tuple[int, int, bool]]) -> None:
            asyncio.run_coroutine_threadsafe(play(sequence), loop).result(WAIT_S)

        await asyncio.to_thread(examples)


async def test_time_fills_the_bucket(server: ValkeyServer) -> None:
    """At its rate, by the server's clock: a minute's worth in a minute."""
    async with opened(server) as a, opened(server) as b:
        assert await a.reserve("acme", 60, 60) is None
        refused = await b.reserve("acme", 30, 60)
        assert isinstance(refused, Excess)
        assert refused.limit == "tokens_per_minute"
        assert 20 < refused.retry_after_s <= 30
        [key] = await server.client.keys("kvhandoff:bucket:*")
        await server.client.hincrbyfloat(key, "at", -30.0)
        assert await b.reserve("acme", 30, 60) is None
        assert isinstance(await a.reserve("acme", 31, 60), Excess)
        await server.client.hincrbyfloat(key, "at", -600.0)
        a.settle("acme", -30, 60)  # of what time has made up for already
        await known(a)
        assert float(await server.client.hget(key, "spent")) == 0


# ---- without the server ----


def meter(shared: SharedLimits, **limits: int) -> Meter:
    return Meter("acme", Limits(**limits), lambda: 0.0, shared)


async def used_up(own: Meter, reasons: list[Reason]) -> None:
    """One request of two tokens, and no other: by the router's own count."""
    charge = await own.open(reasons.append)
    await charge.reserve(2)
    for more in (own.open(reasons.append), charge.reserve(1)):
        with pytest.raises(RequestError, match="allowed for acme is") as refused:
            await more
        assert refused.value.status == 429
    charge.close()
    charge.settle(2)


async def test_a_lost_server_leaves_each_router_its_own_limits(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(server, lease_s=1000.0) as a:  # it does not wait for a part of its lease to state them
        await server.kill()
        async with asyncio.timeout(WAIT_S):
            while await a.begin("nobody", 0, 1) is not LOST:
                pass
        reasons: list[Reason] = []
        for _ in range(3):
            await used_up(meter(a, max_concurrency=1, tokens_per_minute=2), reasons)
        assert set(reasons) == {LOST}
        lost = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(lost) == 1, "said once"
        assert lost[0].getMessage().startswith("limits: ")

        assert await a.begin("acme", 1, 2) is LOST  # a request that is under way when the server is back
        await server.start()
        async with opened(server) as b:
            async with asyncio.timeout(WAIT_S):
                while not isinstance(await b.begin("acme", 2, 2), Excess):
                    b.state("acme", 0)
            assert await b.begin("acme", 1, 2) is None


async def test_a_frozen_server_costs_the_deadline(server: ValkeyServer) -> None:
    async with opened(server, deadline_s=0.02) as a:
        async with asyncio.timeout(WAIT_S):
            while await a.begin("nobody", 0, 1) is LOST:
                pass
        server.freeze()
        reasons: list[Reason] = []
        await used_up(meter(a, max_concurrency=1, tokens_per_minute=2), reasons)
        assert set(reasons) == {LOST}
        server.thaw()


async def test_what_others_wrote_there_is_no_room(server: ValkeyServer) -> None:
    async with opened(server) as a:
        await a.begin("acme", 1, 9)
        await a.reserve("acme", 1, 60)
        for key in await server.client.keys("kvhandoff:[rb]u*"):
            await server.client.set(key, "nonsense")
        reasons: list[Reason] = []
        await used_up(meter(a, max_concurrency=1, tokens_per_minute=2), reasons)
        assert set(reasons) == {LOST}


async def test_a_limit_that_is_taken_away_leaves_no_count(server: ValkeyServer) -> None:
    """It would be stated for ever."""
    async with opened(server) as a:
        own = meter(a, max_concurrency=9)
        first, second = [await own.open(lambda _: None) for _ in range(2)]
        own.limits = Limits()
        (await own.open(lambda _: None)).close()
        first.close()
        second.close()
        await known(a)
        assert await server.client.keys("kvhandoff:running:*") == []


async def test_who_leaves_while_the_server_is_asked_costs_nothing(server: ValkeyServer) -> None:
    async with opened(server) as a:
        server.freeze()
        own = meter(a, max_concurrency=1)
        leaving = asyncio.create_task(own.open(lambda _: None))
        await until(lambda: own.usage.running == 1)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert own.usage.running == 0
        server.thaw()
        await admitted(a, running=1, limit=1)


# ---- routers ----


@asynccontextmanager
async def routers(
    cluster: Callable[..., Any], server: ValkeyServer, tmp_path: Path, **limits: Any
) -> AsyncIterator[list[Cluster]]:
    """Two before the same engines, with the same tenants."""
    patient = replace(Timeouts(), index_s=WAIT_S)
    options = {"index": server.url, "security": security(tmp_path, limits)}
    async with cluster(timeouts={"index_s": WAIT_S}, **options) as a:
        config = RouterConfig(
            prefill=(a.p.address,),
            decode=(a.d.address,),
            cluster_key=CLUSTER_KEY,
            port=0,
            pair_tests="off",
            timeouts=patient,
            **options,
        )
        other = await serve(config)
        b = Cluster(a.prefill, a.decode, f"http://127.0.0.1:{other.port}")
        try:
            yield [a, b]
        finally:
            await b.session.close()
            await other.close()


async def test_two_routers_count_requests_together(
    cluster: Any, server: ValkeyServer, tmp_path: Path
) -> None:
    async with routers(cluster, server, tmp_path, max_concurrency=1) as (a, b):
        a.d.script = held
        first = a.start(a.body(), headers=bearer("acme"))
        await soon(a.d.legs.get())
        status, refused = await b.post(b.body(), headers=bearer("acme"))
        assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "got 1 requests under way, allowed for acme is 1" in refused["error"]["message"]
        other = b.start(b.body(), headers=bearer("beta"))  # no limit
        await soon(a.d.legs.get())
        a.d.gate.set()
        assert [(await soon(request))[0] for request in (first, other)] == [200, 200]
        async with asyncio.timeout(WAIT_S):
            while (await b.post(b.body(), headers=bearer("acme")))[0] == 429:
                pass


async def test_two_routers_count_tokens_together(cluster: Any, server: ValkeyServer, tmp_path: Path) -> None:
    async with routers(cluster, server, tmp_path, tokens_per_minute=60) as (a, b):
        _, answer = await a.post(a.body(), headers=bearer("acme"))  # 43 + 8 at most
        status, refused = await b.post(b.body(), headers=bearer("acme"))
        assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "a request of up to 51 tokens, allowed for acme is 60" in refused["error"]["message"]
        await a.get(f"/v1/handoffs/{answer['id']}", headers=bearer("acme"))  # their accounts: 4 + 2
        async with asyncio.timeout(WAIT_S):
            while (await b.post(b.body(), headers=bearer("acme")))[0] == 429:
                pass
        assert (await a.post(a.body(), headers=bearer("acme")))[0] == 429


async def test_a_lost_server_is_no_client_s_error(cluster: Any, server: ValkeyServer, tmp_path: Path) -> None:
    """And no room without bounds."""
    async with routers(cluster, server, tmp_path, max_concurrency=1) as (a, b):
        await server.kill()
        a.d.script = held
        requests = []
        for router in (a, b):
            requests.append(router.start(router.body(), headers=bearer("acme")))
            leg = await soon(a.d.legs.get())
            assert (await router.post(router.body(), headers=bearer("acme")))[0] == 429
        a.d.gate.set()
        assert [(await soon(request))[0] for request in requests] == [200, 200]
        status, record = await b.get(f"/v1/handoffs/{leg.ticket.key.handoff_id}", headers=bearer("acme"))
        assert (status, LOST in record["reasons"]) == (200, True)
        page = await b.text("/metrics")
        assert 'kvhandoff_router_reasons_total{kind="failure",reason="limits_not_shared"}' in page
