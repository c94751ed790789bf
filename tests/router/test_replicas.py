"""Replicas of the router that share an index: field case 65. Two of them are as good as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig, Timeouts
from kvhandoff.web import Server
from tests.router.conftest import Cluster
from tests.router.engines import CLUSTER_KEY, WAIT_S, decode, held, soon
from tests.router.test_return import LONG, Messages, Turn, assistant, completion, turn, user
from tests.router.valkey_server import ValkeyServer, running_server

pytestmark = pytest.mark.valkey

PATIENT = replace(Timeouts(), index_s=WAIT_S)
"""No look-up is late because the machine is busy."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    async with running_server(tmp_path) as running:
        yield running


class Replica(Cluster):
    """One more router before the engines of a cluster."""

    def __init__(self, c: Cluster, server: Server) -> None:
        super().__init__(c.prefill, c.decode, f"http://127.0.0.1:{server.port}")
        self.server = server

    async def close(self) -> None:
        await self.session.close()
        await self.server.close()


async def started(c: Cluster, index: str, timeouts: Timeouts = PATIENT) -> Replica:
    config = RouterConfig(
        prefill=tuple(engine.address for engine in c.prefill),
        decode=tuple(engine.address for engine in c.decode),
        cluster_key=CLUSTER_KEY,
        port=0,
        path="pull",  # so that every turn's history is fetched, and none is left to its holder
        poll_interval_s=60.0,
        pair_tests="off",
        timeouts=timeouts,
        index=index,
    )
    return Replica(c, await serve(config))


@pytest.fixture
def replicas(cluster: Callable[..., Any], server: ValkeyServer) -> Callable[..., Any]:
    """`async with replicas(2) as (a, b)`: they share the server, or with `index` another one."""

    @asynccontextmanager
    async def start(
        count: int, index: str = "", timeouts: Timeouts = PATIENT, **engines: int
    ) -> AsyncIterator[list[Replica]]:
        async with cluster(**engines) as c:
            made = [await started(c, index or server.url, timeouts) for _ in range(count)]
            try:
                yield made
            finally:
                for replica in made:
                    await replica.close()

    return start


def lines(turns: int) -> list[Messages]:
    """The messages of each turn of a conversation."""
    made: list[Messages] = [[user(LONG)]]
    for number in range(1, turns):
        made.append([*made[-1], assistant("Hello"), user(f"question {number}")])
    return made


async def written(server: ValkeyServer, names: int) -> None:
    """Until so many names are on the server: they are written while the client gets its answer."""
    async with deadline():
        while await server.client.dbsize() < names:
            pass


@asynccontextmanager
async def deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(WAIT_S):
        yield


async def lookups(*routers: Cluster) -> dict[str, int]:
    """Hits and misses of all."""
    counts = {"hit": 0, "miss": 0}
    for router in routers:
        page = await router.text("/metrics")
        for result in counts:
            name = f'kvhandoff_router_return_lookups_total{{result="{result}"}} '
            counts[result] += sum(int(float(line[len(name) :])) for line in page.split("\n") if name in line)
    return counts


async def test_alternate_turns_have_the_hit_rate_of_one(replicas: Any, server: ValkeyServer) -> None:
    conversation = lines(8)
    rates = []
    for count in (1, 2, 3):
        await server.client.flushall()
        async with replicas(count, prefill=2, decode=3) as routers:
            last: Turn | None = None
            for number, messages in enumerate(conversation):
                taken = await turn(routers[number % count], messages, stream=number % 2 == 0)
                assert taken.told == (None if last is None else last.kept())
                assert last is None or taken.decode is last.decode
                await written(server, number + 1)
                last = taken
            rates.append(await lookups(*routers))
    assert rates == [{"hit": 7, "miss": 1}] * 3


async def test_the_memory_of_two_is_not_shared(replicas: Any) -> None:
    """What the test above would show without the server."""
    async with replicas(2, index="memory") as (a, b):
        first, second, _ = lines(3)
        await turn(a, first)
        assert (await turn(b, second)).told is None


@pytest.mark.parametrize("named", [{"conversation_id": "c"}, {"prompt_cache_key": "c"}])
async def test_named_conversations(replicas: Any, server: ValkeyServer, named: dict[str, str]) -> None:
    async with replicas(2) as (a, b):
        first = await completion(a, LONG, **named)
        await written(server, 1)
        assert (await completion(b, LONG + " again", **named)).told == first.kept()


@pytest.mark.parametrize("named", [{}, {"conversation_id": "c"}])
async def test_salts_never_meet(replicas: Any, server: ValkeyServer, named: dict[str, str]) -> None:
    """Field cases 61 and 62: the same messages, or the same name, under another salt."""
    first, second = lines(2)
    async with replicas(2) as (a, b):
        mine = await turn(a, first, cache_salt="mine", **named)
        await written(server, 1 + len(named))
        assert (await turn(b, second, cache_salt="theirs", **named)).told is None
        assert (await turn(b, second, **named)).told is None
        assert (await turn(b, second, cache_salt="mine", **named)).told == mine.kept()


async def test_nothing_on_the_server_says_what_was_said(replicas: Any, server: ValkeyServer) -> None:
    """Metadata only, under names that the cluster's key has made."""
    async with replicas(1) as (a,):
        await turn(a, [user("a secret of " + LONG)], conversation_id="chat-of-jane")
        await written(server, 2)
        keys = await server.client.keys()
        stored = b" ".join([*keys, *(await server.client.mget(keys))])
        assert {len(key) for key in keys} == {len(b"kvhandoff:turn:") + 16}
        assert not any(word in stored for word in (b"secret", b"jane", LONG.encode(), CLUSTER_KEY))


async def test_an_account_serves_all(replicas: Any, server: ValkeyServer) -> None:
    """Each replica asks every engine, and learns so how much is kept of turns that others have carried."""
    first, second = lines(2)
    async with replicas(2) as (a, b):
        a.d.keeps = 80
        one = await turn(a, first)
        await written(server, 1)
        # B asks the engine for its account of another request, and gets that of A's turn along with it.
        other = await completion(b, LONG)
        assert not (await b.record(other.id))["incomplete"]
        assert (await turn(b, second)).told == one.kept(80)


async def test_a_cold_replica_learns_from_the_engines(replicas: Any, server: ValkeyServer) -> None:
    first, second, third = lines(3)
    async with replicas(1) as (a,):
        a.d.keeps = 80
        one = await turn(a, first)
        await written(server, 1)
        await a.close()
        cold = await started(a, server.url)
        try:
            two = await turn(cold, second)
            assert two.told == one.kept(80)
            await written(server, 2)
        finally:
            await cold.close()
        again = await started(a, server.url)
        try:
            assert (await turn(again, third)).told == two.kept(80)
        finally:
            await again.close()


async def test_a_replica_that_ends_mid_stream_takes_one_turn(replicas: Any, server: ValkeyServer) -> None:
    first, second, _ = lines(3)
    async with replicas(2) as (a, b):
        one = await turn(a, first)
        await written(server, 1)
        a.d.script = held
        cut = a.start(a.chat_body(messages=second, stream=True), path="/v1/chat/completions")
        leg = await soon(a.d.legs.get())
        a.p.legs.get_nowait()
        cut.cancel()
        await a.server.close()
        assert await soon(a.d.cancelled.get()) is leg
        a.d.script = decode
        assert (await turn(b, second)).told == one.kept()


# ---- without the server ----


async def failed(c: Cluster, messages: Messages, reason: str) -> None:
    """A turn that is answered as one without a history, and says why."""
    taken = await turn(c, messages)
    assert taken.told is None
    assert taken.retain == "renewable"
    assert reason in (await c.record(taken.id))["reasons"]


async def test_a_killed_server_costs_hits_and_no_answer(replicas: Any, server: ValkeyServer) -> None:
    first, second, third, fourth = lines(4)
    async with replicas(2) as (a, b):
        await turn(a, first)
        await written(server, 1)
        await server.kill()
        await failed(b, second, "index_failed")
        await failed(a, third, "index_failed")
        for router in (a, b):
            await until_metric(router, "kvhandoff_router_index_lost_turns_total 1.0")
        page = await a.text("/metrics")
        assert 'kvhandoff_router_reasons_total{kind="failure",reason="index_failed"} 1.0' in page
        await server.start()
        for router in (a, b):
            await found_again(router)
        await server.client.flushall()
        last = await turn(a, third)
        await written(server, 1)
        assert (await turn(b, fourth)).told == last.kept()


async def until_metric(router: Cluster, line: str) -> None:
    async with deadline():
        while line not in await router.text("/metrics"):
            pass


async def found_again(router: Cluster) -> None:
    """Until the replica asks the server again."""
    async with deadline():
        while True:
            taken = await turn(router, lines(2)[1])
            if not {"index_failed", "index_timeout"} & set((await router.record(taken.id))["reasons"]):
                return


async def test_a_frozen_server_costs_a_moment(replicas: Any, server: ValkeyServer) -> None:
    first, second, _ = lines(3)
    async with replicas(1, timeouts=replace(Timeouts(), index_s=0.02, connect_s=WAIT_S)) as (a,):
        await found_again(a)
        await turn(a, first)
        server.freeze()
        await failed(a, second, "index_timeout")
        server.thaw()


async def test_no_server_at_the_start(replicas: Any, server: ValkeyServer) -> None:
    await server.kill()
    async with replicas(1) as (a,):
        await failed(a, lines(2)[1], "index_failed")
        assert (await a.get("/ready"))[0] == 200
        await server.start()
        await found_again(a)


async def test_what_others_write_is_a_miss(replicas: Any, server: ValkeyServer) -> None:
    """Field case 10: values that are none of ours; and one that leads to an engine that this fleet doesn't
    have."""
    first, second = lines(2)
    async with replicas(2) as (a, b):
        one = await turn(a, first)
        await written(server, 1)
        [key] = await server.client.keys()
        kept = await server.client.get(key)
        await server.client.set(key, b"\x00\x80nonsense")
        await failed(b, second, "index_foreign")
        await server.client.flushall()
        await server.client.set(key, kept.replace(one.decode.identity.epoch.encode(), b"f" * 16))
        elsewhere = await turn(b, second)
        assert elsewhere.told is None
        assert (await b.record(elsewhere.id))["reasons"] == ["forced"]
