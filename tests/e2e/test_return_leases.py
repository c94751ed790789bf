"""How long a retained turn lives (field case 2): just in time, just too late, in the middle of a read, on
clocks that disagree; renewed by use, or for a fixed time.

Time is the tests': an engine's clock moves when told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.events import Retention, Tick
from kvhandoff.handoff.messages import Claim, ClaimDeclined, ClaimGranted, Release
from kvhandoff.handoff.settings import HandoffSettings
from tests.cluster import Transport, until
from tests.e2e.turns import BLOCK, Forward, Reply, Talk, Turn, gated_talk, is_read, talk, transports
from tests.gates import TransferGate
from tests.legs import counted, pass_time
from tests.wire import Wire

SETTINGS = HandoffSettings()
TTL, LEASE, CLAIM_LEASE = SETTINGS.retain_fixed_s, SETTINGS.retain_lease_s, SETTINGS.claim_lease_s
RENEWAL = CLAIM_LEASE / 3
HOLD = 20.0
"""Seconds that turns are retained where a read lasts longer than that."""

skewed = pytest.mark.parametrize("ahead", [-5.0, 5.0], ids=["behind", "ahead"])


async def next_turn(t: Talk, turn: Turn, forward: Forward = "pull") -> Reply:
    """A right answer to the next turn, whatever was read for it."""
    prompt = turn.transcript + t.prompt(30)
    reply = await t.reply(prompt, turn.history, forward)
    assert reply.token_ids == await t.legs.alone(t.d, prompt)
    await t.deployment.settled(t.p)
    return reply


def both_pass(t: Talk, seconds: float) -> None:
    """Time goes on for both engines."""
    pass_time(t.d, seconds)
    pass_time(t.p, seconds)


@skewed
@pytest.mark.parametrize(
    ("retain", "waited", "in_time", "forward"),
    [
        ("fixed", TTL - 0.2, True, "pull"),
        ("fixed", TTL + 1, False, "push"),
        ("renewable", LEASE - 0.2, True, "push"),
        ("renewable", LEASE + 1, False, "pull"),
    ],
)
async def test_just_before_and_just_after(
    tiny: Path, ahead: float, retain: Retention, waited: float, in_time: bool, forward: Forward
) -> None:
    """Field case 2: only the holder's clock counts, and other requests in between change nothing."""
    clocks = [{"clock": ManualClock(100.0 + ahead)}, {"clock": ManualClock(100.0)}]
    async with talk(tiny, num_blocks=32, prefill_options=clocks[0], decode_options=clocks[1]) as t:
        turn = await t.turn(t.prompt(120), 20, retain=retain)
        both_pass(t, waited)
        await t.legs.flood(t.d, t.rng)
        assert t.d.blocks().retained == (turn.kept // BLOCK if in_time else 0)
        reply = await next_turn(t, turn, forward)
        expired = {} if in_time else counted(Reason.OFFER_EXPIRED)
        assert reply.source.transferred_tokens == (turn.kept if in_time else 0)
        assert reply.source.reasons == ([] if in_time else [Reason.OFFER_EXPIRED])
        assert await t.legs.reasons(t.d) == await t.legs.reasons(t.p) == expired
        if in_time:
            await t.legs.withdraw(t.d, turn.key)
        await t.deployment.settled()


async def test_use_renews_a_lease_and_no_fixed_time(tiny: Path) -> None:
    """`renewable` counts from the last use, `fixed` from the turn's end."""
    async with talk(
        tiny, prefill_options={"clock": ManualClock(3.0)}, decode_options={"clock": ManualClock(9.0)}
    ) as t:
        renewed = await t.turn(t.prompt(120), 20, retain="renewable")
        fixed = await t.turn(t.prompt(140), 20, retain="fixed")
        both_pass(t, TTL - 1)
        for turn in (renewed, fixed):
            assert (await next_turn(t, turn)).source.transferred_tokens == turn.kept
        both_pass(t, 2)
        assert (await next_turn(t, fixed)).source.reasons == [Reason.OFFER_EXPIRED]
        both_pass(t, LEASE - 3)
        for _ in range(3):  # each use is a second before the end that the one before has set
            assert (await next_turn(t, renewed)).source.transferred_tokens == renewed.kept
            both_pass(t, LEASE - 1)
        assert t.d.blocks().retained == renewed.kept // BLOCK
        both_pass(t, 1)
        await t.deployment.settled()
        assert (await next_turn(t, renewed)).source.reasons == [Reason.OFFER_EXPIRED]
        await t.deployment.settled()


class Reading:
    """A prefill engine in the middle of a read: claimed, posted, and no byte has moved."""

    def __init__(self, t: Talk, gate: TransferGate, turn: Turn, prompt: list[int], right: list[int]) -> None:
        self.t = t
        self.gate = gate
        self.turn = turn
        self.right = right
        self.to_d = Wire(t.p)
        self.before = self.content()
        gate.closed = True
        self.reply = asyncio.create_task(t.reply(prompt, turn.history))

    def content(self) -> list[bytes]:
        """The bytes of the retained blocks, block by block."""
        t, size = self.t, self.t.d.region.block_bytes
        offer = t.d.agent._running_node.offers.get(self.turn.key)
        assert offer is not None, "the blocks were given back"
        return [bytes(t.d.region.buffer[b * size : (b + 1) * size]) for b in offer.blocks]

    async def renews(self, seconds: float) -> None:
        """Time goes on, and the reader renews its claim meanwhile."""
        while seconds > 0:
            answers = len(self.to_d.received_of(ClaimGranted))
            step = min(RENEWAL, seconds)
            pass_time(self.t.p, step)
            if step == RENEWAL:
                await self.to_d.has_received(ClaimGranted, answers + 1)
            pass_time(self.t.d, step)
            seconds -= step


@asynccontextmanager
async def reading(tiny: Path, retain: Retention, transport: Transport = "shm") -> AsyncIterator[Reading]:
    async with gated_talk(
        tiny,
        transport=transport,
        num_blocks=32,
        prefill_options={"clock": ManualClock(3.0)},
        decode_options={"clock": ManualClock(9.0)},
        settings=HandoffSettings(retain_fixed_s=HOLD, retain_lease_s=HOLD, read_s=10 * HOLD),
    ) as (t, gate):
        turn = await t.turn(t.prompt(120), 20, retain=retain)
        prompt = turn.transcript + t.prompt(30)
        read = Reading(t, gate, turn, prompt, await t.legs.alone(t.d, prompt))
        await is_read(turn, gate)
        await read.to_d.has_received(ClaimGranted)
        yield read
        await t.deployment.settled()


@transports
async def test_read_that_ends_after_the_deadline(tiny: Path, transport: Transport) -> None:
    """Field case 2: it began before, so the blocks are kept for it; nobody else begins any more."""
    async with reading(tiny, "fixed", transport) as r:
        t = r.t
        await r.renews(HOLD - 1)
        pass_time(t.d, 2)  # the deadline passes; the claim's lease still runs
        assert t.d.blocks().retained == r.turn.kept // BLOCK
        await t.legs.flood(t.d, t.rng)
        assert r.content() == r.before
        r.gate.closed = False
        reply = await r.reply
        assert reply.token_ids == r.right
        assert (reply.source.transferred_tokens, reply.source.reasons) == (r.turn.kept, [])
        await t.deployment.settled()
        assert (await next_turn(t, r.turn)).source.reasons == [Reason.OFFER_EXPIRED]


@transports
async def test_read_that_never_ends(tiny: Path, transport: Transport) -> None:
    """Field case 2: at its next renewal the reader is told, and computes; the holder, which does not hear its
    answer, waits no longer than a claim's lease, and the late bytes hit nobody."""
    async with reading(tiny, "fixed", transport) as r:
        t, kept = r.t, r.turn.kept // BLOCK
        await r.renews(HOLD - 1)
        pass_time(t.d, 2)
        assert t.d.blocks().retained == kept
        r.to_d.lose = lambda body: isinstance(body, Release)
        pass_time(t.p, RENEWAL)
        reply = await r.reply  # while the bytes are still on the way
        assert r.to_d.received_of(ClaimDeclined)[-1].reason == Reason.OFFER_EXPIRED
        assert reply.token_ids == r.right
        assert (reply.source.transferred_tokens, reply.source.reasons) == (0, [Reason.OFFER_EXPIRED])
        assert t.p.blocks().quarantined == -(-reply.source.prompt_tokens // BLOCK)

        assert r.content() == r.before
        pass_time(t.d, CLAIM_LEASE)
        await until(lambda: t.d.blocks().retained == 0)
        await t.legs.flood(t.d, t.rng)
        prompts = [t.prompt(50) for _ in range(4)]
        expected = [await t.legs.alone(t.d, prompt) for prompt in prompts]
        r.gate.closed = False
        await t.deployment.settled()
        assert [await t.legs.alone(t.p, prompt) for prompt in prompts] == expected


async def test_renewable_turn_lives_as_long_as_it_is_read(tiny: Path) -> None:
    """A read longer than the lease of what it reads."""
    async with reading(tiny, "renewable") as r:
        t = r.t
        await r.renews(2 * HOLD)
        await t.legs.flood(t.d, t.rng)
        assert r.content() == r.before
        r.gate.closed = False
        reply = await r.reply
        assert (reply.token_ids, reply.source.transferred_tokens) == (r.right, r.turn.kept)
        await t.legs.withdraw(t.d, r.turn.key)


@pytest.mark.parametrize("lands", [False, True], ids=["bytes stay away", "bytes come late"])
async def test_reader_that_falls_silent(tiny: Path, lands: bool) -> None:
    """Its claim's lease ends; the turn stays for others, and the reader trusts nothing that comes late."""
    async with reading(tiny, "renewable") as r:
        t = r.t
        r.to_d.lose = lambda body: isinstance(body, (Claim, Release))
        clock = t.p.agent.clock
        assert isinstance(clock, ManualClock)
        clock.advance(CLAIM_LEASE)
        if lands:
            r.gate.closed = False  # the bytes are there before anybody has looked at the clock
        else:
            t.p.agent.feed(Tick())
        reply = await r.reply
        assert reply.token_ids == r.right
        assert (reply.source.transferred_tokens, reply.source.reasons) == (0, [Reason.LEASE_LAPSED])
        pass_time(t.d, CLAIM_LEASE)
        assert await t.legs.reasons(t.d) == counted(Reason.LEASE_LAPSED)
        assert t.d.blocks().retained == r.turn.kept // BLOCK
        await t.legs.withdraw(t.d, r.turn.key)
        await t.deployment.settled(t.d)
        r.gate.closed = False
