"""Return: the next turn's prefill engine reads what the decode engine kept of the last one (field case 56).

It computes only what is new, and hands all of it forward, pulled or pushed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.events import Retention
from kvhandoff.handoff.messages import HistoryRef
from tests.cluster import Transport, until
from tests.e2e.turns import (
    BLOCK,
    Forward,
    Talk,
    blocks_of,
    forwards,
    full,
    is_read,
    readers,
    talk,
    transports,
)
from tests.gates import TransferGate
from tests.legs import history
from tests.wire import Wire


@transports
@forwards
async def test_prompt_and_answer_come_back(tiny: Path, transport: Transport, forward: Forward) -> None:
    """Field case 56: the prefill engine reads all that the decode engine computed, answer included, and the
    decode engine is given the new blocks only."""
    async with talk(tiny, transport=transport) as t:
        turn = await t.turn(t.prompt(100), 300)
        counts = t.d.blocks()
        assert counts.retained == counts.offered == turn.kept // BLOCK == 24

        prompt = turn.transcript + t.prompt(75)
        expected = await t.legs.alone(t.d, prompt)
        reply = await t.reply(prompt, turn.history, forward, retain="renewable")
        assert reply.token_ids == expected
        size = t.d.region.block_bytes
        source, destination = reply.source, reply.destination
        assert (source.cached_tokens, source.transferred_tokens) == (0, turn.kept)
        assert source.computed_tokens == len(prompt) - turn.kept
        assert source.bytes == turn.kept // BLOCK * size
        assert source.reasons == destination.reasons == []
        assert "return" in source.phases
        assert destination.cached_tokens == turn.kept
        assert destination.bytes == (blocks_of(len(prompt)) - turn.kept // BLOCK) * size
        await t.deployment.settled(t.p)

        # And the turn after it, from what was retained of this one.
        kept = full(len(prompt + expected) - 1)
        assert destination.retained_tokens == kept
        third = prompt + expected + t.prompt(40)
        later = await t.reply(third, history(t.d, reply.answered.key, kept), forward)
        assert later.token_ids == await t.legs.alone(t.d, third)
        assert later.source.transferred_tokens == kept
        await t.legs.withdraw(t.d, reply.answered.key)
        await t.forget(turn)


@pytest.mark.parametrize("over", [-1, 0, 1, 2], ids=lambda over: f"{over:+}")
async def test_lengths_around_a_block(tiny: Path, over: int) -> None:
    """The answer's last token has no KV; a block counts once all its tokens have."""
    async with talk(tiny) as t:
        turn = await t.turn(t.prompt(7 * BLOCK + over), BLOCK)
        assert turn.kept == (8 * BLOCK if over > 0 else 7 * BLOCK)
        assert t.d.blocks().retained == turn.kept // BLOCK
        for new in (1, BLOCK - 1, BLOCK, BLOCK + 1):
            prompt = turn.transcript + t.prompt(new)
            reply = await t.reply(prompt, turn.history)
            assert reply.token_ids == await t.legs.alone(t.d, prompt)
            assert reply.source.transferred_tokens == turn.kept
        await t.forget(turn)


@pytest.mark.parametrize("retain", ["renewable", "fixed"])
async def test_read_many_times(tiny: Path, retain: Retention) -> None:
    """Field case 56: a retained turn is not consumed by its readers."""
    async with talk(tiny) as t:
        turn = await t.turn(t.prompt(120), 20, retain=retain)
        for _ in range(4):
            prompt = turn.transcript + t.prompt(30)
            reply = await t.reply(prompt, turn.history)
            assert reply.token_ids == await t.legs.alone(t.d, prompt)
            assert reply.source.transferred_tokens == turn.kept
        assert t.d.blocks().retained == turn.kept // BLOCK
        await t.forget(turn)


@transports
async def test_several_prefill_engines_read_at_once(tiny: Path, transport: Transport) -> None:
    """Each holds a claim of its own; none ends another's."""
    gates = [TransferGate(), TransferGate()]
    planes = iter(gates)
    wrap = {"wrap_plane": lambda plane: next(planes).wrap(plane)}
    async with talk(tiny, transport=transport, prefill=2, prefill_options=wrap) as t:
        turn = await t.turn(t.prompt(120), 20)
        prompts = [turn.transcript + t.prompt(30) for _ in range(2)]
        expected = [await t.legs.alone(t.d, prompt) for prompt in prompts]
        for gate in gates:
            gate.closed = True
        engines = t.deployment.prefill
        replies = [
            asyncio.create_task(t.reply(prompt, turn.history, p=p))
            for p, prompt in zip(engines, prompts, strict=True)
        ]
        # A read is posted while its claim is still on its way.
        await until(lambda: all(gate.held == 1 for gate in gates) and readers(t.d, turn) == 2)
        offer = t.d.agent._running_node.offers.get(turn.key)
        assert offer is not None
        assert {reader for reader, _ in offer.pins} == {p.agent.me for p in engines}
        gates[0].closed = False
        first = await replies[0]
        assert {reader for reader, _ in offer.pins} == {engines[1].agent.me}
        gates[1].closed = False
        for reply, right in zip([first, await replies[1]], expected, strict=True):
            assert reply.token_ids == right
            assert reply.source.transferred_tokens == turn.kept
        assert t.d.blocks().retained == turn.kept // BLOCK
        await t.forget(turn)


async def test_local_turn_with_a_history(tiny: Path) -> None:
    """A decode engine that answers alone reads what another one kept."""
    async with talk(tiny, decode=2) as t:
        here, there = t.deployment.decode
        turn = await t.turn(t.prompt(120), 20, engine=there)
        prompt = turn.transcript + t.prompt(30)
        answer = await t.legs.local(here, prompt, history=turn.history)
        assert answer.token_ids == await t.legs.alone(there, prompt)
        record = await t.legs.record(here, answer.key)
        assert (record.transferred_tokens, record.reasons) == (turn.kept, [])
        assert record.kv_source == "transferred"
        await t.legs.withdraw(here, answer.key)
        await t.forget(turn)


async def test_local_turn_at_the_one_that_kept_it(tiny: Path) -> None:
    """What an engine has retained itself is in its prefix cache: it asks nobody, least of all itself."""
    async with talk(tiny) as t:
        turn = await t.turn(t.prompt(120), 20)
        wire = Wire(t.d)
        prompt = turn.transcript + t.prompt(30)
        answer = await t.legs.local(t.d, prompt, history=turn.history, retain=None)
        assert answer.token_ids == await t.legs.alone(t.p, prompt)
        record = await t.legs.record(t.d, answer.key)
        assert (record.cached_tokens, record.transferred_tokens, record.reasons) == (turn.kept, 0, [])
        assert wire.sent == []
        await t.forget(turn)


async def test_withdrawn_turn(tiny: Path) -> None:
    """A turn that nobody wants any more is gone for whoever comes late."""
    async with talk(tiny) as t:
        turn = await t.turn(t.prompt(120), 20)
        await t.forget(turn)
        await missed(t, turn.transcript + t.prompt(30), turn.history, Reason.OFFER_WITHDRAWN)


async def test_turn_that_was_never_retained(tiny: Path) -> None:
    """The router may be wrong about what an engine has."""
    async with talk(tiny) as t:
        prompt = t.prompt(120)
        answer = await t.legs.local(t.d, prompt, retain=None)
        assert t.d.blocks().retained == 0
        ref = history(t.d, answer.key, 112)
        await missed(t, prompt + answer.token_ids + t.prompt(30), ref, Reason.OFFER_UNKNOWN)


async def test_withdrawn_while_it_is_read(tiny: Path) -> None:
    """The blocks stay until the reader is done with them."""
    gate = TransferGate()
    async with talk(tiny, prefill_options={"wrap_plane": gate.wrap}) as t:
        turn = await t.turn(t.prompt(120), 20)
        prompt = turn.transcript + t.prompt(30)
        expected = await t.legs.alone(t.d, prompt)
        gate.closed = True
        reply = asyncio.create_task(t.reply(prompt, turn.history))
        await is_read(turn, gate)
        await t.legs.withdraw(t.d, turn.key)
        await t.legs.flood(t.d, t.rng)
        assert t.d.blocks().retained == turn.kept // BLOCK
        gate.closed = False
        answered = await reply
        assert answered.token_ids == expected
        assert answered.source.transferred_tokens == turn.kept
        await t.deployment.settled()


async def missed(t: Talk, prompt: list[int], ref: HistoryRef, reason: Reason) -> None:
    """A reference that gives nothing: the prefill engine computes all, and says why."""
    reply = await t.reply(prompt, ref)
    assert reply.token_ids == await t.legs.alone(t.d, prompt)
    assert (reply.source.transferred_tokens, reply.source.bytes) == (0, 0)
    assert (reply.source.computed_tokens, reply.source.reasons) == (len(prompt), [reason])
    assert reply.destination.reasons == []
    assert (await t.legs.reasons(t.p))[reason, reason.kind] == 1
    await t.deployment.settled()
