"""Leases (field cases 2, 3, 5 ii): just in time, just too late, in the middle of a read, on clocks that
disagree, and through a queue longer than the lease.

Time is the tests': an engine's clock moves when told to, and nothing here depends on how fast a test runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from kvhandoff.core.clock import Clock, ManualClock, monotonic
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import Claim, ClaimGranted, Hello, OfferDescriptor
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.router.config import Timeouts
from tests.cluster import Cluster, cluster, engine, until
from tests.gates import StepGate, TransferGate
from tests.legs import MAX_TOKENS, Answered, Legs, content, counted, pass_time, random_prompt
from tests.wire import Wire, nothing

BLOCK = 16
LENGTH = 2 * BLOCK + 9
SETTINGS = HandoffSettings()
OFFER_LEASE, CLAIM_LEASE = SETTINGS.offer_lease_s, SETTINGS.claim_lease_s
RENEWAL = CLAIM_LEASE / 3

skewed = pytest.mark.parametrize("ahead", [-5.0, 0.0, 5.0], ids=["behind", "level", "ahead"])


def _shifted(seconds: float) -> Clock:
    return lambda: monotonic() + seconds


# ------------------------------------------------------------------------------------------------- case 2


@skewed
@pytest.mark.parametrize(("waited", "in_time"), [(OFFER_LEASE - 0.2, True), (OFFER_LEASE, False)])
async def test_read_just_before_and_at_the_end_of_the_lease(
    tiny: Path, ahead: float, waited: float, in_time: bool
) -> None:
    """Case 2: only the source's clock counts for its lease; what the reader's says does not matter."""
    prefill = {"clock": ManualClock(100.0)}
    decode = {"clock": ManualClock(100.0 + ahead)}
    async with cluster(tiny, prefill_options=prefill, decode_options=decode) as deployment:
        legs, p, d = Legs(deployment), deployment.prefill[0], deployment.decode[0]
        prompt = random_prompt(random.Random(2), LENGTH)
        expected = await legs.alone(d, prompt)
        offer = await legs.offer(p, prompt)
        pass_time(d, waited)
        pass_time(p, waited)
        answer = await legs.decode(d, offer, prompt)
        assert answer.token_ids == expected
        record = await legs.record(d, answer.key)
        assert record.transferred_tokens == (LENGTH if in_time else 0)
        assert record.reasons == ([] if in_time else [Reason.OFFER_EXPIRED])
        expired = counted(Reason.OFFER_EXPIRED, 0 if in_time else 1)
        assert await legs.reasons(p) - expired == {}
        await deployment.settled()


@skewed
async def test_clocks_that_disagree(tiny: Path, ahead: float) -> None:
    """Case 2: through the router, with leases and tickets that are shorter than the clocks are apart."""
    settings = HandoffSettings(offer_lease_s=3.0, claim_lease_s=3.0)
    async with cluster(
        tiny,
        prefill_options={"clock": _shifted(-ahead)},
        decode_options={"clock": _shifted(ahead)},
        router_options={"timeouts": replace(Timeouts(), ticket_s=3.0)},
        settings=settings,
    ) as deployment:
        rng = random.Random(3)
        for _ in range(3):
            prompt = random_prompt(rng, LENGTH)
            expected = await Legs(deployment).alone(deployment.decode[0], prompt)
            body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
            status, answer = await deployment.post({**body, "return_token_ids": True})
            assert status == 200
            assert answer["choices"][0]["token_ids"] == expected
            record = await deployment.record(answer["id"])
            assert (record["kv_source"], record["reasons"]) == ("transferred", ["forced"])
            assert all(0 <= seconds <= record["total_s"] for seconds in record["phases"].values())
        await deployment.settled()


@pytest.mark.parametrize("on_miss", ["recompute", "error"])
async def test_offer_that_expires_behind_the_router(
    tiny: Path, on_miss: Literal["recompute", "error"]
) -> None:
    """What the client sees of a miss: the right answer, or which reason kept it from one."""
    async with cluster(
        tiny,
        prefill_options={"clock": ManualClock(100.0)},
        decode_options={"clock": ManualClock(7.0)},
        router_options={"on_miss": on_miss},
    ) as deployment:
        p, d = deployment.prefill[0], deployment.decode[0]
        to_p = Wire(d)
        to_p.lose = lambda body: isinstance(body, Claim)
        prompt = random_prompt(random.Random(5), LENGTH)
        expected = await Legs(deployment).alone(d, prompt)
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        client = asyncio.create_task(deployment.post({**body, "return_token_ids": True}))
        await until(lambda: len(to_p.sent_of(Claim)) >= 1)
        pass_time(p, OFFER_LEASE)
        to_p.lose = nothing
        pass_time(d, SETTINGS.retry_s)
        status, answer = await client
        if on_miss == "recompute":
            assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
            record = await deployment.record(answer["id"])
            assert record["kv_source"] == "recomputed"
            assert record["reasons"] == ["forced", "offer_expired"]
        else:
            assert (status, answer["error"]["code"]) == (503, "offer_expired")
            assert "on_miss is error" in answer["error"]["message"]
        await deployment.settled()


class InFlight:
    """A deployment in which one read is posted, its claim is granted, and no byte has moved yet."""

    def __init__(self, deployment: Cluster, gate: TransferGate) -> None:
        self.legs = Legs(deployment)
        self.deployment = deployment
        self.p, self.d = deployment.prefill[0], deployment.decode[0]
        self.gate = gate
        self.to_p, self.to_d = Wire(self.d), Wire(self.p)
        self.rng = random.Random(4)
        self.prompt = random_prompt(self.rng, LENGTH)
        self.offer: OfferDescriptor
        self.expected: list[int]
        self.answer: asyncio.Task[Answered]

    async def begin(self) -> None:
        self.expected = await self.legs.alone(self.d, self.prompt)
        self.offer = await self.legs.offer(self.p, self.prompt)
        self.gate.closed = True
        self.answer = asyncio.create_task(self.legs.decode(self.d, self.offer, self.prompt))
        await self.to_p.has_received(ClaimGranted)
        await until(lambda: self.gate.held == 1)

    async def claims_are_answered(self) -> None:
        """How many the reader sends to begin with depends on when it has blocks."""
        wire = self.to_p
        await until(lambda: len(wire.sent_of(Claim)) == len(wire.received_of(ClaimGranted)))


@asynccontextmanager
async def in_flight(tiny: Path, transport: Literal["shm", "nixl"]) -> AsyncIterator[InFlight]:
    gate = TransferGate()
    async with cluster(
        tiny,
        transport=transport,
        prefill_options={"num_blocks": 12, "clock": ManualClock(100.0)},
        decode_options={"clock": ManualClock(7.0), "wrap_plane": gate.wrap},
    ) as deployment:
        flight = InFlight(deployment, gate)
        try:
            await flight.begin()
            yield flight
        finally:
            gate.closed = False


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_read_in_flight_at_the_deadline_is_protected(
    tiny: Path, transport: Literal["shm", "nixl"]
) -> None:
    """Case 2: the reader renews while its bytes are on the way, and the source keeps the blocks for it."""
    async with in_flight(tiny, transport) as f:
        before = content(f.p, f.offer)
        await f.claims_are_answered()
        for _ in range(7):  # twice the claim's lease, more than the offer's
            claims = len(f.to_p.sent_of(Claim))
            pass_time(f.d, RENEWAL)
            assert len(f.to_p.sent_of(Claim)) == claims + 1
            await f.claims_are_answered()
            pass_time(f.p, RENEWAL)
        await f.legs.flood(f.p, f.rng)
        assert content(f.p, f.offer) == before
        f.gate.closed = False
        answer = await f.answer
        assert answer.token_ids == f.expected
        assert (await f.legs.record(f.d, answer.key)).transferred_tokens == LENGTH
        assert await f.legs.reasons(f.p) == await f.legs.reasons(f.d) == {}
        await f.deployment.settled()


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_read_that_outlives_its_lease_is_discarded(
    tiny: Path, transport: Literal["shm", "nixl"], caplog: pytest.LogCaptureFixture
) -> None:
    """Cases 2 and 3: without renewals the request is computed anew, and the late bytes hit nobody."""
    async with in_flight(tiny, transport) as f:
        f.to_p.lose = lambda body: True
        pass_time(f.d, CLAIM_LEASE)
        answer = await f.answer  # while the read is still on the way
        assert answer.token_ids == f.expected
        record = await f.legs.record(f.d, answer.key)
        assert (record.transferred_tokens, record.reasons) == (0, [Reason.LEASE_LAPSED])
        assert await f.legs.reasons(f.d) == counted(Reason.LEASE_LAPSED)
        assert (await f.legs.debug_kv(f.d))["quarantined"] == 3
        assert (await f.legs.debug_kv(f.p))["offered"] == 3

        pass_time(f.p, CLAIM_LEASE)
        assert f.p.blocks().offered == 3, "the offer's own lease still runs"
        pass_time(f.p, OFFER_LEASE - CLAIM_LEASE)
        await f.deployment.settled(f.p)
        assert await f.legs.reasons(f.p) == counted(Reason.LEASE_LAPSED) + counted(Reason.OFFER_EXPIRED)
        told = [r.getMessage() for r in caplog.records if Reason.LEASE_LAPSED in r.getMessage()]
        source_told = [line for line in told if line.startswith(f"{f.offer.key}")]
        assert len(source_told) == 1
        assert str(f.d.agent.me) in source_told[0]
        assert str(answer.key) in source_told[0]

        before = content(f.p, f.offer)
        await f.legs.flood(f.p, f.rng)
        assert all(now != then for now, then in zip(content(f.p, f.offer), before, strict=True))
        f.to_p.lose = nothing
        f.gate.closed = False  # other prompts' KV lands now, in blocks that nobody has
        await f.deployment.settled()
        assert await f.legs.alone(f.d, f.prompt) == f.expected
        assert (await f.legs.decode(f.d, f.offer, f.prompt)).token_ids == f.expected


async def test_handshake_slower_than_the_lease(tiny: Path) -> None:
    """Case 5 ii: what was offered is gone when the two engines have met at last."""
    async with (
        # The router would introduce a prefill engine that it knows.
        cluster(tiny, prefill=0, decode_options={"clock": ManualClock(7.0)}) as deployment,
        engine("prefill", tiny, num_blocks=12, clock=ManualClock(100.0)) as p,
    ):
        legs, d = Legs(deployment), deployment.decode[0]
        to_p, rng = Wire(d), random.Random(6)
        prompt = random_prompt(rng, LENGTH)
        expected = await legs.alone(d, prompt)
        offer = await legs.offer(p, prompt)
        to_p.lose = lambda body: isinstance(body, Hello)
        answer = asyncio.create_task(legs.decode(d, offer, prompt))
        await until(lambda: len(to_p.sent_of(Hello)) == 1 and d.blocks().loading == 3)

        pass_time(p, 3 * OFFER_LEASE)
        await deployment.settled(p)
        await legs.flood(p, rng)
        assert not to_p.sent_of(Claim), "a claim went to an engine that nobody knows"
        to_p.lose = nothing
        pass_time(d, SETTINGS.retry_s)
        assert (await answer).token_ids == expected
        record = await legs.record(d, (await answer).key)
        assert (record.transferred_tokens, record.reasons) == (0, [Reason.OFFER_EXPIRED])
        await deployment.settled()


# ------------------------------------------------------------------------------------------------- case 3

REQUESTS, TOKENS = 40, 3


class FullBatch:
    """A decode engine whose batch of one is taken, and forty requests that queue behind it."""

    def __init__(self, deployment: Cluster) -> None:
        self.legs = Legs(deployment)
        self.deployment = deployment
        self.p, self.d = deployment.prefill[0], deployment.decode[0]
        self.to_p = Wire(self.d)
        self.steps = StepGate(self.d)
        rng = random.Random(5)
        self.prompts = [random_prompt(rng, BLOCK + 3) for _ in range(REQUESTS)]
        self.expected: list[list[int]] = []
        self.offers: list[OfferDescriptor] = []
        self.answers: list[asyncio.Task[Answered]] = []

    async def begin(self) -> None:
        self.expected = [await self.legs.alone(self.p, prompt, TOKENS) for prompt in self.prompts]
        self.steps.close()
        body = {"prompt": [7] * BLOCK, "max_tokens": 1000, "ignore_eos": True}
        self.long = asyncio.create_task(self.deployment.post(body, url=self.d.url))
        await until(lambda: self.steps.holds)
        self.offers = [await self.legs.offer(self.p, prompt) for prompt in self.prompts]
        self.answers = [
            asyncio.create_task(self.legs.decode(self.d, offer, prompt, key=offer.key, max_tokens=TOKENS))
            for offer, prompt in zip(self.offers, self.prompts, strict=True)
        ]
        # All have claimed. One load is let in beyond the batch, and read; the others get no blocks.
        await self.to_p.has_received(ClaimGranted, REQUESTS)
        self.steps.let(1)
        await until(lambda: self.d.core.load()["waiting"] == REQUESTS - 1)
        await until(lambda: self.p.blocks().offered == 2 * (REQUESTS - 1))

    def end_the_long_one(self) -> None:
        self.long.cancel()
        self.steps.open()


@asynccontextmanager
async def full_batch(tiny: Path) -> AsyncIterator[FullBatch]:
    async with cluster(
        tiny,
        prefill_options={"clock": ManualClock(100.0)},
        decode_options={"clock": ManualClock(7.0), "max_num_seqs": 1},
    ) as deployment:
        queue = FullBatch(deployment)
        try:
            await queue.begin()
            yield queue
        finally:
            queue.end_the_long_one()


async def test_queue_longer_than_the_lease(tiny: Path) -> None:
    """Cases 3 and 25: what queues on a live engine renews its claims, and loses nothing."""
    async with full_batch(tiny) as q:
        for renewals in range(1, 8):  # twice the claim's lease, more than the offer's
            pass_time(q.d, RENEWAL)
            granted = REQUESTS + renewals * (REQUESTS - 1)
            await q.to_p.has_received(ClaimGranted, granted)
            pass_time(q.p, RENEWAL)
        q.end_the_long_one()
        for answer, expected in zip(await asyncio.gather(*q.answers), q.expected, strict=True):
            assert answer.token_ids == expected
            record = await q.legs.record(q.d, answer.key)
            assert (record.transferred_tokens, record.reasons) == (BLOCK + 3, [])
        assert await q.legs.reasons(q.p) == await q.legs.reasons(q.d) == {}
        await q.deployment.settled()


async def test_queue_whose_renewals_are_lost(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case 3: claims that lapse are counted as that, named in the source's log, and computed anew."""
    async with full_batch(tiny) as q:
        q.to_p.lose = lambda body: True
        pass_time(q.d, CLAIM_LEASE)
        pass_time(q.p, CLAIM_LEASE)
        pass_time(q.p, OFFER_LEASE - CLAIM_LEASE)
        await q.deployment.settled(q.p)
        q.end_the_long_one()
        answers = await asyncio.gather(*q.answers)
        assert [answer.token_ids for answer in answers] == q.expected
        records = [await q.legs.record(q.d, answer.key) for answer in answers]
        lapsed = [record for record in records if record.reasons == [Reason.LEASE_LAPSED]]
        assert [record.transferred_tokens for record in lapsed] == [0] * (REQUESTS - 1)
        assert await q.legs.reasons(q.d) == counted(Reason.LEASE_LAPSED, REQUESTS - 1)
        lost = counted(Reason.LEASE_LAPSED, REQUESTS - 1) + counted(Reason.OFFER_EXPIRED, REQUESTS - 1)
        assert await q.legs.reasons(q.p) == lost
        for record in lapsed:
            line = f"{record.handoff_id}#0: lease_lapsed, claim of {q.d.agent.me} "
            assert sum(entry.getMessage().startswith(line) for entry in caplog.records) == 1
        await q.deployment.settled()
