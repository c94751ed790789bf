"""A client leaves while its prefill engine is about to read a history, in each state (field cases 18b and
29): nothing is left behind, and the retained turn is as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvhandoff.core.clock import ManualClock
from kvhandoff.handoff.messages import Claim, ClaimGranted, Release
from kvhandoff.handoff.settings import HandoffSettings
from tests.cluster import Transport, until
from tests.e2e.stage import leave, leftovers, news
from tests.e2e.turns import (
    BLOCK,
    Forward,
    Talk,
    Turn,
    blocks_of,
    forwards,
    gated_talk,
    is_read,
    readers,
    transports,
)
from tests.gates import StepGate, TransferGate
from tests.wire import Wire, nothing


class Scene:
    """A prefill engine at which everything can be held, and a turn that its next request is to read."""

    def __init__(self, t: Talk, reads: TransferGate) -> None:
        self.t = t
        self.reads = reads
        self.steps = StepGate(t.p)
        self.to_d, self.to_p = Wire(t.p), Wire(t.d)
        self.others: list[asyncio.Task[list[int]]] = []
        self.turn: Turn
        self.prompt: list[int]

    async def begin(self) -> None:
        self.turn = await self.t.turn(self.t.prompt(120), 20)
        self.prompt = self.turn.transcript + self.t.prompt(30)
        self.right = await self.t.legs.alone(self.t.d, self.prompt)
        await self.t.legs.alone(self.t.p, self.t.prompt(5))
        self.steps.reset()

    def ask(self, forward: Forward) -> asyncio.Task[Any]:
        """A client that can leave, and takes all its legs along."""
        return asyncio.create_task(self.t.reply(self.prompt, self.turn.history, forward))

    async def busy(self) -> None:
        """The prefill engine stands in a step of another request."""
        self.steps.close()
        self.others.append(
            asyncio.create_task(self.t.deployment.tokens(self.t.prompt(20), 2, url=self.t.p.url))
        )
        await until(lambda: self.steps.holds)

    def open(self) -> None:
        self.steps.open()
        self.reads.closed = False
        self.to_d.lose = nothing


@asynccontextmanager
async def scene(tiny: Path, transport: Transport = "shm") -> AsyncIterator[Scene]:
    """The engines' clocks stand still: whatever comes back is given back, not timed out."""
    async with gated_talk(
        tiny,
        transport=transport,
        num_blocks=24,
        prefill_options={"clock": ManualClock(3.0)},
        decode_options={"clock": ManualClock(9.0)},
    ) as (t, gate):
        made = Scene(t, gate)
        try:
            await made.begin()
            yield made
        finally:
            made.open()


Reached = tuple[asyncio.Task[Any], Callable[[], bool]]
"""A client whose request is in some state, and whether its leaving has had its effect, as far as it can while
all is held."""
State = Callable[[Scene, Forward], Awaitable[Reached]]


async def queued(s: Scene, forward: Forward) -> Reached:
    """Claimed already, and without blocks."""
    await s.busy()
    client = s.ask(forward)
    await s.to_d.has_received(ClaimGranted)
    assert s.t.p.blocks().loading == 0
    before = news(s.t.p)
    return client, lambda: news(s.t.p) > before and readers(s.t.d, s.turn) == 0


async def claim_out(s: Scene, forward: Forward) -> Reached:
    """It has blocks, and no answer to its claim."""
    s.to_d.lose = lambda body: isinstance(body, Claim)
    client = s.ask(forward)
    await until(lambda: s.t.p.blocks().loading == blocks_of(len(s.prompt)))
    assert readers(s.t.d, s.turn) == 0
    return client, lambda: s.t.p.core.load()["loading"] == 0


async def bytes_moving(s: Scene, forward: Forward) -> Reached:
    """Claimed and posted; the blocks wait for the fence, and the holder does not."""
    s.reads.closed = True
    client = s.ask(forward)
    await is_read(s.turn, s.reads)
    blocks = blocks_of(len(s.prompt))
    return client, lambda: s.t.p.blocks().quarantined == blocks and readers(s.t.d, s.turn) == 0


async def loaded_not_running(s: Scene, forward: Forward) -> Reached:
    """The bytes are in and verified; the engine is busy and has not heard of it."""
    s.reads.closed = True
    client = s.ask(forward)
    await is_read(s.turn, s.reads)
    await s.busy()
    s.reads.closed = False
    await until(lambda: news(s.t.p) == 1)
    return client, lambda: news(s.t.p) > 1


async def computing_the_rest(s: Scene, forward: Forward) -> Reached:
    """It stands before the step that computes what was not read."""
    s.steps.close()
    client = s.ask(forward)
    await until(lambda: s.steps.holds)
    await s.to_p.has_received(Release)
    return client, lambda: news(s.t.p) > 0


STATES: list[State] = [queued, claim_out, bytes_moving, loaded_not_running, computing_the_rest]


@forwards
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_abort_leaves_the_turn_as_it_was(tiny: Path, state: State, forward: Forward) -> None:
    """Field case 29."""
    async with scene(tiny) as s:
        await left_behind_nothing(s, state, forward)


@transports
async def test_abort_while_bytes_move(tiny: Path, transport: Transport) -> None:
    """Field case 18b, on both transports."""
    async with scene(tiny, transport) as s:
        await left_behind_nothing(s, bytes_moving, "pull")


async def left_behind_nothing(s: Scene, state: State, forward: Forward) -> None:
    t, kept = s.t, s.turn.kept // BLOCK
    client, hit = await state(s, forward)
    await leave(client)
    await until(hit, describe=lambda: f"{leftovers(t.p)}, {leftovers(t.d)}, {readers(t.d, s.turn)} readers")
    s.open()
    await asyncio.gather(*s.others)
    await t.deployment.settled(t.p)
    await until(lambda: not leftovers(t.p), describe=lambda: f"prefill: {leftovers(t.p)}")
    # Of the decode engine only what it retains is left, and nobody has a claim on it.
    only_the_turn = {"blocks": kept, "lent": kept, "offers": 1}
    await until(lambda: leftovers(t.d) == only_the_turn, describe=lambda: f"decode: {leftovers(t.d)}")
    assert t.d.blocks().retained == kept
    assert readers(t.d, s.turn) == 0

    await t.legs.flood(t.p, t.rng)
    reply = await t.reply(s.prompt, s.turn.history, forward)
    assert reply.token_ids == s.right
    assert (reply.source.transferred_tokens, reply.source.reasons) == (s.turn.kept, [])
    await t.deployment.settled(t.p)
    await t.forget(s.turn)
    await until(lambda: not leftovers(t.p) and not leftovers(t.d))


@transports
async def test_storm(tiny: Path, transport: Transport) -> None:
    """Field case 18b: clients leave whenever; the turn is read by those that stay, right, and all comes
    back."""
    short = HandoffSettings(offer_lease_s=1.0)  # for what nobody comes for, since no router withdraws it
    async with gated_talk(tiny, transport=transport, num_blocks=64, settings=short) as (t, gate):
        turn = await t.turn(t.prompt(120), 20)
        gate.late_by = lambda: t.rng.randrange(20)
        prompts = [turn.transcript + t.prompt(5 + n) for n in range(8)]
        expected = [await t.legs.alone(t.d, prompt) for prompt in prompts]

        async def one(number: int, forward: Forward) -> bool:
            """Whether the client stayed."""
            which = number % len(prompts)
            leg = asyncio.create_task(t.reply(prompts[which], turn.history, forward))
            for _ in range(t.rng.randrange(60)):  # turns of the loop, not time
                await asyncio.sleep(0)
            if t.rng.random() < 0.5 and not leg.done():
                leg.cancel()
                await asyncio.wait([leg])
                if leg.cancelled():
                    return False
            reply = await leg
            assert reply.token_ids == expected[which]
            assert reply.source.transferred_tokens in (0, turn.kept)
            return True

        async def client(first: int) -> list[bool]:
            return [await one(n, "push" if n % 2 else "pull") for n in range(first, 42, 6)]

        stayed = [kind for kinds in await asyncio.gather(*map(client, range(6))) for kind in kinds]
        assert 5 < sum(stayed) < 40
        await until(lambda: not leftovers(t.p), describe=lambda: f"prefill: {leftovers(t.p)}")
        reply = await t.reply(prompts[0], turn.history)
        assert (reply.token_ids, reply.source.transferred_tokens) == (expected[0], turn.kept)
        await t.forget(turn)
