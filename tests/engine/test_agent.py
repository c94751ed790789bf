"""The driver of the protocol, when a part of it fails."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from kvhandoff.core.ids import HandoffId, HandoffKey
from kvhandoff.core.layout import KVLayout
from kvhandoff.engine.agent import HandoffAgent
from kvhandoff.engine.facts import EngineFacts
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.tickets import BadTicket, Ticket, TicketKey

DEADLINE_S = 20.0


class FakeMover:
    kind = "fake"
    alive = True

    def start(self) -> bytes:
        return b"metadata"

    def close(self, timeout: float = 5.0) -> bool:
        return True


class FakeCore:
    """Takes blocks back, but for one that it breaks at."""

    layout = KVLayout("fake", "float32", 1, 1, 1, 4, 4)

    def __init__(self) -> None:
        self.released: list[int] = []

    def release_blocks(self, blocks: Sequence[int]) -> None:
        if 13 in blocks:
            raise LookupError("block 13")
        self.released += blocks


class FakeNode:
    """Says what follows, and has a deadline while `due` is set."""

    def __init__(self, handle: Callable[[ev.Event], list[ev.Effect]]) -> None:
        self.due: float | None = None
        self._handle = handle

    def handle(self, now: float, event: ev.Event) -> list[ev.Effect]:
        return self._handle(event)

    def next_deadline(self) -> float | None:
        return self.due


@pytest.fixture
async def agent() -> AsyncIterator[Any]:
    facts = EngineFacts(engine_id="e", role="both", model="m", model_fingerprint="f", num_blocks=20)
    core: Any = FakeCore()
    mover: Any = FakeMover()
    made = HandoffAgent(facts, core, mover, b"key")
    await made.start()
    yield made
    await made.close()


async def test_an_effect_that_fails_leaves_the_others_and_the_deadline(agent: Any) -> None:
    ticked = asyncio.Event()

    def handle(event: ev.Event) -> list[ev.Effect]:
        if isinstance(event, ev.Tick):
            ticked.set()
            agent._node.due = None
            return []
        return [ev.FreeBlocks((1,)), ev.FreeBlocks((13,)), ev.FreeBlocks((2, 3))]

    agent._node = FakeNode(handle)
    agent._node.due = agent.clock()
    with pytest.raises(LookupError, match="block 13"):
        agent.feed(ev.MemoryShort(1))
    assert agent.core.released == [1, 2, 3]
    async with asyncio.timeout(DEADLINE_S):
        await ticked.wait()


async def test_an_event_that_the_protocol_fails_at_leaves_the_deadline(agent: Any) -> None:
    ticked = asyncio.Event()

    def handle(event: ev.Event) -> list[ev.Effect]:
        if isinstance(event, ev.Tick):
            ticked.set()
            agent._node.due = None
            return []
        raise ValueError("a key in use")

    agent._node = FakeNode(handle)
    agent._node.due = agent.clock()
    with pytest.raises(ValueError, match="a key in use"):
        agent.feed(ev.MemoryShort(1))
    async with asyncio.timeout(DEADLINE_S):
        await ticked.wait()


async def test_effects_are_carried_out_in_their_order(agent: Any) -> None:
    agent._node = FakeNode(lambda _: [ev.FreeBlocks((block,)) for block in range(5)])
    agent.feed(ev.MemoryShort(1))
    assert agent.core.released == [0, 1, 2, 3, 4]


async def test_calls_of_an_engine_behind_the_end_of_the_loop_are_dropped() -> None:
    """They come on the engine's thread, and would end it."""
    facts = EngineFacts(engine_id="e", role="both", model="m", model_fingerprint="f", num_blocks=20)
    core: Any = FakeCore()
    mover: Any = FakeMover()

    async def life() -> HandoffAgent[Any]:
        made = HandoffAgent(facts, core, mover, b"key")
        await made.start()
        await made.close()
        return made

    made = await asyncio.to_thread(asyncio.run, life())
    made.memory_short(1)
    made.offer_abandoned("r")
    made.unbind_soon("r")


async def test_of_several_threads_with_one_ticket_one_is_admitted(agent: Any) -> None:
    """vLLM admits legs on its main thread, and the router's other orders come in on the driver's. Here each
    thread has the same tickets, and switches come as often as they can."""
    keys = [HandoffKey(HandoffId(f"h{n}"), 0) for n in range(1000)]
    until = agent.clock() + 50.0
    signed = [
        TicketKey(b"key").sign(Ticket(leg="decode", audience=agent.me, not_after=until, key=key))
        for key in keys
    ]
    together = Barrier(4)

    def admitted() -> list[HandoffKey]:
        found = []
        for one in signed:
            together.wait(DEADLINE_S)
            try:
                found.append(agent.admit(one).key)
            except BadTicket:
                continue
        return found

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            each = [threads.submit(admitted) for _ in range(4)]
    finally:
        sys.setswitchinterval(interval)
    assert Counter(key for found in each for key in found.result()) == Counter(keys)
