"""References that are used again, are stale, are wrong, or were never right (field cases 1 and 63).

What comes back is the clean run's answer or an error, never another text with 200; and each cause counts
once, under its own name.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import to_blocks
from kvhandoff.handoff.messages import OfferDescriptor
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.handoff.tickets import MissPolicy
from tests.cluster import LiveEngine, cluster
from tests.legs import Answered, Legs, content, counted, new_key, pass_time, random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
LENGTH = 2 * BLOCK + 9
POOL = 24
LEASE = HandoffSettings().offer_lease_s
ON_MISS: tuple[MissPolicy, ...] = ("recompute", "error")

either_policy = pytest.mark.parametrize("on_miss", ON_MISS)
either_prompt = pytest.mark.parametrize("same_prompt", [True, False], ids=["same prompt", "another prompt"])


@dataclass
class Pair:
    """One prefill and one decode engine whose clocks stand still unless told to go on."""

    legs: Legs
    p: LiveEngine
    d: LiveEngine
    rng: random.Random

    def prompt(self, tokens: int = LENGTH) -> list[int]:
        """A prompt that no engine has seen."""
        return random_prompt(self.rng, tokens)

    async def used(self, prompt: list[int]) -> OfferDescriptor:
        """A reference that the decode engine has read already."""
        offer = await self.legs.offer(self.p, prompt)
        expected = await self.legs.alone(self.d, prompt)
        answer = await self.legs.decode(self.d, offer, prompt, key=offer.key)
        assert answer.token_ids == expected
        assert (await self.legs.record(self.d, offer.key)).transferred_tokens == LENGTH
        await self.legs.cluster.settled()
        return offer

    async def recycled(self, offer: OfferDescriptor) -> None:
        """Other prompts, until other KV stands in every block of an ended offer."""
        before = content(self.p, offer)
        await self.legs.flood(self.p, self.rng)
        assert all(now != then for now, then in zip(content(self.p, offer), before, strict=True))

    async def missed(
        self, offer: OfferDescriptor, prompt: list[int], on_miss: MissPolicy, reason: Reason
    ) -> Answered:
        """Use a reference that can't be used: the clean run's answer or an error, one count of `reason`."""
        expected = await self.legs.alone(self.d, prompt)
        before = await self.legs.reasons(self.d)
        answer = await self.legs.decode(self.d, offer, prompt, on_miss=on_miss)
        if on_miss == "recompute":
            assert answer.token_ids == expected
        else:
            assert answer.status == 503
            assert (answer.error["code"], answer.error["type"]) == (reason, "kv_miss")
        record = await self.legs.record(self.d, answer.key)
        assert (record.transferred_tokens, record.reasons) == (0, [reason])
        assert await self.legs.reasons(self.d) - before == counted(reason)
        await self.legs.cluster.settled()
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm", "nixl"])
async def pair(tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with cluster(
        tiny,
        transport=request.param,
        prefill_options={"num_blocks": POOL, "clock": ManualClock(1000.0)},
        decode_options={"clock": ManualClock(5.0)},
    ) as deployment:
        yield Pair(Legs(deployment), deployment.prefill[0], deployment.decode[0], random.Random(1))


# ------------------------------------------------------------------------------------------------- case 1


@either_policy
@either_prompt
async def test_consumed_reference(pair: Pair, on_miss: MissPolicy, same_prompt: bool) -> None:
    """Case 1 a: the reference was read before."""
    prompt = pair.prompt()
    offer = await pair.used(prompt)
    await pair.missed(offer, prompt if same_prompt else pair.prompt(), on_miss, Reason.OFFER_CONSUMED)


@either_policy
@either_prompt
async def test_recycled_reference(pair: Pair, on_miss: MissPolicy, same_prompt: bool) -> None:
    """Case 1 b: nobody came in time, and the blocks hold other prompts' KV now."""
    prompt = pair.prompt()
    offer = await pair.legs.offer(pair.p, prompt)
    pass_time(pair.p, LEASE)
    await pair.legs.cluster.settled()
    await pair.recycled(offer)
    await pair.missed(offer, prompt if same_prompt else pair.prompt(), on_miss, Reason.OFFER_EXPIRED)


async def test_held_reference_is_not_recycled(pair: Pair) -> None:
    """While the lease runs, no other prompt gets the blocks, however many there are."""
    prompt = pair.prompt()
    offer = await pair.legs.offer(pair.p, prompt)
    before = content(pair.p, offer)
    await pair.legs.flood(pair.p, pair.rng)
    assert content(pair.p, offer) == before
    expected = await pair.legs.alone(pair.d, prompt)
    answer = await pair.legs.decode(pair.d, offer, prompt)
    assert answer.token_ids == expected
    assert (await pair.legs.record(pair.d, answer.key)).transferred_tokens == LENGTH
    await pair.legs.cluster.settled()


def _spans(*spans: tuple[int, int]) -> Callable[[OfferDescriptor], OfferDescriptor]:
    return lambda offer: msgspec.structs.replace(offer, spans=spans)


def _other_digest(offer: OfferDescriptor) -> OfferDescriptor:
    """Without the promise of a full match, nothing is read before the claim is answered."""
    return msgspec.structs.replace(offer, digest="0" * 32)


def _reversed(offer: OfferDescriptor) -> OfferDescriptor:
    blocks = to_blocks(offer.spans)
    return msgspec.structs.replace(offer, spans=tuple((block, 1) for block in reversed(blocks)))


def _moved_by_one(offer: OfferDescriptor) -> OfferDescriptor:
    blocks = [(block + 1) % POOL for block in to_blocks(offer.spans)]
    return msgspec.structs.replace(offer, spans=tuple((block, 1) for block in blocks))


def _enormous(offer: OfferDescriptor) -> OfferDescriptor:
    return msgspec.structs.replace(offer, spans=((0, 2**50),), n_tokens=2**50 * BLOCK)


WRONG_BLOCKS: dict[str, Callable[[OfferDescriptor], OfferDescriptor]] = {
    "beyond the pool": _spans((POOL + 5, 3)),
    "partly beyond the pool": _spans((POOL - 1, 3)),
    "negative": _spans((-1, 3)),
    "negative count": _spans((0, -3), (0, 6)),
    "empty run": _spans((0, 0), (0, 3)),
    "beyond the pool, digest unknown": lambda offer: _other_digest(_spans((POOL + 5, 3))(offer)),
    "too few": _spans((0, 2)),
    "none": _spans(),
    "more than memory can list": _enormous,
    "somebody else's": _moved_by_one,
    "somebody else's, digest unknown": lambda offer: _other_digest(_moved_by_one(offer)),
    "in another order": _reversed,
}


@either_policy
@pytest.mark.parametrize("change", WRONG_BLOCKS.values(), ids=WRONG_BLOCKS.keys())
async def test_reference_with_wrong_blocks(
    pair: Pair, change: Callable[[OfferDescriptor], OfferDescriptor], on_miss: MissPolicy
) -> None:
    """Case 1 c: blocks that the source doesn't have, or that hold something else."""
    prompt = pair.prompt()
    offer = await pair.legs.offer(pair.p, prompt)
    assert change(offer).spans != offer.spans
    await pair.missed(change(offer), prompt, on_miss, Reason.BAD_REFERENCE)


@either_policy
async def test_reference_of_an_unknown_handoff(pair: Pair, on_miss: MissPolicy) -> None:
    """Case 1 d: the source never made such an offer; the one it did make stays."""
    prompt = pair.prompt()
    offer = await pair.legs.offer(pair.p, prompt)
    unknown = msgspec.structs.replace(offer, key=HandoffKey(HandoffId("never made"), 0))
    answer = await pair.legs.decode(pair.d, unknown, prompt, on_miss=on_miss)
    assert answer.status == (200 if on_miss == "recompute" else 503)
    assert (await pair.legs.record(pair.d, answer.key)).reasons == [Reason.OFFER_UNKNOWN]
    assert pair.p.blocks().offered == 3

    pass_time(pair.p, LEASE)
    await pair.missed(unknown, pair.prompt(), on_miss, Reason.OFFER_UNKNOWN)


@either_policy
@pytest.mark.parametrize("attempt", [0, 1, 7])
async def test_reference_of_another_attempt(pair: Pair, on_miss: MissPolicy, attempt: int) -> None:
    """Attempts of one handoff are told apart, also where no engine ever made that attempt."""
    prompt, made = pair.prompt(), 3
    key = new_key()
    await pair.legs.offer(pair.p, prompt, key=msgspec.structs.replace(key, attempt=made))
    offer = await pair.legs.offer(pair.p, pair.prompt(), key=msgspec.structs.replace(key, attempt=made + 1))
    other = msgspec.structs.replace(offer, key=msgspec.structs.replace(key, attempt=attempt))
    before = await pair.legs.reasons(pair.d)
    answer = await pair.legs.decode(pair.d, other, prompt, on_miss=on_miss)
    assert await pair.legs.reasons(pair.d) - before == counted(Reason.OFFER_UNKNOWN)
    assert (await pair.legs.record(pair.d, answer.key)).transferred_tokens == 0
    pass_time(pair.p, LEASE)
    await pair.legs.cluster.settled()


@either_policy
@either_prompt
async def test_reference_one_second_after_its_lease(
    pair: Pair, on_miss: MissPolicy, same_prompt: bool
) -> None:
    """Case 1 e: the blocks still hold the right KV, but nothing says so any more."""
    prompt = pair.prompt()
    offer = await pair.legs.offer(pair.p, prompt)
    before = content(pair.p, offer)
    pass_time(pair.p, LEASE + 1)
    await pair.legs.cluster.settled()
    assert content(pair.p, offer) == before
    await pair.missed(offer, prompt if same_prompt else pair.prompt(), on_miss, Reason.OFFER_EXPIRED)


@either_policy
async def test_reference_of_another_prompt(pair: Pair, on_miss: MissPolicy) -> None:
    """A live reference with a prompt it does not stand for is declined, and stays for the one it does."""
    prompt = pair.prompt()
    offer = await pair.legs.offer(pair.p, prompt)
    other = pair.prompt()
    expected = await pair.legs.alone(pair.d, other)
    answer = await pair.legs.decode(pair.d, offer, other, on_miss=on_miss)
    if on_miss == "recompute":
        assert answer.token_ids == expected
    assert (await pair.legs.record(pair.d, answer.key)).reasons == [Reason.CHAIN_MISMATCH]

    expected = await pair.legs.alone(pair.d, prompt)
    answer = await pair.legs.decode(pair.d, offer, prompt, on_miss=on_miss)
    assert answer.token_ids == expected
    assert (await pair.legs.record(pair.d, answer.key)).transferred_tokens == LENGTH
    await pair.legs.cluster.settled()


@pytest.mark.parametrize(("equal_tokens", "usable"), [(15, 0), (16, 16), (17, 16), (32, 32), (40, 32)])
async def test_reference_of_a_prompt_that_begins_alike(pair: Pair, equal_tokens: int, usable: int) -> None:
    """Whole blocks of equal beginning are used, and not a token beyond."""
    prompt = pair.prompt()
    offer = await pair.legs.offer(pair.p, prompt)
    other = prompt[:equal_tokens] + [token + 1 for token in prompt[equal_tokens:]]
    expected = await pair.legs.alone(pair.d, other)
    assert expected != await pair.legs.alone(pair.d, prompt), "the oracle can't tell the two apart"
    answer = await pair.legs.decode(pair.d, offer, other)
    assert answer.token_ids == expected
    record = await pair.legs.record(pair.d, answer.key)
    assert record.transferred_tokens == usable
    assert record.blocks == 3
    assert record.bytes == usable // BLOCK * pair.d.region.block_bytes
    pass_time(pair.p, LEASE)
    await pair.legs.cluster.settled()


@either_policy
@pytest.mark.parametrize("change", [{"epoch": Epoch("former")}, {"engine_id": EngineId("somebody")}])
async def test_reference_of_another_life(pair: Pair, on_miss: MissPolicy, change: dict[str, Any]) -> None:
    """Whoever listens at the address now has not made the offer."""
    prompt = pair.prompt()
    offer = await pair.legs.offer(pair.p, prompt)
    source: Identity = msgspec.structs.replace(offer.source, **change)
    stale = msgspec.structs.replace(offer, source=source)
    answer = await pair.legs.decode(pair.d, stale, prompt, on_miss=on_miss)
    assert (await pair.legs.record(pair.d, answer.key)).reasons == [Reason.EPOCH_CHANGED]
    pass_time(pair.p, LEASE)
    await pair.missed(stale, pair.prompt(), on_miss, Reason.EPOCH_CHANGED)

    prompt = pair.prompt()  # and the present life is read from as before
    await pair.used(prompt)


# ------------------------------------------------------------------------------------------------ case 63


async def test_each_cause_has_its_own_counter(pair: Pair) -> None:
    """Case 63: an expiry, two declines and a bad reference are four counters; a decline is no failure."""
    d_before, p_before = await pair.legs.reasons(pair.d), await pair.legs.reasons(pair.p)
    prompts = [pair.prompt() for _ in range(4)]
    consumed = await pair.used(prompts[0])
    expired = await pair.legs.offer(pair.p, prompts[1])
    pass_time(pair.p, LEASE)
    alive = await pair.legs.offer(pair.p, prompts[1])
    wrong = _spans((POOL + 5, 3))(await pair.legs.offer(pair.p, prompts[3]))
    for offer, prompt in zip((consumed, expired, alive, wrong), prompts, strict=True):
        assert (await pair.legs.decode(pair.d, offer, prompt)).status == 200

    causes = [Reason.OFFER_CONSUMED, Reason.OFFER_EXPIRED, Reason.CHAIN_MISMATCH, Reason.BAD_REFERENCE]
    assert await pair.legs.reasons(pair.d) - d_before == sum(map(counted, causes), Counter())
    assert await pair.legs.reasons(pair.p) - p_before == counted(Reason.OFFER_EXPIRED)
    assert [reason.kind for reason in causes] == ["decline", "decline", "decline", "failure"]
    pass_time(pair.p, LEASE)
    await pair.legs.cluster.settled()
