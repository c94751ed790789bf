"""Engines that come and go while the router runs, and those that are drained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvhandoff.handoff.registration import Registration, RegistrationKey
from kvhandoff.router import watched
from kvhandoff.router.address import EngineAddress
from kvhandoff.router.members import Member
from tests.router.conftest import Cluster
from tests.router.engines import CLUSTER_KEY, WAIT_S, MockEngine, held, soon, until
from tests.router.test_fleet import Fixture, f, record

__all__ = ["f"]


def wanted(*engines: MockEngine, drain: bool = False) -> list[Member]:
    return [Member(e.role, EngineAddress(e.url), drain) for e in engines]  # type: ignore[arg-type]


# ---- the fleet ----


async def test_an_engine_joins(f: Fixture) -> None:
    p, d, late = await f.engine("prefill", "p"), await f.engine("decode", "d"), await f.engine("decode", "l")
    fleet = await f.fleet([p], [d])
    first = fleet.decode[0]
    fleet.set_members(wanted(p, d, late))
    await until(lambda: fleet.decode[1].healthy)
    assert fleet.decode[0] is first
    assert (await soon(late.peers.get())).peers == (f"tcp://127.0.0.1:{p.port + 1}",)
    cursors = len(late.cursors)
    fleet.set_members(wanted(p, d, late))
    assert [engine.url for engine in fleet.engines] == [p.url, d.url, late.url]
    assert len(late.cursors) == cursors, "nothing has changed"


async def test_an_engine_that_leaves_ends_its_legs_first(f: Fixture) -> None:
    d, e = await f.engine("decode", "d"), await f.engine("decode", "e")
    fleet = await f.fleet([], [d, e], poll_interval_s=0.01)
    leaving = fleet.decode[0]
    with leaving.reserve():
        fleet.set_members(wanted(e))
        assert [engine.url for engine in fleet.decode] == [e.url]
        assert [view.url for view in fleet.view().decode] == [e.url]
        assert (fleet.leaving, leaving.obstacle) == ([leaving], "it is draining")
        assert leaving.healthy
        asked = len(d.cursors)
        await until(lambda: len(d.cursors) > asked + 3)  # it is still asked for accounts
        assert fleet.leaving == [leaving]
        d.records.append(record("last", d))
    await until(lambda: not fleet.leaving)
    assert [leg.handoff_id for leg in f.legs] == ["last"]
    asked = len(d.cursors)
    seen = len(e.cursors)
    await until(lambda: len(e.cursors) > seen + 3)
    assert len(d.cursors) == asked, "it is forgotten"


class Slow(MockEngine):
    """Its reports are on their way for as long as a test wants."""

    on_the_way = asyncio.Event()
    arrives = asyncio.Event()

    async def _state(self, request: web.Request) -> web.Response:
        report = await super()._state(request)
        self.on_the_way.set()
        await self.arrives.wait()
        return report


async def test_the_last_account_of_an_engine_that_leaves(f: Fixture) -> None:
    """A leg ends while a report that does not know of it is on its way: it is asked for once more."""
    Slow.on_the_way, Slow.arrives = asyncio.Event(), asyncio.Event()
    d, e = await f.engine("decode", "d", Slow), await f.engine("decode", "e")
    Slow.arrives.set()
    fleet = await f.fleet([], [d, e], poll_interval_s=0.01)
    leaving = fleet.decode[0]
    with leaving.reserve():
        fleet.set_members(wanted(e))
        Slow.arrives.clear()
        Slow.on_the_way.clear()
        await soon(Slow.on_the_way.wait())
        d.records.append(record("last", d))
    Slow.arrives.set()
    await until(lambda: not fleet.leaving)
    assert [leg.handoff_id for leg in f.legs] == ["last"]


async def test_an_engine_that_comes_back_while_it_leaves_is_the_same(f: Fixture) -> None:
    d, e = await f.engine("decode", "d"), await f.engine("decode", "e")
    fleet = await f.fleet([], [d, e])
    engine = fleet.decode[0]
    with engine.reserve():
        fleet.set_members(wanted(e))
        fleet.set_members(wanted(e, d))
    assert fleet.decode[1] is engine
    assert (engine.obstacle, fleet.leaving) == (None, [])


async def test_an_engine_with_another_role_or_address_is_another(f: Fixture) -> None:
    d = await f.engine("decode", "d")
    d.role = "both"
    fleet = await f.fleet([], [d])
    old = fleet.decode[0]
    fleet.set_members([Member("prefill", EngineAddress(d.url))])
    assert (fleet.decode, fleet.leaving) == ([], [old])
    await until(lambda: fleet.prefill[0].healthy)  # though the one that leaves reports the same life


async def test_draining_by_its_source(f: Fixture) -> None:
    d, e = await f.engine("decode", "d"), await f.engine("decode", "e")
    fleet = await f.fleet([], [d, e])
    engine = fleet.decode[0]
    with engine.reserve():
        fleet.set_members([*wanted(d, drain=True), *wanted(e)])
        assert (engine.healthy, engine.obstacle, engine.drained) == (True, "it is draining", False)
        assert [view.healthy for view in fleet.view().decode] == [False, True]
        assert fleet.life(d.identity) is engine, "what it keeps may still be read"
    assert engine.drained
    d.load = 1
    await fleet.poll([engine])
    assert not engine.drained, "it has requests that this router does not know of"
    fleet.set_members(wanted(d, e))
    assert (engine.obstacle, engine.drained) == (None, False)


# ---- through the router ----


def write(file: Path, *engines: MockEngine, drain: tuple[MockEngine, ...] = ()) -> None:
    fleet: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
    for engine in engines:
        fleet[engine.role].append({"url": engine.url, "drain": engine in drain})
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.yaml.encode(fleet))
    new.replace(file)


async def shown(c: Cluster, wanted: dict[MockEngine, str]) -> None:
    """Until /ready lists exactly these engines, each `up` or `draining`."""
    states = {engine.url: state for engine, state in wanted.items()}
    async with asyncio.timeout(WAIT_S):
        while True:
            engines = (await c.get("/ready"))[1]["engines"]
            now = {
                e["url"]: "draining" if e["draining"] else "up" if e["healthy"] else "down" for e in engines
            }
            if now == states:
                return


async def test_membership_changes_under_load_lose_no_request(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.01)
    file = tmp_path / "fleet.yaml"
    more = [MockEngine("prefill", "p9"), MockEngine("decode", "d9"), MockEngine("decode", "d8")]
    for engine in more:
        await engine.start()
    p9, d9, d8 = more
    write(file, d8)
    statuses: list[int] = []
    stop = asyncio.Event()
    try:
        async with cluster(poll_interval_s=0.01, fleet_file=file) as c:

            async def client(path: str) -> None:
                while not stop.is_set():
                    status, _ = await c.post(c.body(), headers={"x-kvhandoff-path": path})
                    statuses.append(status)

            clients = [asyncio.create_task(client(path)) for path in ("pull", "push", "local") * 3]
            up: dict[MockEngine, str] = dict.fromkeys([c.p, c.d], "up")
            for _ in range(3):
                for members in ([p9, d9], [d9, d8], [d8], [p9, d8]):
                    write(file, *members)
                    await shown(c, up | dict.fromkeys(members, "up"))
                    page = await c.text("/metrics")
                    assert all(engine.url in page for engine in members)
                    seen = len(statuses)
                    await until(lambda: len(statuses) > seen + 10)  # noqa: B023
            stop.set()
            await soon(asyncio.gather(*clients))
            await c.at_rest()
            page = await c.text("/metrics")
            assert d8.url in page
            assert d9.url not in page
    finally:
        for engine in more:
            await engine.kill()
    assert set(statuses) == {200}
    assert all(engine.legs.qsize() for engine in more), "each of them had its share"
    assert all(engine.cancelled.empty() for engine in more)


async def test_a_bad_file_leaves_the_fleet_as_it_is_and_is_shown(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.01)
    file, d9 = tmp_path / "fleet.yaml", MockEngine("decode", "d9")
    await d9.start()
    write(file, d9)

    async def source(problem: str | None) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await c.get("/ready"))[1]["sources"][-1] != {"name": f"file {file}", "problem": problem}:
                pass

    try:
        async with cluster(poll_interval_s=0.01, fleet_file=file) as c:
            await shown(c, {c.p: "up", c.d: "up", d9: "up"})
            file.write_text("decode: [{url: 7}]")
            await source(f"fleet: {file}: decode[0].url: got 7, allowed is a string")
            await shown(c, {c.p: "up", c.d: "up", d9: "up"})
            write(file, d9, drain=(d9,))
            await shown(c, {c.p: "up", c.d: "up", d9: "draining"})
            await source(None)
    finally:
        await d9.kill()


async def test_an_operator_drains_an_engine(cluster: Any) -> None:
    async with cluster(decode=2, path="local") as c:
        going, staying = c.decode
        going.script = held
        request = c.start(c.body())
        leg = await soon(going.legs.get())

        for name in (going.engine_id, going.url):
            status, answer = await c.post({"engine": name}, path="/v1/engines/drain")
            assert status == 200
            assert (answer["url"], answer["draining"], answer["drained"], answer["legs"]) == (
                going.url,
                True,
                False,
                1,
            )
        for _ in range(5):
            assert (await c.post(c.body()))[0] == 200
        assert (going.legs.qsize(), staying.legs.qsize()) == (0, 5)
        assert "kvhandoff_router_engines_draining 1.0" in await c.text("/metrics")

        going.gate.set()
        assert (await soon(request))[0] == 200
        assert leg.request.transport is None or not going.cancelled.qsize()
        await c.at_rest()
        engines = (await c.get("/ready"))[1]["engines"]
        assert [e["drained"] for e in engines if e["role"] == "decode"] == [True, False]
        assert [(await c.post(c.body()))[0] for _ in range(3)] == [200] * 3
        assert (going.legs.qsize(), staying.legs.qsize()) == (0, 8)

        status, answer = await c.post({"engine": going.url, "drain": False}, path="/v1/engines/drain")
        assert (status, answer["draining"]) == (200, False)
        await asyncio.gather(c.post(c.body()), c.post(c.body()))
        assert going.legs.qsize() == 1


async def test_a_fleet_that_is_drained_as_a_whole(cluster: Any) -> None:
    async with cluster() as c:
        assert (await c.post({"engine": c.d.engine_id}, path="/v1/engines/drain"))[0] == 200
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        assert "it is draining" in answer["error"]["message"]
        assert (await c.get("/ready"))[0] == 503


@pytest.mark.parametrize(
    ("body", "said", "code"),
    [
        ({}, "engine: missing, it is required", None),
        ({"engine": "d0d0", "drain": "yes"}, "drain: got 'yes', allowed is true or false", None),
        ({"engine": "d0d0", "x": 1}, "body: got the unknown field 'x', allowed are engine, drain", None),
        ([], "body: got [], allowed is an object", None),
        ({"engine": "nobody"}, "engine: got 'nobody', allowed is d0d0, p0", "engine_not_found"),
    ],
)
async def test_bad_orders(cluster: Any, body: Any, said: str, code: str | None) -> None:
    async with cluster() as c:
        status, answer = await c.post(body, path="/v1/engines/drain")
        assert (status, answer["error"]["code"]) == (400, code)
        assert said in answer["error"]["message"]


# ---- registration over HTTP ----


def signed(engine: MockEngine, number: int, *, key: bytes = CLUSTER_KEY, lease_s: float = 60.0) -> str:
    return RegistrationKey(key).sign(
        Registration(
            engine=engine.identity,
            number=number,
            role=engine.role,  # type: ignore[arg-type]
            url=engine.url,
            lease_s=lease_s,
        )
    )


async def test_engines_register_themselves(cluster: Any) -> None:
    p, d = MockEngine("prefill", "p"), MockEngine("decode", "d")
    async with cluster(prefill=0, decode=0, registration=True, poll_interval_s=0.01) as c:
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        assert answer["error"]["message"] == "the fleet has no decode engine"
        for engine in (p, d):
            await engine.start()
            assert await c.post({"registration": signed(engine, 1)}, path="/internal/engines") == (200, {})
        await shown(c, {p: "up", d: "up"})
        status, answer = await c.post(c.body(), headers={"x-kvhandoff-path": "pull"})
        assert status == 200
        assert (p.legs.qsize(), d.legs.qsize()) == (1, 1)

        # One leaves in order while it has a leg; the leg ends well, then the engine is forgotten.
        d.script = held
        request = c.start(c.body(), headers={"x-kvhandoff-path": "local"})
        await soon(until(lambda: d.legs.qsize() == 2))
        assert await c.post({"registration": signed(d, 2, lease_s=0.0)}, path="/internal/engines") == (
            200,
            {},
        )
        await shown(c, {p: "up", d: "draining"})
        d.gate.set()
        assert (await soon(request))[0] == 200
        await shown(c, {p: "up"})

        # The other one's lease runs out.
        assert await c.post({"registration": signed(p, 2, lease_s=0.01)}, path="/internal/engines") == (
            200,
            {},
        )
        await shown(c, {})
        for engine in (p, d):
            await engine.kill()


async def test_a_foreign_registration_is_refused(cluster: Any) -> None:
    stranger = MockEngine("decode", "stranger")
    stranger.port = 1
    async with cluster(registration=True) as c:
        body = {"registration": signed(stranger, 1, key=b"another")}
        status, answer = await c.post(body, path="/internal/engines")
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (
            403,
            "bad_registration",
            "permission_error",
        )
        assert "; a router takes only those signed with its cluster's key" in answer["error"]["message"]
        assert len((await c.get("/ready"))[1]["engines"]) == 2


@pytest.mark.parametrize(
    ("raw", "param", "said"),
    [
        (b"", "body", "body: it must be a JSON object (it is empty)"),
        (b"[]", "body", "body: got [], allowed is an object"),
        (b'{"nothing":1}', "registration", "registration: missing, it is required"),
        (b'{"registration":5}', "registration", "registration: got 5, allowed is a string"),
        (
            b'{"registration":"a.b","registration":"c.d"}',
            "registration",
            "registration: got 'a.b' and 'c.d', allowed is one",
        ),
    ],
)
async def test_a_registration_that_is_none(cluster: Any, raw: bytes, param: str, said: str) -> None:
    async with cluster(registration=True) as c:
        async with c.session.post(f"{c.url}/internal/engines", data=raw) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"], error["message"]) == (400, param, said)


async def test_an_order_that_says_two_things(cluster: Any) -> None:
    async with cluster() as c:
        raw = b'{"engine":"p0","drain":false,"engine":"d0d0"}'
        async with c.session.post(f"{c.url}/v1/engines/drain", data=raw) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "engine")
        assert error["message"] == "engine: got 'p0' and 'd0d0', allowed is one"
        assert not any(engine["draining"] for engine in (await c.get("/ready"))[1]["engines"])


async def test_a_router_without_registration_takes_none(cluster: Any) -> None:
    async with cluster() as c:
        status, answer = await c.post({"registration": signed(c.d, 1)}, path="/internal/engines")
        assert (status, answer["error"]["code"]) == (404, "unknown_url")


async def test_a_name_s_engines_serve(cluster: Any) -> None:
    d = MockEngine("decode", "d")
    await d.start()
    async with cluster(prefill=0, decode=0, more_decode=(f"dns+http://localhost:{d.port}",)) as c:
        engines = {e["url"]: e["healthy"] for e in (await c.get("/ready"))[1]["engines"]}
        assert engines[d.url] is True
        assert (await c.post(c.body()))[0] == 200
        await d.kill()
