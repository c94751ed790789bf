"""The fleet view: state reports, health, epochs, tickets in the engine's own time, introductions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.tickets import BadTicket, TicketGate, TicketKey
from kvhandoff.router.config import RouterConfig, Timeouts
from kvhandoff.router.engine import MISSED_POLLS, RETRY_POLLS
from kvhandoff.router.fleet import Fleet
from kvhandoff.router.policy import TYPICAL_TOKENS
from tests.router.engines import CLUSTER_KEY, WAIT_S, MockEngine, key_of, soon, until


class Fixture:
    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.clock = ManualClock(50.0)
        self.legs: list[LegRecord] = []

    async def engine(self, role: Any, engine_id: str, make: type[MockEngine] = MockEngine) -> MockEngine:
        engine = make(role, engine_id)
        await engine.start()
        self.stack.push_async_callback(engine.kill)
        return engine

    async def fleet(
        self, prefill: Sequence[MockEngine], decode: Sequence[MockEngine], **config: Any
    ) -> Fleet:
        session = await self.stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_connect=1))
        )
        settings = RouterConfig(
            prefill=tuple(engine.address for engine in prefill),
            decode=tuple(engine.address for engine in decode),
            cluster_key=CLUSTER_KEY,
            **({"poll_interval_s": 60.0, "pair_tests": "off"} | config),
        )
        fleet = Fleet(settings, session, self.clock, self.legs.extend)
        self.stack.push_async_callback(fleet.close)
        await fleet.start()
        return fleet


@pytest.fixture
async def f() -> AsyncIterator[Fixture]:
    async with AsyncExitStack() as stack:
        yield Fixture(stack)


def record(handoff_id: str, engine: MockEngine) -> LegRecord:
    return LegRecord(
        handoff_id=handoff_id,
        attempt=0,
        leg="decode",
        engine_id=engine.engine_id,
        epoch=engine.identity.epoch,
    )


async def test_state(f: Fixture) -> None:
    p, d = await f.engine("prefill", "p"), await f.engine("decode", "d")
    d.load = 3
    fleet = await f.fleet([p], [d])
    assert fleet.prefill[0].identity == p.identity
    assert fleet.decode[0].identity == d.identity
    with fleet.decode[0].reserve():
        view = fleet.view().decode[0]
        assert (view.healthy, view.load, view.chosen, view.block_size) == (True, 4 * TYPICAL_TOKENS, 1, 16)
    view = fleet.view().decode[0]
    assert (view.load, view.chosen) == (3 * TYPICAL_TOKENS, 1)
    assert fleet.models() == {"tiny": 4096}
    assert fleet.engine(view) is fleet.decode[0]


async def test_polls_go_on_by_themselves(f: Fixture) -> None:
    d = await f.engine("decode", "d")
    await f.fleet([], [d], poll_interval_s=0.01)
    await until(lambda: len(d.cursors) > 3)


async def test_records_come_once(f: Fixture) -> None:
    d = await f.engine("decode", "d")
    fleet = await f.fleet([], [d])
    d.records += [record("a", d), record("b", d)]
    await fleet.poll(fleet.engines)
    d.records.append(record("c", d))
    await fleet.poll(fleet.engines)
    await fleet.poll(fleet.engines)
    assert [leg.handoff_id for leg in f.legs] == ["a", "b", "c"]
    assert d.cursors == [0, 0, 2, 3]


class Noted(list[LegRecord]):
    """Accounts, how many came at once, and something that is called when some come."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.then: Callable[[], object] = lambda: None

    def extend(self, legs: Iterable[LegRecord]) -> None:
        before = len(self)
        super().extend(legs)
        self.sizes.append(len(self) - before)
        self.then()


async def test_many_records_are_taken_in_parts(f: Fixture) -> None:
    """Requests are served in between."""
    f.legs = noted = Noted()
    d = await f.engine("decode", "d")
    fleet = await f.fleet([], [d])
    d.records += [record(str(number), d) for number in range(100)]
    loop, served = asyncio.get_running_loop(), []
    noted.then = lambda: loop.call_soon(lambda: served.append(len(noted)))
    await fleet.poll(fleet.engines)
    assert [leg.handoff_id for leg in noted] == [str(number) for number in range(100)]
    assert noted.sizes == [32, 32, 32, 4]
    assert served[:3] == [32, 64, 96]


async def test_none_of_many_records_is_lost_with_who_asked(f: Fixture) -> None:
    f.legs = noted = Noted()
    d = await f.engine("decode", "d")
    fleet = await f.fleet([], [d])
    d.records += [record(str(number), d) for number in range(100)]
    asking = asyncio.create_task(fleet.poll(fleet.engines))
    noted.then = asking.cancel
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: len(noted) == 100)
    assert noted.sizes == [32, 68]
    noted.then = lambda: None
    await fleet.poll(fleet.engines)
    assert len(noted) == 100


async def test_a_new_life_s_records_are_read_from_their_start(f: Fixture) -> None:
    d = await f.engine("decode", "d")
    fleet = await f.fleet([], [d])
    d.records += [record("old", d)] * 5
    await fleet.poll(fleet.engines)
    f.legs.clear()
    await d.restart()
    d.records += [record("new", d)]
    await fleet.poll(fleet.engines)
    assert [leg.handoff_id for leg in f.legs] == ["new"]
    assert fleet.decode[0].identity == d.identity
    await fleet.poll(fleet.engines)
    assert len(f.legs) == 1


async def test_wrong_role_is_refused(f: Fixture, caplog: pytest.LogCaptureFixture) -> None:
    p, d = await f.engine("prefill", "p"), await f.engine("decode", "d")
    fleet = await f.fleet([d], [p])
    wanted = "given to the router as a prefill engine, but it has the role decode"
    assert fleet.prefill[0].problem == wanted
    assert not fleet.decode[0].healthy
    assert wanted in caplog.text
    p.role = "both"
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].healthy


async def test_words_of_a_newer_engine_leave_its_report_usable(f: Fixture) -> None:
    d = await f.engine("decode", "d")
    fleet = await f.fleet([], [d])
    newer = record("a", d)
    newer.leg, newer.reasons = "encode", ["of_a_newer_version", Reason.REVOKED]  # type: ignore[list-item]
    newer.phases = {"of_a_newer_version": 1.0}
    d.records += [newer, record("b", d)]
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].healthy
    assert [leg.handoff_id for leg in f.legs] == ["a", "b"]
    assert f.legs[0].reasons == [Reason.UNKNOWN, Reason.REVOKED]
    assert (f.legs[0].leg, f.legs[0].phases) == ("encode", newer.phases)
    d.role = "encode"
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].problem == "given to the router as a decode engine, but it has the role encode"


async def test_dead_engine_and_its_return(f: Fixture) -> None:
    d = await f.engine("decode", "d")
    fleet = await f.fleet([], [d])
    await d.kill()
    await fleet.poll(fleet.engines)
    assert not fleet.decode[0].healthy
    d.new_life()
    await d.start()
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].healthy
    assert fleet.decode[0].identity == d.identity


async def test_some_missed_reports_are_borne(f: Fixture) -> None:
    """A busy engine may answer late; only several in a row make it unhealthy."""
    d = await f.engine("decode", "d")
    fleet = await f.fleet([], [d], timeouts=Timeouts(poll_s=0.2))

    async def never() -> None:
        await asyncio.Event().wait()

    d.state_script = never
    for _ in range(MISSED_POLLS - 1):
        await fleet.poll(fleet.engines)
        assert fleet.decode[0].healthy
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].problem == "no state report in 0.2 s"


async def test_an_engine_that_says_it_can_t_work(f: Fixture) -> None:
    d = await f.engine("decode", "d")
    fleet = await f.fleet([], [d])

    async def stopped() -> None:
        raise web.HTTPServiceUnavailable

    d.state_script = stopped
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].problem == "its state report is refused with status 503"
    d.state_script = None
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].healthy


async def test_garbage_is_no_report(f: Fixture) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\n{"a":1}')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(script, "127.0.0.1", 0)
    async with server:
        d = MockEngine("decode", "d")
        d.port = server.sockets[0].getsockname()[1]
        fleet = await f.fleet([], [d])
        assert not fleet.decode[0].healthy
        assert "no usable state report" in str(fleet.decode[0].problem)
        assert fleet.models() == {}


async def test_an_unreachable_engine_does_not_hold_up_others(f: Fixture) -> None:
    """Field case 51: here one that takes connections and never answers."""
    p, stuck, d = (
        await f.engine("prefill", "p"),
        await f.engine("prefill", "s"),
        await f.engine("decode", "d"),
    )

    async def never() -> None:
        await asyncio.Event().wait()

    stuck.state_script = never
    fleet = await f.fleet([stuck, p], [d], timeouts=Timeouts(poll_s=0.5), poll_interval_s=0.01)
    assert [engine.healthy for engine in fleet.engines] == [False, True, True]
    while not (peers := (await soon(d.peers.get())).peers):
        pass  # the decode engine was up first
    assert peers == (f"tcp://127.0.0.1:{p.port + 1}",)
    seen = len(d.cursors)
    await until(lambda: len(d.cursors) > seen + 3)


async def test_every_pair_meets(f: Fixture) -> None:
    """Field case 51: handshakes ahead of the first request, from both sides, and again for a new life."""
    prefill = [await f.engine("prefill", f"p{i}") for i in range(4)]
    decode = [await f.engine("decode", f"d{i}") for i in range(4)]
    fleet = await f.fleet(prefill, decode)

    def addresses(engines: list[MockEngine]) -> set[str]:
        return {f"tcp://127.0.0.1:{engine.port + 1}" for engine in engines}

    def met(engine: MockEngine) -> set[str]:
        return {peer for ticket in list(engine.peers._queue) for peer in ticket.peers}  # type: ignore[attr-defined]

    for engines, others in ((prefill, decode), (decode, prefill)):
        await until(lambda: all(met(engine) == addresses(others) for engine in engines))  # noqa: B023
        for engine in engines:
            while not engine.peers.empty():
                ticket = engine.peers.get_nowait()
                assert (ticket.leg, ticket.audience) == ("peers", engine.identity)

    for (newcomer, *rest), others in ((prefill, decode), (decode, prefill)):
        await newcomer.restart()
        await fleet.poll(fleet.engines)
        for engine in others:
            assert set((await soon(engine.peers.get())).peers) == addresses([newcomer])
        assert set((await soon(newcomer.peers.get())).peers) == addresses(others)
        assert all(engine.peers.empty() for engine in rest)


async def test_an_engine_with_another_key(f: Fixture, caplog: pytest.LogCaptureFixture) -> None:
    """It reports its state, but would refuse every leg: unhealthy until it takes an introduction."""
    p, d = await f.engine("prefill", "p"), await f.engine("decode", "d")
    for engine in (p, d):
        engine.gatekeeper = TicketGate(TicketKey(b"another"), engine.identity)
    fleet = await f.fleet([p], [d])
    problems = [str(engine.problem) for engine in fleet.engines]
    assert all(problem.startswith("it refuses the router's tickets: ") for problem in problems)
    assert all("not signed with this cluster's key" in problem for problem in problems)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len([w for w in warnings if "refuses the router's tickets" in w]) == 2
    for _ in range(RETRY_POLLS - 1):
        await fleet.poll(fleet.engines)
    assert not any(engine.healthy for engine in fleet.engines)

    # The same lives are asked again after some polls, and take part from then on.
    for engine in (p, d):
        engine.gatekeeper = TicketGate(TicketKey(CLUSTER_KEY), engine.identity)
    await fleet.poll(fleet.engines)
    assert (await soon(p.peers.get())).peers == (await soon(d.peers.get())).peers == ()
    async with asyncio.timeout(WAIT_S):
        while not all(engine.healthy for engine in fleet.engines):
            await fleet.poll(fleet.engines)
    while not (peers := (await soon(d.peers.get())).peers):
        pass
    assert peers == (f"tcp://127.0.0.1:{p.port + 1}",)


async def test_a_refused_introduction_is_no_matter_of_the_next_life(f: Fixture) -> None:
    d = await f.engine("decode", "d")
    d.gatekeeper = TicketGate(TicketKey(b"another"), d.identity)
    fleet = await f.fleet([], [d])
    assert not fleet.decode[0].healthy
    await d.restart()
    await fleet.poll(fleet.engines)
    assert fleet.decode[0].healthy
    # Nor is a ticket that comes too late for the life it was signed for.
    d.peers = asyncio.Queue()
    await d.restart()
    await fleet.decode[0].introduce(())
    assert fleet.decode[0].healthy
    assert (await soon(d.peers.get())).audience == d.identity


async def test_polls_under_way_are_shared(f: Fixture) -> None:
    """Many readers of records cost two reports at most: the one under way, and one begun after they asked."""
    d = await f.engine("decode", "d")
    fleet = await f.fleet([], [d])
    d.cursors.clear()
    gate = asyncio.Event()
    d.state_script = gate.wait  # type: ignore[assignment]
    first = asyncio.create_task(fleet.poll(fleet.engines))
    await asyncio.sleep(0)
    readers = [asyncio.create_task(fleet.poll(fleet.engines)) for _ in range(50)]
    await asyncio.sleep(0)
    d.records.append(record("late", d))
    gate.set()
    await soon(asyncio.gather(first, *readers))
    assert len(d.cursors) == 2
    assert [leg.handoff_id for leg in f.legs] == ["late"]


@pytest.mark.parametrize("offset", [-5.0, 0.0, 12345.0])
async def test_tickets_run_out_by_the_engine_s_clock(f: Fixture, offset: float) -> None:
    """Field case 2: no two clocks are compared; a ticket ends early rather than late."""
    d = await f.engine("decode", "d")
    engine_now = ManualClock(100.0 + offset)
    d.clock = engine_now  # type: ignore[method-assign]
    fleet = await f.fleet([], [d], timeouts=Timeouts(ticket_s=10.0))
    engine = fleet.decode[0]

    def admit(signed: str) -> None:
        TicketGate(TicketKey(CLUSTER_KEY), d.identity).admit(signed, engine_now())

    # 7 s pass on both clocks since the report: the ticket is good for 10 s from now, not from then.
    f.clock.advance(7)
    engine_now.advance(7)
    signed = engine.sign("local", key_of("h"))
    engine_now.advance(9.9)
    admit(signed)
    engine_now.advance(0.2)
    with pytest.raises(BadTicket, match=r"ran out 0\.1 s ago"):
        admit(signed)


async def test_no_ticket_before_the_first_report(f: Fixture) -> None:
    d = MockEngine("decode", "d")
    d.port = 1
    fleet = await f.fleet([], [d])
    with pytest.raises(LookupError, match="has not reported"):
        fleet.decode[0].sign("local", key_of("h"))
