"""Return and forward in one turn: the history is read from the decode engine that kept it, the rest computed,
and all handed to a decode engine by push or pull: the same one or another, or yet another by re-binding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import Fenced, OfferDescriptor
from kvhandoff.handoff.settings import HandoffSettings
from tests.cluster import LiveEngine, Transport, until
from tests.e2e.pushes import named_grants
from tests.e2e.stage import leave, leftovers
from tests.e2e.turns import (
    BLOCK,
    Forward,
    Talk,
    Turn,
    blocks_of,
    forwards,
    gated_talk,
    readers,
    talk,
    transports,
)
from tests.gates import StepGate, TransferGate
from tests.legs import Answered, new_key, pass_time
from tests.wire import Wire

CHUNK = 2 * BLOCK
NEW = 3 * CHUNK
"""Tokens of the second turn; with those of the first that were not kept, in four chunks."""


class Combined:
    """P, whose steps, reads and writes can be held; D1, which has kept a turn; and D2, which has nothing."""

    def __init__(self, t: Talk, transfers: TransferGate) -> None:
        self.t, self.legs = t, t.legs
        self.p = t.p
        self.d1, self.d2 = t.deployment.decode
        self.transfers = transfers
        """P's: one read, and then writes."""
        self.steps = StepGate(t.p)
        self.from_d1 = Wire(self.d1)
        self.turn: Turn
        self.prompt: list[int]
        self.right: list[int]

    async def begin(self) -> None:
        self.turn = await self.t.turn(self.t.prompt(120), 20)
        self.prompt = self.turn.transcript + self.t.prompt(NEW)
        self.right = await self.legs.alone(self.d2, self.prompt)
        self.size = self.d1.region.block_bytes
        self.kept, self.all = self.turn.kept // BLOCK, blocks_of(len(self.prompt))

    def prefill(self, key: HandoffKey, d: LiveEngine) -> asyncio.Task[Answered]:
        """P's leg: read D1's turn, push to `d`."""
        leg = self.legs.prefill_push(self.p, d, self.prompt, key=key, history=self.turn.history)
        return asyncio.create_task(leg)

    def decode(
        self, key: HandoffKey, d: LiveEngine, offer: HandoffKey | None = None
    ) -> asyncio.Task[Answered]:
        """The leg of the decode engine `d`; `offer`: what the first attempt's prefill leg computes."""
        leg = self.legs.decode_push(self.p, d, self.prompt, key=key, offer=offer)
        return asyncio.create_task(leg)

    async def computing(
        self, d: LiveEngine
    ) -> tuple[HandoffKey, asyncio.Task[Answered], asyncio.Task[Answered]]:
        """P has read the history, `d` has granted what it lacks, and P has computed one chunk."""
        self.steps.close()
        key = new_key()
        prefill, decode = self.prefill(key, d), self.decode(key, d)
        await until(lambda: len(named_grants(self.p)) == 1 and self.steps.holds)
        self.steps.let(1)
        await until(lambda: self.steps.done == 1 and self.steps.holds)
        return key, prefill, decode

    async def forget(self) -> None:
        """Nobody will come for the turn."""
        await self.legs.withdraw(self.d1, self.turn.key)

    async def idle(self) -> None:
        """Nothing is left anywhere."""
        engines = (self.p, self.d1, self.d2)
        await until(
            lambda: not any(leftovers(e) for e in engines),
            describe=lambda: str([leftovers(e) for e in engines]),
        )

    def open(self) -> None:
        self.steps.open()
        self.transfers.closed, self.transfers.closed_to = False, None


@asynccontextmanager
async def combined(tiny: Path, transport: Transport = "shm", **prefill: object) -> AsyncIterator[Combined]:
    async with gated_talk(
        tiny,
        transport=transport,
        decode=2,
        num_blocks=40,
        max_step_tokens=CHUNK,
        settings=HandoffSettings(offer_lease_s=60.0, claim_lease_s=60.0),
        prefill_options=prefill,
    ) as (t, gate):
        made = Combined(t, gate)
        try:
            await made.begin()
            made.steps.reset()
            gate.posted = gate.ended = gate.blocks = 0
            yield made
        finally:
            made.open()


def again(key: HandoffKey) -> HandoffKey:
    """The next attempt of the same handoff."""
    return msgspec.structs.replace(key, attempt=key.attempt + 1)


# ------------------------------------------------------------------------------------------- where it goes


@transports
async def test_to_the_one_that_kept_it(tiny: Path, transport: Transport) -> None:
    """D1 grants the new blocks only, and gets them while the rest is computed."""
    async with combined(tiny, transport) as c:
        key, prefill, decode = await c.computing(c.d1)
        await until(lambda: c.transfers.ended == 2)  # the read, and the first chunk's write
        assert c.transfers.blocks == c.kept + 2
        c.open()
        assert ((await prefill).status, (await decode).token_ids) == (200, c.right)
        source, destination = await c.legs.record(c.p, key), await c.legs.record(c.d1, key)
        assert source.transferred_tokens == c.turn.kept
        assert source.computed_tokens == len(c.prompt) - c.turn.kept
        assert destination.cached_tokens == c.turn.kept
        assert destination.transferred_tokens == len(c.prompt) - c.turn.kept
        assert destination.bytes == (c.all - c.kept) * c.size
        assert 0 < destination.early_bytes < destination.bytes
        assert (destination.grants, destination.reasons) == (1, [])
        await c.forget()
        await c.idle()


@transports
async def test_to_another(tiny: Path, transport: Transport) -> None:
    """D2 gets all blocks; those of the history before P has computed anything."""
    async with combined(tiny, transport) as c:
        c.steps.close()
        key = new_key()
        prefill, decode = c.prefill(key, c.d2), c.decode(key, c.d2)
        await until(lambda: c.transfers.ended == 2)
        assert (c.transfers.blocks, c.steps.done) == (2 * c.kept, 0)
        c.open()
        assert ((await prefill).status, (await decode).token_ids) == (200, c.right)
        source, destination = await c.legs.record(c.p, key), await c.legs.record(c.d2, key)
        assert source.transferred_tokens == c.turn.kept
        assert destination.transferred_tokens == len(c.prompt)
        assert destination.bytes == c.all * c.size
        assert destination.early_bytes >= c.kept * c.size
        await c.forget()
        await c.idle()


@forwards
async def test_conversation_that_moves(tiny: Path, forward: Forward) -> None:
    """Each turn is answered by the other decode engine: its history comes from the one before, and what is
    moved forward is what this one lacks."""
    async with talk(tiny, decode=2, num_blocks=64) as t:
        engines, kept_by = t.deployment.decode, [0, 0]
        turn = await t.turn(t.prompt(100), 20, engine=engines[0])
        kept_by[0] = turn.kept
        for number in range(1, 6):
            which = number % 2
            d = engines[which]
            prompt = turn.transcript + t.prompt(30)
            expected = await t.legs.alone(t.p, prompt, 20)
            reply = await t.reply(prompt, turn.history, forward, d=d, max_tokens=20, retain="renewable")
            assert reply.token_ids == expected
            assert reply.source.transferred_tokens == turn.kept
            assert reply.destination.cached_tokens == kept_by[which]
            lacks = blocks_of(len(prompt)) - kept_by[which] // BLOCK
            assert reply.destination.bytes == lacks * d.region.block_bytes
            await t.legs.withdraw(turn.engine, turn.key)
            turn = Turn(d, reply.answered.key, prompt, reply.token_ids)
            kept_by[which] = turn.kept
        await t.forget(turn)


async def test_answered_alone_by_another(tiny: Path) -> None:
    """A local leg of D2 reads what D1 kept, and retains the whole turn for the next; D1 reads that."""
    async with talk(tiny, decode=2) as t:
        d1, d2 = t.deployment.decode
        turn = await t.turn(t.prompt(120), 20, engine=d1)
        prompt = turn.transcript + t.prompt(NEW)
        expected = await t.legs.alone(t.p, prompt)
        answer = await t.legs.local(d2, prompt, history=turn.history)
        assert answer.token_ids == expected
        record = await t.legs.record(d2, answer.key)
        second = Turn(d2, answer.key, prompt, answer.token_ids)
        assert (record.transferred_tokens, record.retained_tokens) == (turn.kept, second.kept)
        assert "return" in record.phases

        prompt = second.transcript + t.prompt(30)
        expected = await t.legs.alone(t.p, prompt)
        answer = await t.legs.local(d1, prompt, history=second.history, retain=None)
        assert answer.token_ids == expected
        record = await t.legs.record(d1, answer.key)
        # D1 has the first turn in its cache, and reads what came after.
        assert record.cached_tokens == turn.kept
        assert record.transferred_tokens == second.kept - turn.kept
        assert record.bytes == (second.kept - turn.kept) // BLOCK * d1.region.block_bytes
        await t.forget(turn, second)


# --------------------------------------------------------------------------------------------- re-binding


@transports
@pytest.mark.parametrize("to_holder", [True, False], ids=["to the one that kept it", "to another"])
async def test_rebound_while_p_computes(tiny: Path, transport: Transport, to_holder: bool) -> None:
    """The second grant ends the first; P computes each token once, and the history is read once."""
    async with combined(tiny, transport) as c:
        first, second = (c.d2, c.d1) if to_holder else (c.d1, c.d2)
        key, prefill, decode = await c.computing(first)
        rebound = c.decode(again(key), second, offer=key)
        late = await decode  # it hears that it was re-bound, and computes for whoever still waits
        assert late.token_ids == c.right
        record = await c.legs.record(first, key)
        assert (record.transferred_tokens, record.reasons) == (0, [Reason.REBOUND])
        c.open()
        assert ((await prefill).status, (await rebound).token_ids) == (200, c.right)
        source, destination = await c.legs.record(c.p, key), await c.legs.record(second, again(key))
        assert source.transferred_tokens == c.turn.kept
        assert c.steps.tokens == len(c.prompt) - c.turn.kept
        hit = c.turn.kept if to_holder else 0
        assert destination.cached_tokens == hit
        assert destination.transferred_tokens == len(c.prompt) - hit
        assert destination.bytes == (c.all - hit // BLOCK) * c.size
        assert c.legs.cluster.decode[0].blocks().retained == c.kept
        await c.forget()
        await c.idle()


@transports
async def test_rebound_while_the_history_is_read(tiny: Path, transport: Transport) -> None:
    """Before P has anything to write: the grant of the first ends at once, the second gets everything."""
    async with combined(tiny, transport) as c:
        c.transfers.closed = True
        key = new_key()
        prefill, decode = c.prefill(key, c.d1), c.decode(key, c.d1)
        await until(lambda: c.transfers.held == 1 and readers(c.d1, c.turn) == 1)
        await until(lambda: len(named_grants(c.p)) == 1)
        await leave(decode)
        rebound = c.decode(again(key), c.d2, offer=key)
        await until(lambda: [grant.grantee for grant in named_grants(c.p)] == [c.d2.agent.me])
        await c.from_d1.has_received(Fenced)
        assert c.d1.blocks().granted == c.d1.blocks().quarantined == 0
        c.open()
        assert ((await prefill).status, (await rebound).token_ids) == (200, c.right)
        assert (await c.legs.record(c.p, key)).transferred_tokens == c.turn.kept
        assert (await c.legs.record(c.d2, again(key))).transferred_tokens == len(c.prompt)
        await c.forget()
        await c.idle()


@transports
@pytest.mark.parametrize("holder", [True, False], ids=["by the one that kept it", "by another"])
async def test_falls_to_pull(tiny: Path, transport: Transport, holder: bool) -> None:
    """P has finished, and nobody was granted to: whoever pulls gets what it lacks."""
    async with combined(tiny, transport) as c:
        key = new_key()
        answered = await c.prefill(key, c.d1)
        offer = msgspec.convert(answered.body["kv_transfer_params"]["offer"], OfferDescriptor)
        d, hit = (c.d1, c.turn.kept) if holder else (c.d2, 0)
        answer = await c.legs.decode(d, offer, c.prompt, key=again(key))
        assert answer.token_ids == c.right
        record = await c.legs.record(d, again(key))
        assert (record.cached_tokens, record.transferred_tokens) == (hit, len(c.prompt) - hit)
        assert record.bytes == (c.all - hit // BLOCK) * c.size
        assert (await c.legs.record(c.p, key)).transferred_tokens == c.turn.kept
        await c.forget()
        await c.idle()


# ------------------------------------------------------------------------------------------ when one fails


@transports
@pytest.mark.parametrize("cached", [0, 3 * BLOCK], ids=["P has nothing", "P has a beginning"])
async def test_push_goes_on_without_the_history(tiny: Path, transport: Transport, cached: int) -> None:
    """The read comes to nothing after P has begun to write: P computes the rest, in other blocks, and pushes
    all of it; the late bytes hit nobody."""
    async with combined(tiny, transport, clock=ManualClock(3.0), prefix_cache=cached > 0) as c:
        if cached:
            await c.t.deployment.tokens(c.prompt[: cached + 1], 1, url=c.p.url)
            c.steps.reset()
        c.transfers.closed_to = c.d1.agent.me
        key = new_key()
        prefill, decode = c.prefill(key, c.d2), c.decode(key, c.d2)
        await until(lambda: c.transfers.held == 1 and readers(c.d1, c.turn) == 1)
        await until(lambda: len(named_grants(c.p)) == 1)
        if cached:
            await until(lambda: c.transfers.blocks == c.kept and c.transfers.ended == 1)
        pass_time(c.p, HandoffSettings().read_s)
        assert (await prefill).status == 200
        assert (await decode).token_ids == c.right
        source, destination = await c.legs.record(c.p, key), await c.legs.record(c.d2, key)
        assert (source.transferred_tokens, source.reasons) == (0, [Reason.READ_TIMEOUT])
        assert source.cached_tokens == cached
        assert c.steps.tokens == source.computed_tokens == len(c.prompt) - cached
        assert destination.transferred_tokens == len(c.prompt)
        assert destination.bytes == c.all * c.size
        assert c.p.blocks().quarantined == c.all - cached // BLOCK
        c.open()
        await c.forget()
        await c.idle()


async def test_history_that_is_gone(tiny: Path) -> None:
    """The push does not care where P has its KV from."""
    async with combined(tiny) as c:
        await c.forget()
        key = new_key()
        prefill, decode = c.prefill(key, c.d1), c.decode(key, c.d1)
        assert ((await prefill).status, (await decode).token_ids) == (200, c.right)
        source, destination = await c.legs.record(c.p, key), await c.legs.record(c.d1, key)
        assert (source.transferred_tokens, source.reasons) == (0, [Reason.OFFER_WITHDRAWN])
        # D1's cache has it still, and is written the new blocks only.
        assert destination.cached_tokens == c.turn.kept
        assert destination.bytes == (c.all - c.kept) * c.size
        await c.idle()
