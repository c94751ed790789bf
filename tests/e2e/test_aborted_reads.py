"""Requests that end while their KV is on the way (field case 5 i), and reads that end badly.

Until the last byte can have landed, the blocks it is meant for are nobody else's; then they are anybody's.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import Claim, ClaimGranted, OfferDescriptor, Release
from kvhandoff.handoff.settings import HandoffSettings
from tests.cluster import MODEL, Cluster, LiveEngine, cluster, until
from tests.gates import StepGate, TransferGate
from tests.legs import MAX_TOKENS, Answered, Legs, counted, pass_time, random_prompt
from tests.wire import Wire

BLOCK = 16
LENGTH = 2 * BLOCK + 9
BLOCKS = 3
"""Of a prompt of LENGTH tokens and MAX_TOKENS more."""
POOL = 16
SETTINGS = HandoffSettings()

transports = pytest.mark.parametrize("transport", ["shm", "nixl"])


class Pair:
    """A prefill engine and a small decode engine whose steps and transfers can be held."""

    def __init__(self, deployment: Cluster, transfers: TransferGate) -> None:
        self.legs = Legs(deployment)
        self.deployment = deployment
        self.p, self.d = deployment.prefill[0], deployment.decode[0]
        self.transfers = transfers
        self.steps = StepGate(self.d)
        self.to_p, self.to_d = Wire(self.d), Wire(self.p)
        self.rng = random.Random(7)

    def prompt(self, tokens: int = LENGTH) -> list[int]:
        """A prompt that no engine has seen."""
        return random_prompt(self.rng, tokens)

    def start(self, offer: OfferDescriptor, prompt: list[int]) -> asyncio.Task[Answered]:
        """A decode leg whose client can leave: cancel it."""
        return asyncio.create_task(self.legs.decode(self.d, offer, prompt))

    async def granted(self) -> None:
        await self.to_p.has_received(ClaimGranted)

    async def released(self) -> None:
        """The source has been told that nobody reads any more."""
        await self.to_d.has_received(Release)

    async def aborted_in_flight(self) -> tuple[OfferDescriptor, list[int]]:
        """A request whose client has left while its read was posted and no byte had moved."""
        prompt = self.prompt()
        offer = await self.legs.offer(self.p, prompt)
        self.transfers.closed = True
        leg = self.start(offer, prompt)
        await until(lambda: self.transfers.held == 1)
        await self.granted()
        await left(leg)
        await until(lambda: self.d.blocks().quarantined == BLOCKS)
        await self.released()
        return offer, prompt

    async def recycle(self, offer: OfferDescriptor) -> None:
        """Let the source put other prompts' KV where the late read will read."""
        pass_time(self.p, SETTINGS.offer_lease_s)
        await self.deployment.settled(self.p)
        await self.legs.flood(self.p, self.rng)


async def left(leg: asyncio.Task[Any]) -> None:
    """The client closes its connection."""
    leg.cancel()
    with suppress(asyncio.CancelledError):
        await leg


async def disconnected(engine: LiveEngine, peer: LiveEngine) -> None:
    """The data plane of `engine` can't reach `peer` any more; its agent has not heard of that."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    mover = engine.agent.mover
    mover.disconnect(peer.agent.me)
    nobody = Identity(EngineId("nobody"), Epoch("0"))

    def behind_it_in_the_queue(_: object) -> None:
        loop.call_soon_threadsafe(done.set)

    mover.connect(nobody, b"", behind_it_in_the_queue)
    await done.wait()


@asynccontextmanager
async def pair(tiny: Path, transport: Literal["shm", "nixl"] = "shm", **decode: Any) -> AsyncIterator[Pair]:
    transfers = TransferGate()
    async with cluster(
        tiny,
        transport=transport,
        prefill_options={"num_blocks": 24, "clock": ManualClock(100.0)},
        decode_options={
            "num_blocks": POOL,
            "clock": ManualClock(7.0),
            "wrap_plane": transfers.wrap,
            **decode,
        },
    ) as deployment:
        made = Pair(deployment, transfers)
        try:
            yield made
        finally:
            made.steps.open()
            transfers.closed = False


# ------------------------------------------------------------------------------------- where it can end


async def test_abort_while_queued(tiny: Path) -> None:
    """No blocks yet: nothing is held here, and the claim is given back."""
    async with pair(tiny) as c:
        prompt = c.prompt()
        offer = await c.legs.offer(c.p, prompt)
        c.steps.close()
        busy = asyncio.create_task(c.legs.alone(c.d, c.prompt()))
        await until(lambda: c.steps.holds)
        leg = c.start(offer, prompt)
        await c.granted()
        assert c.d.core.load()["waiting"] == 1
        await left(leg)
        await c.released()
        c.steps.open()
        await busy
        await c.deployment.settled(c.d)
        assert c.transfers.posted == 0
        pass_time(c.d, SETTINGS.claim_lease_s)
        assert len(c.to_p.sent_of(Claim)) == 1, "an ended read is not renewed"
        pass_time(c.p, SETTINGS.offer_lease_s)
        await c.deployment.settled()


async def test_abort_before_the_read_is_posted(tiny: Path) -> None:
    """Blocks, but nothing that could write to them: they are free at once."""
    async with pair(tiny) as c:
        prompt = c.prompt()
        offer = await c.legs.offer(c.p, prompt)
        c.to_p.lose = lambda body: isinstance(body, Claim)
        # Without the promise of a full match, nothing is posted before the claim is answered.
        leg = c.start(msgspec.structs.replace(offer, digest="0" * 32), prompt)
        await until(lambda: c.d.blocks().loading == BLOCKS)
        await left(leg)
        await c.deployment.settled(c.d)
        assert c.transfers.posted == 0
        await c.released()


async def test_abort_after_the_bytes_and_before_the_proof(tiny: Path) -> None:
    """The transfer has ended, which fences it: the blocks are free at once."""
    async with pair(tiny) as c:
        prompt = c.prompt()
        offer = await c.legs.offer(c.p, prompt)
        c.to_p.lose = lambda body: isinstance(body, Claim)
        leg = c.start(offer, prompt)
        await until(lambda: c.transfers.ended == 1 and c.d.blocks().loading == BLOCKS)
        c.transfers.closed = True  # were anything quarantined, it would stay so
        await left(leg)
        await c.deployment.settled(c.d)
        await c.released()


async def test_abort_while_it_runs_on_what_it_read(tiny: Path) -> None:
    """Verified and running: the blocks are the engine's own again."""
    async with pair(tiny) as c:
        prompt = c.prompt()
        offer = await c.legs.offer(c.p, prompt)
        c.steps.close()
        leg = c.start(offer, prompt)
        await until(lambda: c.steps.holds)
        await c.released()
        await left(leg)
        c.steps.open()
        await c.deployment.settled()
        # What was verified is in the prefix cache now, and is right.
        assert await c.deployment.tokens(prompt, MAX_TOKENS, url=c.d.url) == await c.legs.alone(c.p, prompt)


@transports
async def test_abort_while_the_read_is_in_flight(tiny: Path, transport: Literal["shm", "nixl"]) -> None:
    """The blocks are quarantined; others fill the rest of the pool; then the bytes land, and hurt nobody."""
    async with pair(tiny, transport) as c:
        offer, _ = await c.aborted_in_flight()
        await c.recycle(offer)
        counts = await c.legs.debug_kv(c.d)
        assert (counts["quarantined"], counts["loading"], counts["used"]) == (BLOCKS, 0, 0)

        prompts = [c.prompt() for _ in range(8)]  # twice what fits beside the quarantine
        expected = [await c.legs.alone(c.p, prompt) for prompt in prompts]
        tasks = [asyncio.create_task(c.deployment.tokens(p, MAX_TOKENS, url=c.d.url)) for p in prompts]
        assert await asyncio.gather(*tasks) == expected
        assert (await c.legs.debug_kv(c.d))["quarantined"] == BLOCKS

        # One that takes every other block is half-way when the bytes land.
        long = c.prompt((POOL - BLOCKS) * BLOCK - 20)
        alone = await c.deployment.tokens(long, 20, url=c.p.url)
        stream = asyncio.create_task(c.deployment.tokens(long, 20, url=c.d.url))
        c.steps.close()
        await until(lambda: c.steps.holds)
        c.steps.let(3)
        await until(lambda: c.steps.holds)
        c.transfers.closed = False
        await until(lambda: c.transfers.held == 0 and c.d.blocks().quarantined == 0)
        c.steps.open()
        assert await stream == alone
        await c.deployment.settled()


async def test_quarantine_makes_others_wait(tiny: Path) -> None:
    """A request that needs the quarantined blocks gets them when the read has landed, not before."""
    async with pair(tiny) as c:
        offer, _ = await c.aborted_in_flight()
        await c.recycle(offer)
        big = c.prompt((POOL - 1) * BLOCK)
        expected = await c.legs.alone(c.p, big)
        begun = c.steps.begun
        waits = asyncio.create_task(c.deployment.tokens(big, MAX_TOKENS, url=c.d.url))
        await until(lambda: c.d.core.load()["waiting"] == 1)
        await c.legs.flood(c.p, c.rng)  # time enough to be wrong
        assert c.steps.begun == begun, "it runs in blocks that bytes may still land in"
        c.transfers.closed = False
        assert await waits == expected
        await c.deployment.settled()


async def test_client_that_leaves_while_the_read_is_in_flight(tiny: Path) -> None:
    """Through the router: the source is free at once, the reader's blocks at the fence."""
    async with pair(tiny) as c:
        c.transfers.closed = True
        body = {"model": MODEL, "prompt": c.prompt(), "max_tokens": MAX_TOKENS}
        client = asyncio.create_task(c.deployment.post(body))
        await until(lambda: c.transfers.held == 1)
        await left(client)
        await until(lambda: c.d.blocks().quarantined == BLOCKS)
        await c.deployment.settled(c.p)
        prompt = c.prompt()
        assert await c.deployment.tokens(prompt, MAX_TOKENS, path="local") == await c.legs.alone(c.p, prompt)
        assert c.d.blocks().quarantined == BLOCKS
        c.transfers.closed = False
        await c.deployment.settled()


# ------------------------------------------------------------------------------------- reads that end badly


@transports
async def test_read_that_does_not_land_in_time(tiny: Path, transport: Literal["shm", "nixl"]) -> None:
    """Computed anew, while its blocks wait; no other read is put on a peer that owes a fence."""
    async with pair(tiny, transport) as c:
        prompt = c.prompt()
        expected = await c.legs.alone(c.p, prompt)
        offer = await c.legs.offer(c.p, prompt)
        c.transfers.closed = True
        leg = c.start(offer, prompt)
        await until(lambda: c.transfers.held == 1)
        await c.granted()
        pass_time(c.d, SETTINGS.read_s)
        answer = await leg
        assert answer.token_ids == expected
        assert (await c.legs.record(c.d, answer.key)).reasons == [Reason.READ_TIMEOUT]
        assert (await c.legs.debug_kv(c.d))["quarantined"] == BLOCKS
        pass_time(c.d, SETTINGS.fence_s)

        other = c.prompt()
        offer = await c.legs.offer(c.p, other)
        answer = await c.legs.decode(c.d, offer, other)
        assert answer.token_ids == await c.legs.alone(c.p, other)
        assert (await c.legs.record(c.d, answer.key)).reasons == [Reason.PEER_UNREACHABLE]
        assert c.transfers.posted == 1
        causes = (
            *(Reason.READ_TIMEOUT, Reason.QUARANTINE_GROWS),
            *(Reason.FENCE_OVERDUE, Reason.PEER_UNREACHABLE),
        )
        assert await c.legs.reasons(c.d) == sum((counted(cause) for cause in causes), Counter())

        c.transfers.closed = False
        await c.deployment.settled()
        third = c.prompt()
        offer = await c.legs.offer(c.p, third)
        answer = await c.legs.decode(c.d, offer, third)
        assert answer.token_ids == await c.legs.alone(c.p, third)
        assert (await c.legs.record(c.d, answer.key)).transferred_tokens == LENGTH
        await c.deployment.settled()


@transports
@pytest.mark.parametrize("on_miss", ["recompute", "error"])
async def test_read_that_fails(
    tiny: Path, transport: Literal["shm", "nixl"], on_miss: Literal["recompute", "error"]
) -> None:
    """A failure of the transfer is counted as that; the next read greets the peer anew."""
    async with pair(tiny, transport) as c:
        prompt = c.prompt()
        expected = await c.legs.alone(c.p, prompt)
        offer = await c.legs.offer(c.p, prompt)
        c.transfers.closed = True
        leg = asyncio.create_task(c.legs.decode(c.d, offer, prompt, on_miss=on_miss))
        await until(lambda: c.transfers.held == 1)
        await disconnected(c.d, c.p)
        c.transfers.closed = False
        answer = await leg
        if on_miss == "recompute":
            assert answer.token_ids == expected
        else:
            assert (answer.status, answer.error["code"]) == (503, Reason.TRANSFER_FAILED)
            assert str(c.p.agent.me) in answer.error["message"]
        assert (await c.legs.record(c.d, answer.key)).reasons == [Reason.TRANSFER_FAILED]
        assert await c.legs.reasons(c.d) == counted(Reason.TRANSFER_FAILED)
        await c.deployment.settled()

        prompt = c.prompt()
        offer = await c.legs.offer(c.p, prompt)
        answer = await c.legs.decode(c.d, offer, prompt, on_miss=on_miss)
        assert answer.token_ids == await c.legs.alone(c.p, prompt)
        assert (await c.legs.record(c.d, answer.key)).transferred_tokens == LENGTH
        await c.deployment.settled()
