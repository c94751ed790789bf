"""Field case 21: pairs of engines that don't really hand over are found when they come up, and not used."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.ids import EngineId, Identity, new_epoch
from kvhandoff.core.reasons import Reason
from kvhandoff.router import pairs
from kvhandoff.router.pairs import PairTests
from tests.router.conftest import Cluster
from tests.router.engines import (
    WAIT_S,
    Leg,
    MockEngine,
    completion,
    decode,
    failing,
    held,
    prefill,
    reset,
    soon,
    until,
)

PULL, PUSH = {"x-kvhandoff-path": "pull"}, {"x-kvhandoff-path": "push"}


def recomputes(*sources: MockEngine) -> Any:
    """A decode engine that computes what comes from these prefill engines itself, and answers."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        assert leg.ticket is not None
        refs = [ref for ref in (leg.ticket.offer, leg.ticket.push_from) if ref is not None]
        if not any(ref.source == source.identity for ref in refs for source in sources):
            return await decode(engine, leg)
        engine.note(leg, computed_tokens=4, reasons=[Reason.READ_TIMEOUT], finish_reason="stop")
        return web.json_response(completion(leg, "Hello"))

    return script


async def offers_nothing(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    engine.note(leg, computed_tokens=4, finish_reason="length")
    params = {"offer": None, "prompt_token_ids": [1]}
    return web.json_response(completion(leg, "x") | {"kv_transfer_params": params})


async def no_agent(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """A server that takes no notice of tickets: it has no connector."""
    return web.json_response(completion(leg, "x"))


def legs_of(engine: MockEngine) -> list[Leg]:
    legs = []
    while not engine.legs.empty():
        legs.append(engine.legs.get_nowait())
    return legs


async def reported(c: Cluster, *, passed: int, failed: int = 0, untested: int = 0) -> list[dict[str, Any]]:
    """Until /ready says so: the pairs that failed."""
    async with asyncio.timeout(WAIT_S):
        while True:
            now = (await c.get("/ready"))[1]["pairs"]
            if (now["passed"], len(now["failed"]), now["untested"]) == (passed, failed, untested):
                return now["failed"]  # type: ignore[no-any-return]


class Broken(MockEngine):
    """Engines that fail from their first request on."""

    bad: Any = None

    def __init__(self, role: Any, engine_id: str) -> None:
        super().__init__(role, engine_id)
        if self.bad is not None and role == self.bad[0]:
            self.script = self.bad[1]


def broken(role: str, script: Any) -> type[MockEngine]:
    return type("Broken", (Broken,), {"bad": (role, script)})


async def test_every_pair_is_tested_once(cluster: Any) -> None:
    async with cluster(prefill=2, decode=2, pair_tests="on") as c:
        assert await reported(c, passed=4) == []
        p_legs = [leg for p in c.prefill for leg in legs_of(p)]
        d_legs = [leg for d in c.decode for leg in legs_of(d)]
        assert (len(p_legs), len(d_legs)) == (4, 4)
        pairs_seen = {(leg.ticket.offer.source, leg.ticket.audience) for leg in d_legs}
        assert pairs_seen == {(p.identity, d.identity) for p in c.prefill for d in c.decode}
        for leg in p_legs + d_legs:
            assert len(leg.body["prompt"]) == 32, "two blocks"
            assert leg.body["max_tokens"] == 1
        prompts = {tuple(leg.body["prompt"]) for leg in p_legs}
        salts = {leg.ticket.cache_salt for leg in p_legs}
        assert (len(prompts), len(salts)) == (4, 4), "nobody else has such a prompt, and none two of them"
        assert {leg.ticket.cache_salt for leg in d_legs} == salts
        assert all(engine.withdrawn.empty() for engine in c.engines)
        page = await c.text("/metrics")
        assert 'kvhandoff_router_pairs{result="passed"} 4.0' in page
        assert "kvhandoff_router_requests_total{" not in page, "it is no client's request"
        await c.at_rest()


async def test_a_new_life_is_tested_anew(cluster: Any) -> None:
    async with cluster(prefill=2, pair_tests="on", poll_interval_s=0.01) as c:
        await reported(c, passed=2)
        for engine in c.engines:
            legs_of(engine)
        await c.p.restart()
        await until(lambda: c.d.legs.qsize() == 1)
        await reported(c, passed=2)
        (leg,) = legs_of(c.d)
        assert leg.ticket.offer.source == c.p.identity
        assert c.prefill[1].legs.empty()


async def test_a_pair_that_falls_back_is_found_and_not_used(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """p0 can't hand over to d0, but to d1; p1 can to both."""
    made: dict[str, MockEngine] = {}

    class Engine(MockEngine):
        def __init__(self, role: Any, engine_id: str) -> None:
            super().__init__(role, engine_id)
            made[engine_id] = self
            if engine_id == "d0d0":
                self.script = recomputes(made["p0"])

    async with cluster(prefill=2, decode=2, pair_tests="on", make=Engine) as c:
        (failed,) = await reported(c, passed=3, failed=1)
        p0, d0 = c.p, c.d
        assert (failed["prefill"], failed["decode"]) == (p0.url, d0.url)
        assert failed["problem"].endswith("computed the prompt itself (read_timeout)")
        (said,) = [r for r in caplog.records if "handoff test" in r.getMessage() and r.levelname == "WARNING"]
        assert f"at {p0.url} to decode engine d0d0 at {d0.url}: failed" in said.getMessage()
        page = await c.text("/metrics")
        assert 'kvhandoff_router_pairs{result="failed"} 1.0' in page
        assert f'kvhandoff_router_pair_failed{{decode="{d0.url}",prefill="{p0.url}"}} 1.0' in page
        # Its two tries have left no offer behind.
        assert p0.withdrawn.qsize() == 2

        for number in range(24):
            if number % 3 == 0:  # so that no order of the engines' turns is the right one by chance
                await c.post(c.body(), headers={"x-kvhandoff-path": "local"})
            headers = PULL if number % 4 < 2 else PUSH
            status, answer = await c.post(c.body(), headers=headers)
            assert status == 200
            record = await c.record(answer["id"])
            ends = record["prefill"]["engine_id"], record["decode"]["engine_id"]
            assert ends != ("p0", "d0d0")
            assert record["kv_source"] == "transferred"
        assert {leg.ticket.leg for leg in legs_of(d0)} == {"decode", "local"}, "d0 is used with p1"


async def test_without_any_working_pair_prompts_are_computed_locally(cluster: Any) -> None:
    async with cluster(pair_tests="on", make=broken("prefill", offers_nothing)) as c:
        (failed,) = await reported(c, passed=0, failed=1)
        assert failed["problem"] == f"prefill engine p0 at {c.p.url} offered nothing"
        legs_of(c.p)
        for headers in (PULL, PUSH, {}):
            status, answer = await c.post(c.body(prompt="long " * 200), headers=headers)
            assert status == 200
            record = await c.record(answer["id"])
            assert (record["path"], record["reasons"]) == ("local", ["no_prefill_engine"])
        assert c.p.legs.empty()


async def test_an_engine_without_an_agent_is_found(cluster: Any) -> None:
    async with cluster(pair_tests="on", make=broken("prefill", no_agent)) as c:
        (failed,) = await reported(c, passed=0, failed=1)
        assert "does it run a handoff agent?" in failed["problem"]


async def test_a_failed_pair_is_tested_again(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "RETEST_S", 0.01)
    async with cluster(pair_tests="on", make=broken("prefill", offers_nothing)) as c:
        await reported(c, passed=0, failed=1)
        c.p.script = prefill
        await reported(c, passed=1)
        status, answer = await c.post(c.body(), headers=PULL)
        assert (status, (await c.record(answer["id"]))["path"]) == (200, "pull")
        assert "kvhandoff_router_pair_failed{" not in await c.text("/metrics")


@pytest.mark.parametrize("script", [reset, failing(500), failing(400), failing(403, "bad_ticket")])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_is_no_matter_of_the_pair_leaves_it_untested_and_in_use(
    cluster: Any, role: str, script: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(pair_tests="on", make=broken(role, script)) as c:
        await until(lambda: any(": untested: " in r.getMessage() for r in caplog.records))
        await reported(c, passed=0, untested=1)
        c.p.script, c.d.script = prefill, decode
        status, answer = await c.post(c.body(), headers=PULL)
        assert (status, (await c.record(answer["id"]))["path"]) == (200, "pull")
        if role == "decode":
            assert c.p.withdrawn.qsize() == 1


async def test_tests_hold_up_no_traffic_and_are_bounded(cluster: Any) -> None:
    """All tests hang: the router starts, and serves."""
    async with cluster(prefill=4, decode=2, pair_tests="on", make=broken("prefill", held)) as c:
        await until(lambda: sum(p.legs.qsize() for p in c.prefill) == pairs.TOGETHER)
        for _ in range(4):
            assert (await c.post(c.body(), headers={"x-kvhandoff-path": "local"}))[0] == 200
        assert sum(p.legs.qsize() for p in c.prefill) == pairs.TOGETHER
        for p in c.prefill:
            p.gate.set()
        await reported(c, passed=8)


async def test_a_test_has_a_deadline(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "TEST_S", 0.05)
    async with cluster(pair_tests="on", make=broken("prefill", held)) as c:
        assert await soon(c.p.cancelled.get())
        assert (await soon(c.p.withdrawn.get())).leg == "withdraw"
        await c.at_rest()
        await reported(c, passed=0, untested=1)


@pytest.mark.parametrize(
    ("choice", "limit", "tested"), [("auto", 4, True), ("auto", 3, False), ("on", 3, True)]
)
async def test_large_fleets_are_tested_if_told_to(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, choice: str, limit: int, tested: bool
) -> None:
    monkeypatch.setattr(pairs, "AUTO_PAIRS", limit)
    async with cluster(prefill=2, decode=2, pair_tests=choice) as c:
        if tested:
            await reported(c, passed=4)
        else:
            assert (await c.post(c.body(), headers={"x-kvhandoff-path": "local"}))[0] == 200
            await reported(c, passed=0, untested=4)
            assert all(p.legs.empty() for p in c.prefill)


async def test_only_pairs_that_get_legs_are_tested(cluster: Any) -> None:
    """Of one model, healthy, and not draining."""

    class Engine(MockEngine):
        def __init__(self, role: Any, engine_id: str) -> None:
            super().__init__(role, engine_id)
            if engine_id == "d1d1":
                self.model = "another"
            if engine_id == "d2d2":
                self.role = "prefill"

    async with cluster(decode=4, pair_tests="on", make=Engine) as c:
        await reported(c, passed=2)
        assert (await c.post({"engine": c.d.url}, path="/v1/engines/drain"))[0] == 200
        await reported(c, passed=1)
        assert [d.legs.qsize() for d in c.decode] == [1, 0, 0, 1]


async def test_verdicts_on_past_lives_are_forgotten() -> None:
    engines = [SimpleNamespace(url=f"http://{name}", obstacle=None, view=lambda: MODEL_VIEW) for name in "pd"]
    p, d = engines
    p.identity, d.identity = (Identity(EngineId(name), new_epoch()) for name in "pd")
    tested: asyncio.Queue[tuple[Any, Any]] = asyncio.Queue()

    async def test(p: Any, d: Any, deadline_s: float) -> str | None:
        tested.put_nowait((p.identity, d.identity))
        return None

    tests = PairTests(test, lambda: ([p], [d]), ManualClock(), "on")  # type: ignore[arg-type, list-item, return-value]
    running = asyncio.create_task(tests.run())
    for _ in range(5):
        await soon(tested.get())
        await until(lambda: tests.report().passed == 1)
        assert len(tests._verdicts) == 1
        p.identity = Identity(EngineId("p"), new_epoch())
        assert tests.report().untested == 1
        tests.wake()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


MODEL_VIEW = SimpleNamespace(model="tiny")
