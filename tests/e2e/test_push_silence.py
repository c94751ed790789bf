"""Pushes that take long, at a source that lives and at one that does not (field cases 25 and 45).

Time is the tests': an engine's clock moves when told to, and nothing here depends on how fast a test runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.phases import Phase
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import Commit, Grant, Progress, Revoke
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.handoff.tickets import MissPolicy
from tests.cluster import Transport, until
from tests.e2e.pushes import Push, Pushing, left, policies, pushing, transports
from tests.e2e.stage import CHUNK, mute, news
from tests.legs import counted, new_key, pass_time

BLOCKS = 10
"""Of a prompt."""
SETTINGS = HandoffSettings()
RENEWAL = min(SETTINGS.claim_lease_s, SETTINGS.progress_s) / 3


@asynccontextmanager
async def timed(tiny: Path, transport: Transport = "shm") -> AsyncIterator[Pushing]:
    """Both clocks stand still; the deadlines are the usual ones."""
    async with pushing(
        tiny,
        transport,
        settings=SETTINGS,
        prefill_options={"clock": ManualClock(100.0)},
        decode_options={"clock": ManualClock(7.0)},
    ) as c:
        yield c


async def time_goes_on(c: Pushing, seconds: float) -> None:
    """On both clocks; whatever D asks meanwhile is answered."""
    while seconds > 0:
        asked, answered = len(c.from_d.sent_of(Grant)), len(c.from_d.received_of(Progress))
        pass_time(c.d, RENEWAL)
        pass_time(c.p, RENEWAL)
        sent = len(c.from_d.sent_of(Grant)) - asked
        assert sent > 0, "D does not ask"
        await c.from_d.has_received(Progress, answered + sent)
        seconds -= RENEWAL


async def queued_at_p(c: Pushing, prompt: list[int]) -> Push:
    """P is busy with another request for as long as its steps are held."""
    c.steps.close()
    asyncio.create_task(c.s.cluster.tokens(c.prompt(CHUNK), 1, url=c.p.url))  # noqa: RUF006  ends by itself
    await until(lambda: c.steps.holds)
    push = c.start(prompt)
    await c.named()
    await until(lambda: news(c.p) == 1)
    return push


async def test_queue_at_the_source_longer_than_all_deadlines(tiny: Path) -> None:
    """Field case 45: P has not even begun for 60 s, but it lives: no spurious recompute."""
    async with timed(tiny) as c:
        prompt = c.prompt()
        expected = await c.alone(prompt)
        push = await queued_at_p(c, prompt)
        await time_goes_on(c, 60.0)
        assert not push.decode.done()
        c.open()
        await is_transferred(c, push, expected)


async def test_prompt_longer_than_all_deadlines(tiny: Path) -> None:
    """Field case 45: each chunk takes longer than a lease; what is written stays written."""
    async with timed(tiny) as c:
        prompt = c.prompt()
        expected = await c.alone(prompt)
        push = await c.computed(prompt, 0)
        for chunk in range(1, 5):
            await time_goes_on(c, 2 * SETTINGS.progress_s)
            c.steps.let(1)
            await until(lambda chunk=chunk: c.writes.ended == chunk)
        c.open()
        await is_transferred(c, push, expected)
        assert (await c.record(push)).write_chunks == 5


async def test_queue_at_the_destination_longer_than_all_deadlines(tiny: Path) -> None:
    """Field case 25: P is done and keeps its blocks for as long as D's queue lives."""
    async with timed(tiny) as c:
        prompt, other = c.prompt(), c.prompt(CHUNK)
        expected, other_expected = await c.alone(prompt), await c.alone(other)
        c.s.decode_steps.close()
        busy = c.s.request(other, 6, url=c.d.url)
        await until(lambda: c.s.decode_steps.holds)
        push = c.start(prompt)
        await push.prefill
        await c.from_d.has_received(Progress)
        await time_goes_on(c, 60.0)
        assert c.p.blocks().offered == BLOCKS
        c.open()
        assert await busy == other_expected
        await is_transferred(c, push, expected)


async def is_transferred(c: Pushing, push: Push, expected: list[int]) -> None:
    assert (await push.decode).token_ids == expected
    record = await c.record(push)
    assert (record.kv_source, record.reasons) == ("transferred", [])
    assert await c.legs.reasons(c.p) == await c.legs.reasons(c.d) == {}
    await c.idle()


@transports
async def test_silent_source(tiny: Path, transport: Transport) -> None:
    """Field case 25: P says nothing any more, with a write in flight. D gives it up by its deadline, and its
    blocks wait; when P speaks again, they are free."""
    async with timed(tiny, transport) as c:
        prompt, other = c.prompt(), c.prompt()
        expected, other_expected = await c.alone(prompt), await c.alone(other)
        push = await c.half_written(prompt)
        unmute = mute(c.p)
        pass_time(c.d, SETTINGS.progress_s - 0.1)
        assert not push.decode.done()
        pass_time(c.d, 0.1)
        assert (await push.decode).token_ids == expected
        record = await c.record(push)
        assert record.reasons == [Reason.PUSH_TIMEOUT]
        assert record.phases[Phase.AWAIT_PREFILL] == pytest.approx(SETTINGS.progress_s)
        assert Phase.CLAIM not in record.phases
        assert c.d.blocks().quarantined == BLOCKS

        # It owes a fence for too long: nothing more is granted to it.
        pass_time(c.d, SETTINGS.fence_s)
        answer = await c.decode(other, new_key())
        assert answer.token_ids == other_expected
        assert (await c.legs.record(c.d, answer.key)).reasons == [Reason.PEER_UNREACHABLE]
        overdue = [Reason.PUSH_TIMEOUT, Reason.FENCE_OVERDUE, Reason.PEER_UNREACHABLE]
        assert await c.legs.reasons(c.d) == sum(map(counted, overdue[1:]), counted(overdue[0]))

        unmute()
        pass_time(c.d, SETTINGS.revoke_cap_s)
        await c.from_p.has_received(Revoke, 2)
        assert c.d.blocks().quarantined == BLOCKS, "its write is still in flight"
        c.open()
        await c.s.cluster.settled(c.d)
        await push.prefill
        await c.legs.withdraw(c.p, push.key)
        await c.idle()
        _, answer = await c.legs.push(c.p, c.d, other)
        assert answer.token_ids == other_expected
        await c.idle()


@policies
async def test_source_that_never_gets_the_prompt(tiny: Path, on_miss: MissPolicy) -> None:
    """The prefill leg is lost. P says so when its time is over, and D waits no longer than that."""
    async with timed(tiny) as c:
        prompt, key = c.prompt(), new_key()
        expected = await c.alone(prompt)
        leg = c.decode(prompt, key, on_miss=on_miss)
        await until(lambda: len(c.p.agent._running_node.writes) == 1)
        pass_time(c.p, SETTINGS.rendezvous_s - 0.1)
        assert len(c.p.agent._running_node.writes) == 1
        pass_time(c.p, 0.1)
        answer = await leg
        if on_miss == "recompute":
            assert answer.token_ids == expected
        else:
            assert (answer.status, answer.error["code"]) == (503, Reason.OFFER_UNKNOWN)
        assert (await c.legs.record(c.d, key)).reasons == [Reason.OFFER_UNKNOWN]
        await c.idle()


async def test_destination_that_hears_nothing_at_first(tiny: Path) -> None:
    """Nor does D wait longer than its own time for a first word."""
    async with timed(tiny) as c:
        prompt, key = c.prompt(), new_key()
        expected = await c.alone(prompt)
        mute(c.p)
        leg = c.decode(prompt, key)
        await until(lambda: c.d.core.load()["loading"] == 1)
        pass_time(c.d, SETTINGS.rendezvous_s)
        assert (await leg).token_ids == expected
        assert (await c.legs.record(c.d, key)).reasons == [Reason.PUSH_TIMEOUT]
        await c.s.cluster.settled(c.d)  # no blocks were granted, since nobody had answered


@transports
async def test_write_that_does_not_end(tiny: Path, transport: Transport) -> None:
    """P lives, but a write of it hangs: that is no sign of life. D computes; its blocks wait."""
    async with timed(tiny, transport) as c:
        prompt = c.prompt()
        expected = await c.alone(prompt)
        push = await c.half_written(prompt)
        await time_goes_on(c, SETTINGS.write_s - 2 * RENEWAL)
        assert not push.decode.done()
        pass_time(c.p, 3 * RENEWAL)
        said, asked = len(c.from_p.sent_of(Progress)), len(c.from_p.received_of(Grant))
        for times in (1, 2):
            pass_time(c.d, RENEWAL)
            await c.from_p.has_received(Grant, asked + times)
        assert len(c.from_p.sent_of(Progress)) == said
        pass_time(c.d, RENEWAL + 0.1)
        assert (await push.decode).token_ids == expected
        assert (await c.record(push)).reasons == [Reason.PUSH_TIMEOUT]
        assert c.d.blocks().quarantined == BLOCKS
        c.open()
        await c.s.cluster.settled(c.d)
        await push.prefill
        await c.legs.withdraw(c.p, push.key)
        await c.idle()


async def test_commit_that_is_lost(tiny: Path) -> None:
    """D asks again in time, and P says it again."""
    async with timed(tiny) as c:
        prompt = c.prompt()
        expected = await c.alone(prompt)
        push = await c.computed(prompt, 0)
        c.from_p.lose = lambda body: isinstance(body, Commit)
        c.steps.open()
        await until(lambda: len(c.from_p.sent_of(Commit)) == 1)
        c.from_p.lose = lambda body: False
        pass_time(c.d, RENEWAL)
        await is_transferred(c, push, expected)
        assert len(c.from_p.sent_of(Commit)) == 2


async def test_destination_dies_silently(tiny: Path) -> None:
    """Field case 25, the other way: D is gone, and nobody says so. P keeps nothing beyond one lease."""
    async with timed(tiny) as c:
        push = await c.half_written(c.prompt())
        mute(c.d)
        c.s.open()
        await push.prefill
        pass_time(c.p, SETTINGS.claim_lease_s)
        pass_time(c.p, SETTINGS.offer_lease_s)
        await c.s.cluster.settled(c.p)
        await left(push.decode)
