"""What the router makes of its policies: work is reserved in tokens, costs are learned from the engines'
accounts and stated in records, and a pushed request is moved when another decode engine is clearly better."""

from __future__ import annotations

import asyncio
from typing import Any

from kvhandoff.core.records import LegRecord
from kvhandoff.router.policy import TYPICAL_TOKENS, Policies
from tests.router.conftest import LONG_PROMPT
from tests.router.engines import MockEngine, decode, held, soon, until
from tests.router.test_fleet import Fixture, f  # noqa: F401 - a fixture
from tests.router.test_push import both, push
from tests.router.test_return import TURN_1, TURN_2, turn

TOKENS = list(range(1000))


def account(engine: MockEngine, leg: str, phases: dict[str, float], **fields: Any) -> None:
    """A leg that the engine reports from now on."""
    engine.records.append(
        LegRecord(
            handoff_id="h" * 16,
            attempt=len(engine.records),
            leg=leg,
            engine_id=engine.engine_id,
            epoch=engine.identity.epoch,
            phases=phases,
            **fields,
        )
    )


async def reported(engine: MockEngine) -> None:
    """Until the router has all that the engine has to say now."""
    seen = len(engine.cursors)
    await until(lambda: len(engine.cursors) > seen + 1)


# ---- reservations ----


async def test_load_is_in_tokens(f: Fixture) -> None:  # noqa: F811
    p, d = await f.engine("prefill", "p"), await f.engine("decode", "d")
    d.load = 2
    fleet = await f.fleet([p], [d])
    others = 2 * TYPICAL_TOKENS
    engine = fleet.decode[0]
    with engine.reserve(300, 300) as local, engine.reserve(200):
        view = engine.view()
        assert (view.load, view.queue, view.running, view.chosen) == (others + 500, 300, 4, 2)
        local.computed()
        assert (engine.view().load, engine.view().queue) == (others + 500, 0)
        local.end()
        assert (engine.view().load, engine.view().running) == (others + 200, 3)
        # A leg of ours is none of the others that the engine reports.
        await engine.poll()
        assert (engine.view().load, engine.view().running) == (TYPICAL_TOKENS + 200, 2)
    assert (engine.view().load, engine.view().queue, engine.reserved) == (TYPICAL_TOKENS, 0, 0)
    with fleet.prefill[0].reserve(300, 300):
        assert (fleet.prefill[0].view().load, fleet.prefill[0].view().queue) == (300, 300)


async def test_a_long_prompt_weighs_more_than_two_short_ones(cluster: Any) -> None:
    async with cluster(prefill=2) as c:
        for engine in c.prefill:
            engine.script = held
        requests = [c.start(c.body(prompt=TOKENS), headers={"x-kvhandoff-path": "pull"})]
        await until(lambda: c.p.legs.qsize() == 1)
        for n in (1, 2):
            requests.append(c.start(c.body(prompt=TOKENS[:100]), headers={"x-kvhandoff-path": "pull"}))
            await until(lambda n=n: c.prefill[1].legs.qsize() == n)
        assert c.p.legs.qsize() == 1
        for engine in c.prefill:
            engine.gate.set()
        assert [status for status, _ in await soon(asyncio.gather(*requests))] == [200] * 3
        await c.at_rest()


async def test_a_turn_goes_to_the_prefill_engine_that_computed_the_last_one(cluster: Any) -> None:
    """Though the other one has been given fewer; but not behind a queue (field case 42)."""
    async with cluster(prefill=2) as c:
        first = await turn(c, TURN_1)
        second = await turn(c, TURN_2)
        assert second.engines["prefill"] is first.engines["prefill"] is c.p
        requests = []
        for engine in (c.prefill[1], c.p):
            engine.script = held
            requests.append(c.start(c.body(prompt=TOKENS), headers={"x-kvhandoff-path": "pull"}))
            await soon(engine.legs.get())
        c.prefill[1].gate.set()
        assert (await soon(requests[0]))[0] == 200
        await soon(c.d.legs.get())
        third = await turn(c, TURN_2)
        assert third.engines["prefill"] is c.prefill[1]
        c.p.gate.set()
        assert (await soon(requests[1]))[0] == 200


# ---- learning, and what records say ----


async def test_engines_accounts_are_learned_from_once(f: Fixture) -> None:  # noqa: F811
    p, d = await f.engine("prefill", "p"), await f.engine("decode", "d")
    account(p, "prefill", {"prefill_compute": 4.0}, computed_tokens=1000)
    fleet = await f.fleet([p], [d])
    first = fleet.view().prefill[0].costs.compute_s
    assert (first.n, 0.0005 < first.at(500).value < 0.004) == (1, True)
    await fleet.prefill[0].poll()
    assert fleet.view().prefill[0].costs.compute_s == first
    account(p, "prefill", {"prefill_compute": 4.0}, computed_tokens=1000)
    await fleet.prefill[0].poll()
    second = fleet.view().prefill[0].costs.compute_s
    assert (second.n, first.at(500).value < second.at(500).value < 0.004) == (2, True)
    assert fleet.view().decode[0].costs.compute_s.n == 0


async def test_a_record_says_why_its_path_won(cluster: Any) -> None:
    async with cluster(poll_interval_s=0.01) as c:
        c.d.free = 1000
        await reported(c.d)
        status, answer = await c.post(c.body(prompt=TOKENS))
        record = await c.record(answer["id"])
        assert (status, record["path"], record["reasons"]) == (200, "push", [])
        expected = record["expected"]
        assert (expected["prompt_tokens"], expected["text_bytes"]) == (1000, None)
        assert set(expected["ttft_s"]) == {"local", "pull", "push"}
        assert expected["ttft_s"]["push"] < expected["ttft_s"]["pull"]
        assert set(expected["harm_s"]) == {"local"}
        assert expected["won_by"] == "wire"

        for _ in range(100):  # P takes 100 times as long as D for a token
            account(c.p, "prefill", {"prefill_compute": 10.0}, computed_tokens=100)
            account(c.d, "local", {"recompute": 0.1}, computed_tokens=100)
        await reported(c.p)
        await reported(c.d)
        _, answer = await c.post(c.body(prompt=TOKENS))
        record = await c.record(answer["id"])
        assert (record["path"], record["reasons"]) == ("local", ["local_cheaper"])
        assert record["expected"]["won_by"] == "compute"

        _, answer = await c.post(c.body(prompt=TOKENS), headers={"x-kvhandoff-path": "push"})
        assert (await c.record(answer["id"]))["expected"] is None


async def test_text_is_taken_for_as_many_tokens_as_it_had(cluster: Any) -> None:
    async def long(engine: MockEngine, leg: Any) -> Any:
        response = await decode(engine, leg)
        engine.records[-1].prompt_tokens = 100
        return response

    async with cluster() as c:
        c.d.script = long
        seen = []
        for _ in range(3):
            _, answer = await c.post(c.body(prompt="x" * 400))
            record = await c.record(answer["id"])
            seen.append(record["expected"]["prompt_tokens"])
            assert record["expected"]["text_bytes"] == 400
        assert seen[0] == 400
        assert seen[0] > seen[1] > seen[2] > 100


async def test_bindings(cluster: Any) -> None:
    """A short prompt would be pulled, a long one pushed."""
    for binding, path in (("late", "pull"), ("early", "push"), ("rebind", "push")):
        async with cluster(policies=Policies(binding=binding)) as c:  # type: ignore[arg-type]
            for prompt in (LONG_PROMPT, TOKENS):
                _, answer = await c.post(c.body(prompt=prompt))
                assert (await c.record(answer["id"]))["path"] == path


# ---- the router re-binds ----


async def test_a_queue_at_the_decode_engine_moves_a_pushed_request(cluster: Any) -> None:
    async with cluster(decode=2, policies=Policies(binding="rebind"), poll_interval_s=0.01) as c:
        c.p.script = c.d.script = c.decode[1].script = held
        c.decode[1].free = 1000
        request = push(c)
        p, d = await both(c)
        c.d.load, c.d.waiting = 2, 1  # two others run, and this one has no blocks yet
        again = await soon(c.decode[1].legs.get())
        assert (await soon(c.d.yielded.get())).key == d.ticket.key
        assert (await soon(c.d.withdrawn.get())).key == d.ticket.key
        assert await soon(c.d.cancelled.get()) is d
        assert again.ticket.key.attempt == 1
        assert again.ticket.push_from == d.ticket.push_from
        await reported(c.decode[1])  # it stays there
        c.p.gate.set()
        c.decode[1].gate.set()
        assert (await soon(request))[0] == 200
        record = await c.record(p.ticket.key.handoff_id)
        assert (record["rebound"], record["path"], record["attempts"]) == (1, "push", 2)
        assert record["reasons"] == ["forced", "rebound"]
        assert c.p.cancelled.empty()
        assert c.d.legs.empty()


async def test_a_request_that_has_begun_to_answer_stays(cluster: Any) -> None:
    async with cluster(decode=2, policies=Policies(binding="rebind"), poll_interval_s=0.01) as c:
        c.p.script = c.d.script = held
        c.d.begun = True
        request = push(c, stream=False)
        p, _ = await both(c)
        c.d.load, c.d.waiting = 2, 1
        await reported(c.d)
        await reported(c.d)
        c.p.gate.set()
        c.d.gate.set()
        assert (await soon(request))[0] == 200
        assert (await c.record(p.ticket.key.handoff_id))["rebound"] == 0
        assert c.decode[1].legs.empty()
        assert c.d.cancelled.empty()
        await c.at_rest()
