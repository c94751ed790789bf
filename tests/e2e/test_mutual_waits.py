"""Engines whose memory waits for each other (tiny pools) go on, with the right text, long before any load has
queued for too long.

Each engine holds all but one of its blocks for a request that queues at the other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.settings import HandoffSettings
from tests.cluster import Cluster, LiveEngine, cluster, until
from tests.e2e.stage import BLOCK, greedy
from tests.legs import MAX_TOKENS, Answered, Legs, new_key, random_prompt

POOL = 7
SETTINGS = HandoffSettings(short_s=1.0)
"""Shorter only than what a test likes to wait for; queues may be as long as ever."""


class Pair:
    """A prefill engine P and a decode engine D; `push` is a request that has all but one of D's blocks, and
    queues for those of P."""

    def __init__(self, deployment: Cluster) -> None:
        self.deployment = deployment
        self.legs = Legs(deployment)
        (self.p,), (self.d,) = deployment.prefill, deployment.decode
        self.rng = random.Random(31)

    def prompt(self) -> list[int]:
        """One that needs all blocks but one, with its answer."""
        return random_prompt(self.rng, (POOL - 1) * BLOCK - MAX_TOKENS)

    async def alone(self, prompt: list[int]) -> list[int]:
        return await self.legs.alone(self.p, prompt)

    async def pushed(self, prompt: list[int]) -> tuple[HandoffKey, asyncio.Task[tuple[Answered, Answered]]]:
        """A push for which P has no blocks; D's are granted."""
        key = new_key()
        both = asyncio.create_task(self.legs.push(self.p, self.d, prompt, key=key))
        await until(lambda: waits(self.p) and self.d.core.load()["loading"] == 1, describe=self.where)
        return key, both

    async def queued_at_d(self) -> None:
        await until(lambda: waits(self.d), describe=self.where)

    def where(self) -> str:
        return f"P: {self.p.core.load()}, D: {self.d.core.load()}"


def waits(engine: LiveEngine) -> bool:
    """Whether a request waits for blocks."""
    return engine.core.load()["waiting"] == 1


@asynccontextmanager
async def pair(tiny: Path) -> AsyncIterator[Pair]:
    async with cluster(tiny, num_blocks=POOL, settings=SETTINGS) as deployment:
        yield Pair(deployment)


async def answered_in_time(leg: asyncio.Task[tuple[Answered, Answered]]) -> Answered:
    """The decode leg's answer, while every other deadline is far."""
    async with asyncio.timeout(30.0):
        return (await leg)[1]


async def test_engines_that_wait_for_each_other_go_on(tiny: Path) -> None:
    """P's memory is full of an offer that D's queue keeps; D's of blocks for a push that P's queue keeps."""
    async with pair(tiny) as t:
        first, second = t.prompt(), t.prompt()
        right = [await t.alone(first), await t.alone(second)]
        offer = await t.legs.offer(t.p, first)
        key, push = await t.pushed(second)
        pulled = new_key()
        pull = asyncio.create_task(t.legs.decode(t.d, offer, first, key=pulled))
        await t.queued_at_d()
        assert (await answered_in_time(push)).token_ids == right[1]
        assert (await pull).token_ids == right[0]
        record = await t.legs.record(t.d, pulled)
        assert (record.reasons, record.transferred_tokens) == ([Reason.SOURCE_SHORT], 0)
        record = await t.legs.record(t.d, key)
        assert (record.reasons, record.transferred_tokens) == ([], len(second))
        await t.deployment.settled()


async def test_two_pushes_in_opposite_order_go_on(tiny: Path) -> None:
    """P has computed what D queues for, and D has granted what P queues for."""
    async with pair(tiny) as t:
        first, second = t.prompt(), t.prompt()
        right = [await t.alone(first), await t.alone(second)]
        early = new_key()
        await t.legs.prefill_push(t.p, t.d, first, key=early)
        key, push = await t.pushed(second)
        late = asyncio.create_task(t.legs.decode_push(t.p, t.d, first, key=early))
        await t.queued_at_d()
        assert (await answered_in_time(push)).token_ids == right[1]
        assert (await late).token_ids == right[0]
        record = await t.legs.record(t.d, early)
        assert (record.reasons, record.transferred_tokens) == ([Reason.SOURCE_SHORT], 0)
        record = await t.legs.record(t.d, key)
        assert (record.reasons, record.transferred_tokens) == ([], len(second))
        await t.deployment.settled()


async def test_many_requests_on_all_paths_in_tiny_pools(tiny: Path) -> None:
    """Through the router, eight at a time, in pools that hold two or three: all are right, none has waited
    for a queue's deadline."""
    rng = random.Random(5)
    prompts = [random_prompt(rng, rng.randrange(BLOCK, 4 * BLOCK)) for _ in range(40)]
    async with cluster(tiny, num_blocks=2 * POOL, settings=SETTINGS) as deployment:
        legs, gate = Legs(deployment), asyncio.Semaphore(8)
        right = [await legs.alone(deployment.prefill[0], prompt) for prompt in prompts]

        async def ask(number: int) -> list[int]:
            async with gate:
                path = ("pull", "push")[number % 2]
                status, answer = await deployment.post(greedy(prompts[number], MAX_TOKENS), path=path)
            assert status == 200, answer
            token_ids: list[int] = answer["choices"][0]["token_ids"]
            return token_ids

        async with asyncio.timeout(100.0):
            assert await asyncio.gather(*(ask(number) for number in range(len(prompts)))) == right
        for engine in deployment.engines:
            assert not any(Reason.QUEUE_TIMEOUT in seen for seen in await legs.reasons(engine))
        await deployment.settled()
