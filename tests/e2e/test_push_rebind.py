"""A request that is bound to another decode engine before its first token (field case 15, as far as engines
are concerned): D1's grant ends, D2 gets the KV, and D1's blocks are free when their fence has come.

By push while P computes, by pull when it has finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import Fenced, OfferDescriptor
from tests.cluster import LiveEngine, engine, until
from tests.e2e.pushes import Pushing, left, named_grants, pushing
from tests.e2e.stage import CHUNK, PATIENT, idle, leftovers
from tests.legs import Answered, new_key
from tests.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 10
"""Of a prompt."""


class Three:
    """P, D1, and D2."""

    def __init__(self, c: Pushing, d2: LiveEngine) -> None:
        self.c, self.p, self.d1, self.d2 = c, c.p, c.d, d2
        self.from_d2 = Wire(d2)

    def at_d2(self, prompt: list[int], first: HandoffKey) -> asyncio.Task[Answered]:
        """The second attempt: it is to get what the first one's prefill leg computes."""
        leg = self.c.legs.decode_push(self.p, self.d2, prompt, key=again(first), offer=first)
        return asyncio.create_task(leg)

    async def transferred(self, engine: LiveEngine, key: HandoffKey) -> bool:
        return (await self.c.legs.record(engine, key)).kv_source == "transferred"

    async def idle(self) -> None:
        await until(lambda: idle(self.d2), describe=lambda: f"D2: {leftovers(self.d2)}")
        await self.c.idle()


def again(key: HandoffKey) -> HandoffKey:
    """The next attempt of the same handoff."""
    return msgspec.structs.replace(key, attempt=key.attempt + 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm", "nixl"])
async def engines(tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[Three]:
    small = {"num_blocks": 40}
    options: dict[str, Any] = {"transport": request.param, "settings": PATIENT, "max_step_tokens": CHUNK}
    async with (
        pushing(tiny, request.param, **small) as c,
        engine("decode", tiny, name="decode-1", **options, **small) as d2,
    ):
        yield Three(c, d2)


@pytest_asyncio.fixture(loop_scope="module")
async def t(engines: Three) -> AsyncIterator[Three]:
    engines.c.reset()
    yield engines
    engines.c.open()


@pytest.mark.parametrize("at_d1", ["its client has left", "it is still waited for"])
async def test_push_to_another_while_p_computes(t: Three, at_d1: str) -> None:
    """D1's third write is in flight. D1's blocks wait for it; D2 gets all five chunks."""
    c, prompt = t.c, t.c.prompt()
    expected = await c.alone(prompt)
    push = await c.half_written(prompt)
    if at_d1 == "its client has left":
        await left(push.decode)
        await until(lambda: t.d1.blocks().quarantined == BLOCKS)
    second = t.at_d2(prompt, push.key)
    await until(lambda: c.writes.posted == 4)  # three chunks in one write, to D2
    fenced = len(c.from_d.received_of(Fenced))
    assert t.d1.blocks().quarantined + t.d1.blocks().granted == BLOCKS
    c.writes.let(1)  # the oldest in flight: D1's
    await c.from_d.has_received(Fenced, fenced + 1)
    assert t.d1.blocks().quarantined == t.d1.blocks().granted == 0
    c.open()
    assert (await second).token_ids == expected
    assert await t.transferred(t.d2, again(push.key))
    assert c.writes.blocks == 6 + BLOCKS
    if at_d1 != "its client has left":
        assert (await push.decode).token_ids == expected
        record = await c.record(push)
        assert (record.kv_source, record.reasons) == ("recomputed", [Reason.REBOUND])
    await t.idle()


async def test_blocks_of_the_first_wait_for_the_fence(t: Three) -> None:
    """D2 may have its answer long before: D1's blocks are nobody's until its write has ended."""
    c, prompt = t.c, t.c.prompt()
    expected = await c.alone(prompt)
    push = await c.half_written(prompt)
    await left(push.decode)
    (first,) = named_grants(t.p)
    await until(lambda: first.ending is not None)  # else D2's grant may be the one that ends it
    second = t.at_d2(prompt, push.key)
    await c.named(2)
    c.steps.open()
    await push.prefill
    c.writes.closed, c.writes.closed_to = False, t.d1.agent.me
    assert (await second).token_ids == expected
    assert await t.transferred(t.d2, again(push.key))
    assert (t.d1.blocks().quarantined, first.ending) == (BLOCKS, Reason.REVOKED)
    await c.legs.flood(t.d1, c.rng)
    assert t.d1.blocks().quarantined == BLOCKS
    c.open()
    await t.idle()


async def test_pull_by_another_when_p_has_finished(t: Three) -> None:
    """The descriptor in P's answer is good for D2, while D1's last write is still in flight."""
    c, prompt = t.c, t.c.prompt()
    expected = await c.alone(prompt)
    c.writes.closed = True
    push = c.start(prompt)
    answer = await push.prefill
    offer = msgspec.convert(answer.body["kv_transfer_params"]["offer"], OfferDescriptor)
    await until(lambda: c.writes.held > 0)
    await left(push.decode)
    await until(lambda: t.d1.blocks().quarantined == BLOCKS)
    answer = await c.legs.decode(t.d2, offer, prompt, key=again(push.key))
    assert answer.token_ids == expected
    assert await t.transferred(t.d2, again(push.key))
    await until(lambda: idle(t.d2))
    assert t.d1.blocks().quarantined == BLOCKS
    # D2 has said that it is done, and nobody else will come; but the write still reads from P's blocks.
    assert t.p.blocks().offered == BLOCKS
    await c.legs.flood(t.p, c.rng)
    c.open()
    await t.idle()


async def test_offer_that_nobody_took_is_pulled(t: Three) -> None:
    """D1 never got its leg."""
    c, prompt, key = t.c, t.c.prompt(), new_key()
    expected = await c.alone(prompt)
    answer = await c.legs.prefill_push(t.p, t.d1, prompt, key=key)
    offer = msgspec.convert(answer.body["kv_transfer_params"]["offer"], OfferDescriptor)
    answer = await c.legs.decode(t.d2, offer, prompt, key=again(key))
    assert answer.token_ids == expected
    assert await t.transferred(t.d2, again(key))
    assert c.writes.posted == 0
    await t.idle()


async def test_first_attempt_that_comes_after_the_second(t: Three) -> None:
    """D1's leg was delayed. P does not go back to it: it is fenced at once, and D2 gets the KV."""
    c, prompt, key = t.c, t.c.prompt(), new_key()
    expected = await c.alone(prompt)
    c.steps.close()
    prefill = asyncio.create_task(c.legs.prefill_push(t.p, t.d2, prompt, key=key))
    second = t.at_d2(prompt, key)
    await c.named()
    late = await c.legs.decode_push(t.p, t.d1, prompt, key=key)
    assert late.token_ids == expected
    assert (await c.legs.record(t.d1, key)).reasons == [Reason.REBOUND]
    c.open()
    assert (await second).token_ids == expected
    assert await t.transferred(t.d2, again(key))
    assert (await prefill).status == 200
    assert c.writes.blocks == BLOCKS
    await t.idle()


async def test_again_at_the_same_engine(t: Three) -> None:
    """The second attempt is at D1 too: a grant of its own, whose blocks are others."""
    c, prompt = t.c, t.c.prompt()
    expected = await c.alone(prompt)
    push = await c.half_written(prompt)
    await left(push.decode)
    second = asyncio.create_task(c.legs.decode_push(t.p, t.d1, prompt, key=again(push.key), offer=push.key))
    await c.named(2)
    assert (t.d1.blocks().quarantined, t.d1.blocks().granted) == (BLOCKS, BLOCKS)
    c.open()
    assert (await second).token_ids == expected
    assert await t.transferred(t.d1, again(push.key))
    await t.idle()


async def test_several_in_a_row(t: Three) -> None:
    """Bound four times, to and fro; each former grant ends, the last one is written."""
    c, prompt = t.c, t.c.prompt()
    expected = await c.alone(prompt)
    c.writes.closed = True
    push = await c.computed(prompt, 1)
    legs, key = [push.decode], push.key
    for number, destination in enumerate((t.d2, t.d1, t.d2)):
        key = again(key)
        leg = c.legs.decode_push(t.p, destination, prompt, key=key, offer=push.key)
        legs.append(asyncio.create_task(leg))
        await until(lambda number=number: len(named_grants(t.p)) == number + 2, describe=c.s.where)
    c.open()
    answers = await asyncio.gather(*legs)
    assert [answer.token_ids for answer in answers] == [expected] * 4
    assert await t.transferred(t.d2, key)
    for former, answer in zip((t.d1, t.d2, t.d1), answers[:3], strict=True):
        assert (await c.legs.record(former, answer.key)).reasons == [Reason.REBOUND]
    await t.idle()
