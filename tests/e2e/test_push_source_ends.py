"""Pushes that end at P, in each state (field cases 7, 13, 14, 29, 30, 52): its client leaves, the engine ends
or preempts the request by itself, or the router withdraws it.

D never answers from half-filled memory: it computes the prompt, or says which reason kept it from an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.tickets import MissPolicy
from tests.cluster import until
from tests.e2e.pushes import Push, Pushing, abort_all, left, policies, pushing, transports
from tests.e2e.stage import BLOCK, CHUNK, news
from tests.e2e.test_overload import submitted
from tests.legs import MAX_TOKENS, counted

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 10
"""Of a push's prompt."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm", "nixl"])
async def engines(tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pushing]:
    async with pushing(tiny, request.param) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def c(engines: Pushing) -> AsyncIterator[Pushing]:
    engines.reset()
    yield engines
    engines.open()


# ---------------------------------------------------------------------------------------------- the states


async def queued(c: Pushing, prompt: list[int], on_miss: MissPolicy) -> Push:
    """P is busy with another request and has not taken it up."""
    c.steps.close()
    asyncio.create_task(c.s.cluster.tokens(c.prompt(CHUNK), 1, url=c.p.url))  # noqa: RUF006  ends by itself
    await until(lambda: c.steps.holds)
    push = c.start(prompt, on_miss=on_miss)
    await c.named()
    await until(lambda: news(c.p) == 1)
    return push


async def after_chunk_2_of_5(c: Pushing, prompt: list[int], on_miss: MissPolicy) -> Push:
    push = await c.computed(prompt, 2, on_miss=on_miss)
    await until(lambda: c.writes.ended == 2)
    return push


async def during_a_write(c: Pushing, prompt: list[int], on_miss: MissPolicy) -> Push:
    return await c.half_written(prompt, on_miss=on_miss)


STATES = [queued, after_chunk_2_of_5, during_a_write]
State = Callable[[Pushing, list[int], MissPolicy], Awaitable[Push]]

# ------------------------------------------------------------------------------------------------ the ends


async def client_leaves(c: Pushing, push: Push) -> None:
    heard = news(c.p)
    await left(push.prefill)
    await until(lambda: news(c.p) > heard)


async def engine_ends_it(c: Pushing, push: Push) -> None:
    abort_all(c.p)


async def withdrawn(c: Pushing, push: Push) -> None:
    await c.legs.withdraw(c.p, push.key)


ENDS = {
    client_leaves: Reason.OFFER_ABANDONED,
    engine_ends_it: Reason.OFFER_ABANDONED,
    withdrawn: Reason.OFFER_WITHDRAWN,
}
End = Callable[[Pushing, Push], Awaitable[None]]


@policies
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_source_ends(c: Pushing, state: State, end: End, on_miss: MissPolicy) -> None:
    """Field cases 7, 14 and 30: D hears of it, as soon as nothing is in flight, and not before."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    before = await c.legs.reasons(c.d)
    push = await state(c, prompt, on_miss)
    computed = c.steps.tokens
    await end(c, push)
    if c.writes.held:
        c.steps.open()
        await until(lambda: not c.p.core.live())  # P's engine has forgotten it
        assert not push.decode.done()
        assert c.d.blocks().granted == BLOCKS
    c.open()
    answer = await push.decode
    reason = ENDS[end]
    if on_miss == "recompute":
        assert answer.token_ids == expected
        assert (await c.record(push)).kv_source == "recomputed"
    else:
        assert (answer.status, answer.error["code"]) == (503, reason)
    assert (await c.record(push)).reasons == [reason]
    assert await c.legs.reasons(c.d) - before == counted(reason)
    await c.idle()
    assert c.steps.tokens <= computed + CHUNK, "P went on with it"
    assert c.writes.posted <= computed // CHUNK + 1, "it was still written"
    if not push.prefill.cancelled():
        assert (await push.prefill).error["code"] == "engine_aborted"


async def test_client_leaves_when_all_is_computed(c: Pushing) -> None:
    """P's leg has its answer; the write goes on without it, and D gets what it waits for."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    c.writes.closed = True
    push = c.start(prompt)
    assert (await push.prefill).status == 200
    await until(lambda: c.writes.held > 0)
    c.open()
    assert (await push.decode).token_ids == expected
    assert (await c.record(push)).kv_source == "transferred"
    await c.idle()


async def test_withdrawn_in_the_last_write(c: Pushing) -> None:
    """The router gives up an offer that is being written: P's blocks stay until the bytes are out of them,
    and D computes the prompt."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    c.writes.closed = True
    push = c.start(prompt)
    await push.prefill
    await until(lambda: c.writes.held > 0)
    await c.legs.withdraw(c.p, push.key)
    assert c.p.blocks().offered == BLOCKS
    await c.legs.flood(c.p, c.rng)
    assert not push.decode.done()
    c.open()
    assert (await push.decode).token_ids == expected
    assert (await c.record(push)).reasons == [Reason.OFFER_WITHDRAWN]
    await c.idle()


async def test_source_that_refuses_the_prompt(tiny: Path) -> None:
    """Field case 7: longer than P takes, not than D does. The router has P's 400 and ends D's leg, whose
    blocks nobody was to write to."""
    async with pushing(tiny, prefill_options={"num_blocks": 8}) as c:
        push = c.start(c.prompt(8 * BLOCK))
        assert (await push.prefill).error["code"] == "context_length_exceeded"
        await until(lambda: c.d.core.load()["loading"] == 1)
        await left(push.decode)
        await c.idle()
        assert c.writes.posted == 0


@transports
@pytest.mark.parametrize("in_flight", [False, True], ids=["between writes", "during a write"])
async def test_source_preempts_it(tiny: Path, transport: str, in_flight: bool) -> None:
    """Field case 52: P's pool is short in the middle of the prompt. The offer is given up, the writes are
    fenced, D computes the prompt; P computes it too, for nobody."""
    length, new = 60 * BLOCK, 4 * BLOCK
    options = {"num_blocks": 65}  # the older one has 4 blocks of 6 when the other comes, and one is spare
    async with pushing(tiny, transport, prefill_options=options, max_step_tokens=BLOCK) as c:
        prompt, older = c.prompt(length), c.prompt(2 * BLOCK)
        expected = await c.legs.alone(c.d, prompt)
        expected_older = await c.legs.alone(c.d, older, new)
        requests = submitted(c.p)
        c.steps.close()
        running = c.s.request(older, new, url=c.p.url)
        c.steps.let(20)
        await until(lambda: c.steps.done == 20 and c.steps.holds)
        push = c.start(prompt)
        await c.writable()
        c.steps.let(4)
        await until(lambda: c.writes.ended >= 2 and c.steps.holds)
        c.writes.closed = in_flight
        c.steps.open()
        if in_flight:
            await until(lambda: any(request.stats.preemptions for request in requests), describe=c.s.where)
            assert c.writes.held > 0
            assert not push.decode.done()
            c.writes.closed = False
        assert (await push.decode).token_ids == expected
        assert (await c.record(push)).reasons == [Reason.OFFER_ABANDONED]
        assert await running == expected_older
        assert (await push.prefill).status == 200
        assert [request.stats.preemptions for request in requests] == [0, 1]
        await c.idle()


async def test_one_of_many_ends(c: Pushing) -> None:
    """Field case 13: P ends every other request; those are computed, the others get their KV."""
    prompts = [c.prompt() for _ in range(10)]
    expected = [await c.alone(prompt) for prompt in prompts]
    c.steps.close()
    pushes = [c.start(prompt) for prompt in prompts]
    await c.named(10)
    await left(*(push.prefill for push in pushes[::2]))
    c.open()
    answers = await asyncio.gather(*(push.decode for push in pushes))
    assert [answer.token_ids for answer in answers] == expected
    sources = [(await c.record(push)).kv_source for push in pushes]
    assert sources[1::2] == ["transferred"] * 5
    assert sources[::2] == ["recomputed"] * 5
    await c.idle()
    assert (await c.legs.push(c.p, c.d, prompts[0], max_tokens=MAX_TOKENS))[1].token_ids == expected[0]
    await c.idle()
