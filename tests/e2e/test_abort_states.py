"""Field case 29: a client leaves, whatever state its request is in; nothing is left behind anywhere.

The oracle is one engine serving alone: greedy token ids, in exact mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.cluster import until
from tests.e2e.stage import Stage, claims, leave, mute, news, prompt, stage

VICTIM, OTHER, LARGE_OTHER = prompt(1, 69), prompt(2, 50), prompt(3, 80)
"""Five blocks, four, and five; the decode engine has nine."""


@dataclass
class Scene:
    """A request that stands in some state, held there."""

    victim: asyncio.Task[list[int]]
    hit: Callable[[], bool]
    """Whether the client's leaving has had its effect, as far as it can while all is held."""
    other: tuple[asyncio.Task[list[int]], list[int]] | None = None
    """Another request that is under way, and its prompt."""


async def queued_on_prefill(s: Stage) -> Scene:
    s.prefill_steps.close()
    other = s.request(OTHER, url=s.prefill.url)
    await until(lambda: s.prefill_steps.holds)
    victim = s.request(VICTIM)
    await until(lambda: s.prefill.core.load()["waiting"] == 1)
    before = news(s.prefill)
    return Scene(victim, lambda: news(s.prefill) > before, (other, OTHER))


async def prefilling(s: Stage) -> Scene:
    s.prefill_steps.close()
    victim = s.request(VICTIM)
    s.prefill_steps.let(1)
    await until(lambda: s.prefill_steps.done == 1 and s.prefill_steps.holds)
    return Scene(victim, lambda: news(s.prefill) > 0)


async def offered_not_claimed(s: Stage) -> Scene:
    s.transfers.closed = True
    s.on_open = mute(s.decode)
    victim = s.request(VICTIM)
    await until(lambda: s.prefill.blocks().offered > 0 and s.decode.core.load()["loading"] == 1)
    assert claims(s.prefill) == 0
    return Scene(victim, lambda: s.prefill.blocks().offered == 0 and s.decode.core.load()["loading"] == 0)


async def queued_on_decode(s: Stage) -> Scene:
    s.decode_steps.close()
    other = s.request(LARGE_OTHER, url=s.decode.url)
    await until(lambda: s.decode_steps.holds)
    victim = s.request(VICTIM)
    await until(lambda: news(s.decode) == 1 and claims(s.prefill) == 1)
    s.decode_steps.let(1)  # the engine takes it up, and has no room for it
    await until(lambda: s.decode_steps.done == 1 and s.decode_steps.holds)
    assert len(s.decode.core._scheduler.waiting) == 1
    return Scene(victim, lambda: news(s.decode) > 0, (other, LARGE_OTHER))


async def reading(s: Stage) -> Scene:
    s.transfers.closed = True
    victim = s.request(VICTIM)
    await until(lambda: s.transfers.held == 1 and claims(s.prefill) == 1)
    return Scene(victim, lambda: s.decode.blocks().quarantined == 5)


async def loaded_not_running(s: Stage) -> Scene:
    """The bytes are in and verified; the engine is busy and has not heard of it."""
    scene = await reading_beside_a_step(s)
    s.transfers.closed = False
    await until(lambda: news(s.decode) == 1)
    return replace(scene, hit=lambda: news(s.decode) > 1)


async def reading_beside_a_step(s: Stage) -> Scene:
    """The engine is busy and hears of the client's leaving when the bytes are in."""
    s.transfers.closed = True
    victim = s.request(VICTIM)
    await until(lambda: s.transfers.held == 1 and claims(s.prefill) == 1)
    s.decode_steps.close()
    other = s.request(OTHER, url=s.decode.url)
    await until(lambda: s.decode_steps.holds)

    def lands_after_the_abort() -> bool:
        if news(s.decode) == 0:
            return False
        s.transfers.closed = False
        return news(s.decode) == 2

    return Scene(victim, lands_after_the_abort, (other, OTHER))


async def decoding(s: Stage) -> Scene:
    s.decode_steps.close()
    victim = s.request(VICTIM)
    s.decode_steps.let(2)
    await until(lambda: s.decode_steps.done == 2 and s.decode_steps.holds)
    return Scene(victim, lambda: news(s.decode) > 0)


STATES = [
    queued_on_prefill,
    prefilling,
    offered_not_claimed,
    queued_on_decode,
    reading,
    loaded_not_running,
    reading_beside_a_step,
    decoding,
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_abort_leaves_nothing_behind(tiny: Path, state: Callable[[Stage], Awaitable[Scene]]) -> None:
    """Field case 29."""
    async with stage(tiny, decode_options={"num_blocks": 9}) as s:
        expected = {len(tokens): await s.alone(tokens) for tokens in (VICTIM, OTHER, LARGE_OTHER)}
        await s.introduced()
        s.reset()
        scene = await state(s)
        await leave(scene.victim)
        await until(scene.hit, describe=s.where)
        s.open()
        if scene.other is not None:
            task, tokens = scene.other
            assert await task == expected[len(tokens)]
        await s.idle()
        assert await s.request(VICTIM) == expected[len(VICTIM)]
        await s.idle()
