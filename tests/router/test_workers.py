"""Several workers at one port: whoever is asked answers for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvhandoff.handoff.registration import Registration, RegistrationKey
from kvhandoff.router import worker
from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig, Timeouts
from kvhandoff.router.limits import Limits
from kvhandoff.router.merging import merge_metrics
from kvhandoff.router.wire import Server
from kvhandoff.router.worker import Siblings, Worker
from tests.router.conftest import Cluster
from tests.router.engines import CLUSTER_KEY, WAIT_S, MockEngine, held, soon, until


class Workers:
    """Two of them; each has a port of its own here, so that a test can say whom it asks."""

    def __init__(self, engines: list[MockEngine], doors: Path, **config: Any) -> None:
        self.engines = engines
        self.at: dict[int, Cluster] = {}
        self._doors = doors
        self._config = config
        self._servers: dict[int, Server] = {}

    async def start(self, index: int) -> Cluster:
        decode = [e for e in self.engines if e.role == "decode"]
        prefill = [e for e in self.engines if e.role == "prefill"]
        settings: dict[str, Any] = {
            "prefill": tuple(e.url for e in prefill),
            "decode": tuple(e.url for e in decode),
            "cluster_key": CLUSTER_KEY,
            "port": 0,
            "poll_interval_s": 60.0,
            "pair_tests": "off",
            "worker": Worker(index, 2, self._doors),
            "timeouts": replace(Timeouts(), record_s=0.05),
        }
        server = self._servers[index] = await serve(RouterConfig(**(settings | self._config)))
        self.at[index] = Cluster(prefill, decode, f"http://127.0.0.1:{server.port}")
        return self.at[index]

    async def stop(self, index: int) -> None:
        await self.at.pop(index).session.close()
        await self._servers.pop(index).close()

    async def close(self) -> None:
        for index in list(self.at):
            await self.stop(index)


@pytest.fixture
def workers(tmp_path: Path) -> Callable[..., Any]:
    """`async with workers(prefill=1, decode=1, **config) as w`."""

    @asynccontextmanager
    async def start(prefill: int = 1, decode: int = 1, **config: Any) -> AsyncIterator[Workers]:
        async with AsyncExitStack() as stack:
            engines = [MockEngine("prefill", f"p{i}") for i in range(prefill)]
            engines += [MockEngine("decode", f"d{i}" * 2) for i in range(decode)]
            for engine in engines:
                await engine.start()
                stack.push_async_callback(engine.kill)
            made = Workers(engines, tmp_path, **config)
            stack.push_async_callback(made.close)
            await made.start(0)
            await made.start(1)
            yield made

    return start


async def drain(c: Cluster, engine: MockEngine, *, to: bool = True) -> tuple[int, Any]:
    return await c.post({"engine": engine.engine_id, "drain": to}, path="/v1/engines/drain")


async def draining(c: Cluster) -> list[bool]:
    return [engine["draining"] for engine in (await c.get("/ready"))[1]["engines"]]


async def test_a_record_is_found_wherever_it_is(workers: Callable[..., Any]) -> None:
    async with workers() as w:
        status, answer = await w.at[0].post(w.at[0].body())
        assert status == 200
        mine, theirs = [await w.at[index].get(f"/v1/handoffs/{answer['id']}") for index in (0, 1)]
        assert mine == theirs
        assert mine[1]["status"] == 200
        for none in ("none", "%FF", "a%2Fb", "a%252Fb"):
            status, answer = await w.at[1].get(f"/v1/handoffs/{none}")
            assert (status, answer["error"]["code"]) == (404, "handoff_not_found")


async def test_a_request_is_moved_wherever_it_is(workers: Callable[..., Any]) -> None:
    async with workers(decode=2) as w:
        for engine in w.engines:
            engine.script = held
        c = w.at[0]
        request = c.start(c.body(), headers={"x-kvhandoff-path": "push"})
        leg = await soon(c.d.legs.get())
        running = (await w.at[1].get("/v1/handoffs"))[1]["running"]
        handoff_id = leg.ticket.key.handoff_id
        assert [record["handoff_id"] for record in running] == [handoff_id]
        moved = w.at[1].start({"decode": c.decode[1].engine_id}, path=f"/v1/handoffs/{handoff_id}/rebind")
        await soon(c.decode[1].legs.get())
        status, answer = await soon(moved)
        assert (status, answer["decode"]["engine_id"]) == (200, c.decode[1].engine_id)
        for engine in w.engines:
            engine.gate.set()
        assert (await soon(request))[0] == 200


async def test_an_order_reaches_all(workers: Callable[..., Any]) -> None:
    async with workers(decode=2) as w:
        d = w.at[0].d
        assert (await drain(w.at[1], d))[0] == 200
        assert await draining(w.at[0]) == await draining(w.at[1]) == [False, True, False]
        assert (await drain(w.at[0], d, to=False))[0] == 200
        assert await draining(w.at[1]) == [False, False, False]
        status, answer = await w.at[0].post({"engine": "nobody"}, path="/v1/engines/drain")
        assert (status, answer["error"]["code"]) == (400, "engine_not_found")


async def test_a_record_that_may_be_at_a_worker_that_is_gone(workers: Callable[..., Any]) -> None:
    async with workers() as w:
        assert (await w.at[0].get("/v1/handoffs/none"))[0] == 404
        await w.stop(1)
        status, answer = await w.at[0].get("/v1/handoffs/none")
        assert (status, answer["error"]["code"]) == (503, "worker_unreachable")


async def test_a_worker_that_is_started_again_knows_the_orders(workers: Callable[..., Any]) -> None:
    async with workers() as w:
        await drain(w.at[0], w.at[0].d)
        await w.stop(1)
        status, answer = await drain(w.at[0], w.at[0].d)
        assert (status, answer["error"]["code"]) == (503, "worker_unreachable")
        await w.start(1)
        assert await draining(w.at[1]) == [False, True]


async def test_engines_register_with_all(workers: Callable[..., Any]) -> None:
    async with workers(registration=True, prefill=0) as w:
        late = MockEngine("decode", "late")
        await late.start()
        try:
            registration = Registration(
                engine=late.identity, number=1, role="decode", url=late.url, internal=None, lease_s=15.0
            )
            signed = RegistrationKey(CLUSTER_KEY).sign(registration)
            status, _ = await w.at[1].post({"registration": signed}, path="/internal/engines")
            assert status == 200

            async def known(c: Cluster) -> bool:
                return late.url in [engine["url"] for engine in (await c.get("/ready"))[1]["engines"]]

            for index in (0, 1):
                async with asyncio.timeout(WAIT_S):
                    while not await known(w.at[index]):
                        pass
            await w.stop(0)
            await w.start(0)
            assert await known(w.at[0]), "it need not wait for the next registration"
        finally:
            await late.kill()


async def test_legs_count_wherever_they_were_sent_from(workers: Callable[..., Any]) -> None:
    """Whoever looks whether an engine can be stopped sees the legs of all workers."""
    async with workers() as w:
        d = w.at[0].d
        d.script = held
        request = w.at[0].start(w.at[0].body(), headers={"x-kvhandoff-path": "local"})
        await soon(d.legs.get())
        await drain(w.at[1], d)
        engine = (await w.at[1].get("/ready"))[1]["engines"][1]
        assert (engine["legs"], engine["draining"], engine["drained"]) == (1, True, False)
        d.gate.set()
        assert (await soon(request))[0] == 200
        engine = (await w.at[1].get("/ready"))[1]["engines"][1]
        assert (engine["legs"], engine["drained"]) == (0, True)


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_metrics_are_those_of_all(workers: Callable[..., Any]) -> None:
    async with workers() as w:
        for index in (0, 0, 1):
            assert (await w.at[index].post(w.at[index].body()))[0] == 200
        pages = [samples(await w.at[index].text("/metrics")) for index in (0, 1)]
        assert pages[0] == pages[1]
        assert sum(v for (name, at), v in pages[0].items() if name == "kvhandoff_router_requests_total") == 3
        healthy = {at: v for (name, at), v in pages[0].items() if name == "kvhandoff_router_engine_healthy"}
        assert list(healthy.values()) == [1.0, 1.0]


def test_merged_metrics() -> None:
    """Each kind by its rule; a page that another reader of the format can read."""
    page = """# HELP kvhandoff_router_requests_total R
# TYPE kvhandoff_router_requests_total counter
kvhandoff_router_requests_total{path="a\\"b\\\\c"} %d
# HELP kvhandoff_router_ttft_seconds T
# TYPE kvhandoff_router_ttft_seconds histogram
kvhandoff_router_ttft_seconds_bucket{le="1.0"} %d
kvhandoff_router_ttft_seconds_bucket{le="+Inf"} %d
kvhandoff_router_ttft_seconds_count %d
kvhandoff_router_ttft_seconds_sum %f
# HELP kvhandoff_router_in_flight F
# TYPE kvhandoff_router_in_flight gauge
kvhandoff_router_in_flight %d
# HELP kvhandoff_router_engine_healthy H
# TYPE kvhandoff_router_engine_healthy gauge
kvhandoff_router_engine_healthy{engine="e"} %d
# HELP kvhandoff_router_pairs P
# TYPE kvhandoff_router_pairs gauge
kvhandoff_router_pairs{result="failed"} %d
"""
    one, two = page % (1, 2, 3, 3, 0.5, 4, 1, 1), page % (10, 20, 30, 30, 5.0, 40, 0, 3)
    extra = '# HELP x_total X\n# TYPE x_total counter\nx_total{code="c"} 7.0\n'
    merged = samples(merge_metrics([one.encode(), (two + extra).encode()]).decode())
    assert merged == samples(page % (11, 22, 33, 33, 5.5, 44, 0, 3) + extra)


def test_a_limit_is_shared() -> None:
    assert Limits(32, 1000).shared_by(3) == Limits(10, 333)
    assert Limits(2, None).shared_by(4) == Limits(1, None)
    assert Limits(None, None).shared_by(2) == Limits(None, None)


async def test_the_side_door_is_for_siblings(workers: Callable[..., Any], tmp_path: Path) -> None:
    async with workers() as w:
        status, answer = await w.at[0].get("/internal/worker")
        assert (status, answer["error"]["code"]) == (404, "unknown_url")
        door = aiohttp.UnixConnector(str(tmp_path / "0.sock"))
        async with aiohttp.ClientSession(connector=door) as session:
            async with session.get("http://worker/internal/worker") as response:
                assert msgspec.json.decode(await response.read()) == {"drained": [], "registrations": []}
            async with session.get("http://worker/v1/handoffs/none") as response:
                assert response.status == 404


async def test_why_a_sibling_did_not_answer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A timeout has no message of its own."""
    monkeypatch.setattr(worker, "ASK_S", 0.05)
    over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    me = Worker(0, 2, tmp_path)
    async with await asyncio.start_unix_server(silent, me.door(1)):
        siblings = Siblings(me)
        async with siblings.reachable():
            assert await soon(siblings.first("/internal/worker")) is None
        over.set()
    assert caplog.messages == ["worker 1 did not answer /internal/worker: TimeoutError"]


class Hung:
    """In a worker's place: takes connections, and answers none."""

    def __init__(self, door: Path) -> None:
        self._door = door
        self._over = asyncio.Event()
        self.asked = 0

    async def __aenter__(self) -> Hung:
        self._listener = await asyncio.start_unix_server(self._silent, self._door)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        self._listener.close()
        await self._listener.wait_closed()

    async def _silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        await self._over.wait()
        writer.close()


async def test_a_worker_that_hangs_is_not_waited_for(
    workers: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What only gathers has a time limit of its own; orders wait for all."""
    monkeypatch.setattr(worker, "MERGE_S", 0.05)
    monkeypatch.setattr(worker, "ASK_S", 600.0)
    async with workers() as w:
        c = w.at[0]
        assert (await drain(c, c.d))[0] == 200
        assert [engine["drained"] for engine in (await c.get("/ready"))[1]["engines"]] == [False, True]
        await w.stop(1)
        async with Hung(tmp_path / "1.sock") as hung:
            status, answer = await soon(c.get("/ready"))
            assert status == 503
            assert [engine["draining"] for engine in answer["engines"]] == [False, True]
            assert [engine["drained"] for engine in answer["engines"]] == [False, False], "nobody knows"
            assert await soon(c.get("/v1/handoffs")) == (200, {"running": []})
            assert "kvhandoff_router_engine_healthy" in await soon(c.text("/metrics"))
            assert hung.asked == 3
            order = asyncio.create_task(drain(c, c.d, to=False))
            await until(lambda: hung.asked == 4)
            assert not order.done()
        status, answer = await soon(order)
        assert (status, answer["error"]["code"]) == (503, "worker_unreachable")
    assert "worker 1 did not answer /ready: TimeoutError" in caplog.messages
