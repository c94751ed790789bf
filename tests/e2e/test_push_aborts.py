"""Pushes that end at D, in each state (field cases 5 i, 13, 23, 29, 30): its client leaves, or the engine
ends the request by itself.

Until P has said that nothing more will be written, the granted blocks are nobody else's; then anybody's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvhandoff.handoff.messages import Commit, Fenced
from tests.cluster import until
from tests.e2e.pushes import Push, Pushing, abort_all, left, pushing
from tests.e2e.stage import BLOCK, news
from tests.legs import MAX_TOKENS, new_key

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL, BLOCKS = 24, 10
"""Blocks of D, and of a push's prompt."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm", "nixl"])
async def engines(tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pushing]:
    async with pushing(tiny, request.param, decode_options={"num_blocks": POOL}) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def c(engines: Pushing) -> AsyncIterator[Pushing]:
    engines.reset()
    yield engines
    engines.open()


@dataclass
class Scene:
    """A push that stands in some state, held there."""

    push: Push
    other: tuple[asyncio.Task[list[int]], list[int]] | None = None
    """Another request on D, and its answer."""


async def beside(c: Pushing, tokens: int) -> dict[str, Any]:
    """Another request, whose step holds up D."""
    prompt = c.prompt(tokens)
    expected = await c.alone(prompt)
    c.s.decode_steps.close()
    task = c.s.request(prompt, MAX_TOKENS, url=c.d.url)
    await until(lambda: c.s.decode_steps.holds)
    return {"other": (task, expected)}


# ---------------------------------------------------------------------------- states without bytes to come


async def queued_for_blocks(c: Pushing, prompt: list[int]) -> Scene:
    other = await beside(c, (POOL - BLOCKS + 1) * BLOCK)
    c.steps.close()
    push = c.start(prompt)
    await until(lambda: news(c.d) == 1 and len(c.p.agent._running_node.writes) == 1)
    c.s.decode_steps.let(1)  # D takes it up, and has no room for it
    await until(lambda: c.s.decode_steps.done == 1 and c.s.decode_steps.holds)
    assert len(c.d.core._scheduler.waiting) == 1
    return Scene(push, **other)


async def committed_not_loaded(c: Pushing, prompt: list[int]) -> Scene:
    """The bytes are in and verified; D's engine is busy and has not heard of it."""
    c.writes.closed = True
    push = c.start(prompt)
    await push.prefill
    other = await beside(c, 2 * BLOCK)
    c.writes.closed = False
    await until(lambda: news(c.d) == 1)
    return Scene(push, **other)


async def written_beside_a_step(c: Pushing, prompt: list[int]) -> Scene:
    """D's engine is busy and hears at once of the bytes being in and of the end."""
    c.writes.closed = True
    push = c.start(prompt)
    await push.prefill
    return Scene(push, **await beside(c, 2 * BLOCK))


async def decoding(c: Pushing, prompt: list[int]) -> Scene:
    c.s.decode_steps.close()
    push = c.start(prompt)
    c.s.decode_steps.let(2)
    await until(lambda: c.s.decode_steps.done == 2 and c.s.decode_steps.holds)
    return Scene(push)


# ------------------------------------------------------------------------ states in which a fence is owed


async def granted_before_the_first_chunk(c: Pushing, prompt: list[int]) -> Scene:
    push = await c.computed(prompt, 0)
    c.from_p.lose = lambda body: isinstance(body, Fenced)
    return Scene(push)


async def in_the_first_write(c: Pushing, prompt: list[int]) -> Scene:
    c.writes.closed = True
    return Scene(await c.computed(prompt, 1))


async def between_two_writes(c: Pushing, prompt: list[int]) -> Scene:
    push = await c.computed(prompt, 2)
    await until(lambda: c.writes.ended == 2)
    c.from_p.lose = lambda body: isinstance(body, Fenced)
    return Scene(push)


async def half_written(c: Pushing, prompt: list[int]) -> Scene:
    return Scene(await c.half_written(prompt))


async def in_the_last_write(c: Pushing, prompt: list[int]) -> Scene:
    c.writes.closed = True
    c.writes.let(4)
    push = await c.computed(prompt, 4)
    c.steps.open()
    await push.prefill
    await until(lambda: c.writes.ended == 4 and c.writes.posted == 5)
    return Scene(push)


async def written_not_committed(c: Pushing, prompt: list[int]) -> Scene:
    """After the last write; the commit is lost."""
    c.from_p.lose = lambda body: isinstance(body, (Commit, Fenced))
    push = c.start(prompt)
    await push.prefill
    await until(lambda: len(c.from_p.sent_of(Commit)) > 0 and c.writes.ended == c.writes.posted > 0)
    return Scene(push)


FREE = [queued_for_blocks, committed_not_loaded, written_beside_a_step, decoding]
FENCED = [
    granted_before_the_first_chunk,
    in_the_first_write,
    between_two_writes,
    half_written,
    in_the_last_write,
    written_not_committed,
]
State = Callable[[Pushing, list[int]], Awaitable[Scene]]


@pytest.mark.parametrize("state", FREE, ids=lambda state: state.__name__)
async def test_client_leaves(c: Pushing, state: State) -> None:
    """Field case 29. Nothing is left behind anywhere."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    scene = await state(c, prompt)
    heard = news(c.d)
    await left(scene.push.decode)
    await until(lambda: news(c.d) > heard)
    c.open()
    if scene.other is not None:
        task, tokens = scene.other
        assert await task == tokens
    await c.s.cluster.settled(c.d)
    await c.legs.withdraw(c.p, scene.push.key)
    await c.idle()
    assert (await c.legs.push(c.p, c.d, prompt))[1].token_ids == expected
    await c.idle()


@pytest.mark.parametrize("how", ["client leaves", "engine ends it"])
@pytest.mark.parametrize("state", FENCED, ids=lambda state: state.__name__)
async def test_end_while_a_fence_is_owed(c: Pushing, state: State, how: str) -> None:
    """Field cases 5 i and 23: others fill the pool, and none of them gets a block that may be written to."""
    prompt, big = c.prompt(), c.prompt((POOL - 1) * BLOCK)
    others = [c.prompt(3 * BLOCK + n) for n in range(8)]  # twice what fits beside the quarantine
    expected, expected_big = await c.alone(prompt), await c.alone(big)
    texts = [await c.alone(other) for other in others]
    scene = await state(c, prompt)
    await ended(c, scene.push, how)
    await until(lambda: c.d.blocks().quarantined == BLOCKS, describe=c.s.where)
    counts = await c.legs.debug_kv(c.d)
    assert (counts["granted"], counts["used"]) == (0, 0)

    asked = [c.s.request(other, MAX_TOKENS, url=c.d.url) for other in others]
    assert await asyncio.gather(*asked) == texts
    waits = c.s.request(big, MAX_TOKENS, url=c.d.url)
    await until(lambda: c.d.core.load()["waiting"] == 1)
    assert c.d.blocks().quarantined == BLOCKS

    c.open()
    assert await waits == expected_big
    await c.s.cluster.settled(c.d)
    await c.legs.withdraw(c.p, scene.push.key)
    await c.idle()
    assert (await c.legs.push(c.p, c.d, prompt))[1].token_ids == expected
    await c.idle()


async def test_engine_ends_it_as_the_kv_comes(c: Pushing) -> None:
    """D's engine hears of the end first, then of the KV: the handoff side still has the blocks."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    scene = await written_beside_a_step(c, prompt)
    (request_id,) = (name for name in c.d.core.live() if name.startswith(scene.push.key.handoff_id))
    c.d.core.abort(request_id)
    c.writes.closed = False
    await until(lambda: news(c.d) == 2)
    c.open()
    assert (await scene.push.decode).error["code"] == "engine_aborted"
    assert scene.other is not None
    task, tokens = scene.other
    assert await task == tokens
    await c.idle()
    assert (await c.legs.push(c.p, c.d, prompt))[1].token_ids == expected
    await c.idle()


async def test_late_write_beside_a_running_request(c: Pushing) -> None:
    """Field case 5 i: one that takes every other block is half-way when the late bytes land."""
    prompt, long = c.prompt(), c.prompt((POOL - BLOCKS) * BLOCK - 20)
    expected = await c.alone(long, 20)
    push = await c.half_written(prompt)
    await left(push.decode)
    await until(lambda: c.d.blocks().quarantined == BLOCKS)
    running = c.s.request(long, 20, url=c.d.url)
    c.s.decode_steps.close()
    await until(lambda: c.s.decode_steps.holds)
    c.s.decode_steps.let(3)
    await until(lambda: c.s.decode_steps.holds)
    c.writes.closed = False
    await until(lambda: c.writes.held == 0 and c.d.blocks().quarantined == 0)
    assert c.writes.posted == 3, "written after it was revoked"
    c.open()
    assert await running == expected
    await c.legs.withdraw(c.p, push.key)
    await c.idle()


async def test_prompt_that_comes_after_its_grant_was_revoked(c: Pushing) -> None:
    """The prefill leg was slow: it finds no grant, and writes nothing."""
    prompt, key = c.prompt(), new_key()
    decode = c.decode(prompt, key)
    grants = c.p.agent._running_node.writes
    await until(lambda: len(grants) == 1 and c.d.core.load()["loading"] == 1)
    await left(decode)
    await until(lambda: len(grants) == 0)
    assert (await c.legs.prefill_push(c.p, c.d, prompt, key=key)).status == 200
    assert c.writes.posted == 0
    await c.s.cluster.settled(c.d)
    await c.legs.withdraw(c.p, key)
    await c.idle()


async def test_many_leave_at_once(c: Pushing) -> None:
    """Field cases 13 and 23: twenty pushes in all states, all clients leave; D's pool is whole again."""
    prompts = [c.prompt() for _ in range(20)]
    expected = await c.alone(prompts[0])
    c.writes.closed = True
    c.writes.let(5)
    pushes = [c.start(prompt) for prompt in prompts]
    await asyncio.gather(*(push.prefill for push in pushes))
    await until(lambda: c.writes.held > 0 and c.d.core.load()["waiting"] > 0)
    await left(*(push.decode for push in pushes))
    for push in pushes:
        await c.legs.withdraw(c.p, push.key)
    c.open()
    await c.idle()
    assert (await c.legs.push(c.p, c.d, prompts[0]))[1].token_ids == expected
    await c.idle()


async def ended(c: Pushing, push: Push, how: str) -> None:
    """D has no use for it any more."""
    if how == "client leaves":
        await left(push.decode)
        return
    abort_all(c.d)
    answer = await push.decode
    assert (answer.status, answer.error["code"]) == (503, "engine_aborted")
