"""The decode engine that kept a turn has another life, or is killed, before or while the turn is read (field
case 9): the prefill engine computes, and the answer is right.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from kvhandoff.core.clock import monotonic
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import EngineState
from kvhandoff.embedded.process import EngineConfig
from tests.cluster import CLUSTER_KEY, MODEL, Cluster, LiveEngine, Transport, client, engine, until
from tests.e2e.turns import Forward, Turn, talk, transports
from tests.gates import TransferGate
from tests.legs import Legs, random_prompt
from tests.processes import EngineProcess


@transports
@pytest.mark.parametrize(("forward", "blocks"), [("pull", 256), ("push", 96)])
async def test_new_life_at_the_same_address(
    tiny: Path, transport: Transport, forward: Forward, blocks: int
) -> None:
    """Field case 9: the one who answers there has not kept the turn, nor are its blocks where the former
    life's were; what it keeps itself is read."""
    async with talk(tiny, transport=transport) as t:
        turn = await t.turn(t.prompt(120), 20)
        prompt = turn.transcript + t.prompt(30)
        expected = await t.legs.alone(t.p, prompt)
        assert (await t.legs.offer(t.p, prompt, history=turn.history)).cached_tokens == turn.kept
        address = t.d.agent.control_address
        await t.d.close()
        async with engine(
            "decode", tiny, name="decode-0", transport=transport, control=address, num_blocks=blocks
        ) as d:
            assert d.agent.control_address == address
            reply = await t.reply(prompt, turn.history, forward, d=d)
            assert reply.token_ids == expected
            assert (reply.source.transferred_tokens, reply.source.bytes) == (0, 0)
            assert reply.source.reasons == [Reason.EPOCH_CHANGED]
            assert (await t.legs.reasons(t.p))[Reason.EPOCH_CHANGED, "decline"] == 1

            later = await t.turn(prompt, 20, engine=d)
            prompt = later.transcript + t.prompt(30)
            reply = await t.reply(prompt, later.history, forward, d=d)
            assert reply.token_ids == await t.legs.alone(d, prompt)
            assert (reply.source.transferred_tokens, reply.source.reasons) == (later.kept, [])
            await t.legs.withdraw(d, later.key)
            await until(d.at_baseline)


@transports
async def test_new_life_at_another_address(tiny: Path, transport: Transport) -> None:
    """Field case 9: nobody is where the turn was kept."""
    async with talk(tiny, transport=transport) as t:
        turn = await t.turn(t.prompt(120), 20)
        prompt = turn.transcript + t.prompt(30)
        expected = await t.legs.alone(t.p, prompt)
        await t.d.close()
        async with engine("decode", tiny, name="decode-0", transport=transport) as d:
            assert d.agent.control_address != turn.history.control_address
            reply = await t.reply(prompt, turn.history, d=d)
            assert reply.token_ids == expected
            assert (reply.source.transferred_tokens, reply.source.bytes) == (0, 0)
            assert reply.source.reasons == [Reason.PEER_UNREACHABLE]
            await until(lambda: t.p.at_baseline() and d.at_baseline())


# ---------------------------------------------------------------------------------------------- kill -9


@dataclass
class Killable:
    """A decode engine in a process of its own, and a prefill engine here, whose reads can be held."""

    legs: Legs
    p: LiveEngine
    process: EngineProcess
    gate: TransferGate

    async def remote(self) -> LiveEngine:
        """The decode engine's present life, as far as legs are sent to it."""
        async with self.legs.cluster.session.get(f"{self.process.url}/internal/state") as answer:
            state = msgspec.json.decode(await answer.read(), type=EngineState)
        me = Identity(EngineId(state.engine_id), Epoch(state.epoch))
        agent = SimpleNamespace(me=me, clock=monotonic, control_address=state.control_address)
        return cast(LiveEngine, SimpleNamespace(url=self.process.url, agent=agent))

    async def turn(self, d: LiveEngine, prompt: list[int]) -> Turn:
        answer = await self.legs.local(d, prompt, max_tokens=20)
        return Turn(d, answer.key, prompt, answer.token_ids)


@asynccontextmanager
async def killable(tiny: Path, transport: Transport) -> AsyncIterator[Killable]:
    gate = TransferGate()
    config = EngineConfig(
        model_dir=tiny,
        model_name=MODEL,
        role="decode",
        engine_id="decode-0",
        cluster_key=CLUSTER_KEY,
        transport=transport,
        dtype="float32",
        exact=True,
        num_blocks=256,
    )
    process = EngineProcess(config)
    async with (
        client() as session,
        engine("prefill", tiny, transport=transport, prefix_cache=False, wrap_plane=gate.wrap) as p,
    ):
        try:
            await process.start()
            yield Killable(Legs(Cluster([p], [], p.url, session)), p, process, gate)
        finally:
            gate.closed = False
            process.discard()


@pytest.mark.processes
@transports
async def test_killed_while_it_is_read(tiny: Path, transport: Transport) -> None:
    """The bytes are on the way when their source dies: whether they still land or not, none is used; and the
    next life is read from as the former one was."""
    async with killable(tiny, transport) as k:
        legs, p = k.legs, k.p
        d = await k.remote()
        turn = await k.turn(d, prompt_of(120))
        prompt = turn.transcript + prompt_of(30)
        expected = await legs.alone(p, prompt)
        k.gate.closed = True
        key = HandoffKey(turn.key.handoff_id, 1)
        leg = asyncio.create_task(legs.offer(p, prompt, key=key, history=turn.history))
        await until(lambda: k.gate.held == 1)
        await until(lambda: any(read.trust_until for read in p.agent._running_node.reads._reads.values()))
        k.process.kill()
        # What is granted is lost with the process, whose end the operating system tells of.
        await until(lambda: p.agent._running_node.reads._reads == {})
        k.gate.closed = False
        offer = await leg
        record = await legs.record(p, key)
        assert (record.transferred_tokens, record.computed_tokens) == (0, len(prompt))
        assert len(record.reasons) == 1
        assert record.reasons[0] in (Reason.PEER_LOST, Reason.EPOCH_CHANGED)

        await k.process.start()
        d = await k.remote()
        answer = await legs.decode(d, offer, prompt)
        assert answer.token_ids == expected
        later = await k.turn(d, prompt_of(100))
        prompt = later.transcript + prompt_of(30)
        offer = await legs.offer(p, prompt, history=later.history)
        assert (await legs.record(p, offer.key)).transferred_tokens == later.kept
        answer = await legs.decode(d, offer, prompt)
        assert answer.token_ids == await legs.alone(p, prompt)
        await until(p.at_baseline)


@pytest.mark.processes
@transports
async def test_killed_between_the_turns(tiny: Path, transport: Transport) -> None:
    """A reader that knew the former life well is not told of its end by anybody but its absence."""
    async with killable(tiny, transport) as k:
        legs, p = k.legs, k.p
        d = await k.remote()
        turn = await k.turn(d, prompt_of(120))
        prompt = turn.transcript + prompt_of(30)
        offer = await legs.offer(p, prompt, history=turn.history)
        assert (await legs.record(p, offer.key)).transferred_tokens == turn.kept
        k.process.kill()
        again = await legs.offer(p, prompt, history=turn.history)
        record = await legs.record(p, again.key)
        assert (record.transferred_tokens, record.computed_tokens) == (0, len(prompt))
        assert record.reasons == [Reason.PEER_UNREACHABLE]
        await k.process.start()
        d = await k.remote()
        answer = await legs.decode(d, again, prompt)
        assert answer.token_ids == await legs.alone(p, prompt)
        await legs.withdraw(p, offer.key)
        await until(p.at_baseline)


def prompt_of(tokens: int) -> list[int]:
    """Tokens without anything in common."""
    return random_prompt(random.Random(tokens), tokens)
