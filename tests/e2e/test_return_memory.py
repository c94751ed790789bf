"""A decode engine whose memory is short (field case 3): retained turns give way to requests, the least
recently used first, and never while a reader may still read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import ClaimDeclined, ClaimGranted
from kvhandoff.handoff.settings import HandoffSettings
from tests.cluster import Transport, until
from tests.e2e.turns import BLOCK, Forward, Talk, Turn, forwards, gated_talk, is_read, talk, transports
from tests.gates import StepGate, TransferGate
from tests.legs import MAX_TOKENS, counted, pass_time
from tests.wire import Wire

POOL = 24
EACH = 6
"""Blocks that are retained of each turn here."""
SETTINGS = HandoffSettings()
given_up = counted(Reason.OFFER_GIVEN_UP)


async def kept_turn(t: Talk) -> Turn:
    """A turn of which EACH blocks are retained."""
    turn = await t.turn(t.prompt(80), 20)
    assert turn.kept == EACH * BLOCK
    return turn


def retained(t: Talk, *turns: Turn) -> list[bool]:
    """Which of them are retained still, and claimable."""
    offers = t.d.agent._running_node.offers
    return [(o := offers.get(turn.key)) is not None and o.closing is None for turn in turns]


def needs(t: Talk, blocks: int) -> list[int]:
    """A prompt that needs so many blocks with its answer."""
    return t.prompt(blocks * BLOCK - MAX_TOKENS)


async def used(t: Talk, turn: Turn) -> None:
    """Read a turn, without anything that would need the decode engine's blocks."""
    offer = await t.legs.offer(t.p, turn.transcript + t.prompt(10), history=turn.history)
    record = await t.legs.record(t.p, offer.key)
    assert (record.transferred_tokens, record.reasons) == (turn.kept, [])
    await t.legs.withdraw(t.p, offer.key)
    await t.deployment.settled(t.p)


async def answers(t: Talk, prompt: list[int]) -> None:
    """The decode engine answers this prompt alone, right, whatever it retains."""
    expected = await t.legs.alone(t.p, prompt)
    assert await t.legs.alone(t.d, prompt) == expected


@pytest.mark.parametrize("needed", [POOL - 3 * EACH, POOL - 2 * EACH, POOL - EACH, POOL])
async def test_oldest_turns_give_way(tiny: Path, needed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Field case 3: as many as are needed, and no more, the least recently used first; the request runs."""
    caplog.set_level(logging.INFO)
    async with talk(tiny, decode_options={"num_blocks": POOL}) as t:
        turns = [await kept_turn(t) for _ in range(3)]
        await used(t, turns[0])
        by_use = [turns[1], turns[2], turns[0]]
        assert t.d.blocks().retained == 3 * EACH

        await answers(t, needs(t, needed))
        gone = (needed - (POOL - 3 * EACH)) // EACH
        assert retained(t, *by_use) == [False] * gone + [True] * (3 - gone)
        assert await t.legs.reasons(t.d) == counted(Reason.OFFER_GIVEN_UP, gone)
        assert t.d.blocks().retained == (3 - gone) * EACH
        for turn in by_use[:gone]:
            lines = [line for line in caplog.messages if line.startswith(f"{turn.key}: offer_given_up")]
            assert len(lines) == 1
        await t.forget(*by_use[gone:])


@forwards
async def test_next_turn_of_one_that_gave_way(tiny: Path, forward: Forward) -> None:
    """Field case 3: it is computed anew, with the right text, and says why; those that are left are read."""
    async with talk(tiny, decode_options={"num_blocks": POOL}) as t:
        turns = [await kept_turn(t) for _ in range(3)]
        await answers(t, needs(t, POOL - EACH))
        assert retained(t, *turns) == [False, False, True]
        for turn, read, reasons in (
            (turns[2], turns[2].kept, []),
            (turns[0], 0, [Reason.OFFER_GIVEN_UP]),
        ):
            prompt = turn.transcript + t.prompt(30)
            expected = await t.legs.alone(t.p, prompt)
            reply = await t.reply(prompt, turn.history, forward)
            assert reply.token_ids == expected
            assert (reply.source.transferred_tokens, reply.source.reasons) == (read, reasons)
            await t.deployment.settled(t.p)
        assert await t.legs.reasons(t.p) == given_up
        await t.forget(turns[2])


async def test_turns_with_a_common_beginning(tiny: Path) -> None:
    """Giving up one of two turns of a conversation frees little: what the later one shares stays."""
    async with talk(tiny, decode_options={"num_blocks": POOL}) as t:
        first = await t.turn(t.prompt(160), 20)
        second = await t.turn(first.transcript + t.prompt(40), 20)
        assert t.d.blocks().retained == second.kept // BLOCK == 14
        await answers(t, needs(t, POOL - 13))
        assert retained(t, first, second) == [False, False]
        await answers(t, needs(t, POOL))
        await t.deployment.settled()


async def test_request_that_shares_with_what_gives_way(tiny: Path) -> None:
    """The next turn itself needs the memory of its history: it finds that in the prefix cache."""
    async with talk(tiny, decode_options={"num_blocks": POOL}) as t:
        turn = await kept_turn(t)
        prompt = turn.transcript + t.prompt(POOL * BLOCK - 100 - MAX_TOKENS)
        expected = await t.legs.alone(t.p, prompt)
        reply = await t.reply(prompt, turn.history)
        assert reply.token_ids == expected
        assert reply.source.transferred_tokens == reply.destination.cached_tokens == turn.kept
        await t.deployment.settled(t.p)
        await t.forget(turn)


async def test_many_requests_at_once(tiny: Path) -> None:
    """Field case 3: 24 requests in a pool full of retained turns: none waits for them, all are right."""
    async with talk(tiny, decode_options={"num_blocks": POOL}) as t:
        for _ in range(3):
            await kept_turn(t)
        prompts = [t.prompt(40 + 8 * n) for n in range(24)]
        expected = [await t.legs.alone(t.p, prompt) for prompt in prompts]
        legs = [t.legs.local(t.d, prompt) for prompt in prompts]  # each is retained in its turn
        answered = await asyncio.gather(*legs)
        assert [answer.token_ids for answer in answered] == expected
        records = [await t.legs.record(t.d, answer.key) for answer in answered]
        assert all(record.reasons == [] for record in records)
        counts = t.d.blocks()
        assert counts.used == counts.loading == 0
        assert counts.retained == counts.offered > 0
        await answers(t, needs(t, POOL))
        await t.deployment.settled()


async def test_answer_that_grows(tiny: Path) -> None:
    """An answer gets the blocks that it comes to need, one turn after the other; it is never preempted for
    what is merely retained."""
    async with talk(tiny, decode_options={"num_blocks": POOL}) as t:
        turns = [await kept_turn(t) for _ in range(3)]
        prompt = t.prompt(2 * BLOCK)
        expected = await t.legs.alone(t.p, prompt, 16 * BLOCK)
        steps = StepGate(t.d)
        assert await t.legs.alone(t.d, prompt, 16 * BLOCK) == expected
        assert steps.tokens == 18 * BLOCK - 1, "some were computed twice"
        assert retained(t, *turns) == [False, False, True]
        await t.forget(turns[2])


# ------------------------------------------------------------------------------------ turns that are read


class Pinned:
    """A turn that is being read, its bytes held back, on a decode engine that is full otherwise."""

    def __init__(self, t: Talk, gate: TransferGate, turn: Turn) -> None:
        self.t = t
        self.gate = gate
        self.turn = turn
        self.to_d = Wire(t.p)

    async def begin(self) -> None:
        t = self.t
        prompt = self.turn.transcript + t.prompt(30)
        self.right = await t.legs.alone(t.p, prompt)
        self.big = needs(t, POOL - 2)
        self.big_right = await t.legs.alone(t.p, self.big)
        self.gate.closed = True
        self.leg = asyncio.create_task(t.legs.offer(t.p, prompt, history=self.turn.history))
        await is_read(self.turn, self.gate)
        await self.to_d.has_received(ClaimGranted)
        offer = t.d.agent._running_node.offers.get(self.turn.key)
        assert offer is not None
        self.prompt, self.blocks, self.before = prompt, offer.blocks, self.content(offer.blocks)

    def content(self, blocks: tuple[int, ...]) -> list[bytes]:
        size = self.t.d.region.block_bytes
        return [bytes(self.t.d.region.buffer[b * size : (b + 1) * size]) for b in blocks]

    async def request_waits(self) -> asyncio.Task[list[int]]:
        """A request that needs the turn's blocks too: the turn is given up, and not freed."""
        t = self.t
        waits = asyncio.create_task(t.deployment.tokens(self.big, MAX_TOKENS, url=t.d.url))
        await until(lambda: retained(t, self.turn) == [False])
        assert t.d.core.load()["waiting"] == 1
        assert t.d.blocks().retained == EACH
        return waits

    def unharmed(self) -> bool:
        """Whether the blocks hold what the reader was promised."""
        return self.content(self.blocks) == self.before


@asynccontextmanager
async def pinned(tiny: Path, transport: Transport = "shm") -> AsyncIterator[Pinned]:
    async with gated_talk(
        tiny,
        transport=transport,
        prefill_options={"clock": ManualClock(3.0)},
        decode_options={"clock": ManualClock(9.0), "num_blocks": POOL},
    ) as (t, gate):
        made = Pinned(t, gate, await kept_turn(t))
        await made.begin()
        yield made
        await t.deployment.settled()


@transports
async def test_turn_that_is_read_gives_way_afterwards(tiny: Path, transport: Transport) -> None:
    """Field case 3: the reader gets what it was promised; then the request that waits gets the blocks."""
    async with pinned(tiny, transport) as f:
        t = f.t
        waits = await f.request_waits()
        assert f.unharmed()
        f.gate.closed = False
        offer = await f.leg
        assert await waits == f.big_right
        record = await t.legs.record(t.p, offer.key)
        assert (record.transferred_tokens, record.reasons) == (f.turn.kept, [])
        answer = await t.legs.decode(t.d, offer, f.prompt)
        assert answer.token_ids == f.right
        assert await t.legs.reasons(t.d) == given_up


@transports
async def test_reader_that_takes_too_long_is_told(tiny: Path, transport: Transport) -> None:
    """Field case 3: a request waits for a slow reader no longer than for its next renewal. The reader learns
    of it then, and computes; what it reads late, it does not use."""
    async with pinned(tiny, transport) as f:
        t = f.t
        waits = await f.request_waits()
        assert f.unharmed()
        pass_time(t.p, SETTINGS.claim_lease_s / 3)
        offer = await f.leg  # while its read is still on the way
        assert f.to_d.received_of(ClaimDeclined)[-1].reason == Reason.OFFER_GIVEN_UP
        record = await t.legs.record(t.p, offer.key)
        assert (record.transferred_tokens, record.reasons) == (0, [Reason.OFFER_GIVEN_UP])
        assert await waits == f.big_right
        assert not f.unharmed()
        quarantined = t.p.blocks().quarantined
        assert quarantined > 0
        f.gate.closed = False
        answer = await t.legs.decode(t.d, offer, f.prompt)
        assert answer.token_ids == f.right


async def test_turns_that_nobody_reads_give_way_first(tiny: Path) -> None:
    """Though the one that is read was used before them."""
    async with pinned(tiny) as f:
        t = f.t
        others = [await kept_turn(t) for _ in range(2)]
        assert t.d.blocks().retained == 3 * EACH
        await answers(t, needs(t, POOL - EACH))
        assert retained(t, f.turn, *others) == [True, False, False]
        assert f.unharmed()
        f.gate.closed = False
        offer = await f.leg
        assert (await t.legs.record(t.p, offer.key)).transferred_tokens == f.turn.kept
        await t.legs.withdraw(t.p, offer.key)
        await t.legs.withdraw(t.d, f.turn.key)
