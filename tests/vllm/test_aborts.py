"""Clients that leave, in each state: the engines go on, and every block comes back (field cases 18b, 23, 29).

An engine whose core meets a report that it doesn't expect ends itself: the `pair` fixture sees that no engine
has started anew, and that both hold nothing afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import EngineState
from tests.vllm.engines import DEADLINE, VllmEngine, eventually
from tests.vllm.marks import both, gqa
from tests.vllm.pair import Pair, new_key

pytestmark = pytest.mark.asyncio(loop_scope="session")

SLOWLY: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}
"""Of a prefill leg: its prompt's blocks are complete, and it goes on for a second before it offers them."""
ENDLESSLY: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}
"""Of a prefill leg that will not come to its end: its client has several seconds to leave."""


async def seen(pair: Pair, engine: VllmEngine, condition: Callable[[EngineState], bool]) -> None:
    """Wait until an engine's state says so."""

    async def holds() -> bool:
        return condition(await engine.state())

    await eventually(holds, DEADLINE, pair.where)


@asynccontextmanager
async def leaving(request: Awaitable[Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """A client that closes its connection at the end of the block."""
    task = asyncio.ensure_future(request)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def right_again(pair: Pair) -> None:
    """Both ways work as before."""
    for forward in (pair.pull, pair.push):
        question = await pair.question(150)
        answer = await forward(question.prompt)
        assert answer.token_ids == question.expected
        assert (await pair.d.record(answer.key.handoff_id)).transferred_tokens == 149


@both
async def test_leaves_while_a_grant_waits(pair: Pair) -> None:
    """The decode engine has named blocks to a writer that has not begun."""
    key = new_key()
    async with leaving(pair.decode_push(pair.tokens(200), key=key)):
        await seen(pair, pair.d, lambda state: state.blocks.granted > 0)
    await seen(pair, pair.d, lambda state: state.blocks.granted == state.loading == 0)
    await pair.settled()
    await right_again(pair)


@gqa
async def test_leaves_while_its_prompt_is_written(pair: Pair) -> None:
    """Both legs run, and the destination's client goes away."""
    for _ in range(3):
        key, prompt = new_key(), pair.tokens(400)
        async with leaving(pair.decode_push(prompt, key=key)):
            await seen(pair, pair.d, lambda state: state.blocks.granted > 0)
            source = asyncio.ensure_future(pair.prefill(prompt, key=key, push=True, **SLOWLY))
            # Or has it been faster than anybody looked?
            await seen(pair, pair.p, lambda state: state.running > 0 or source.done())  # noqa: B023
        assert (await source).status == 200
        await seen(pair, pair.d, lambda state: state.blocks.granted == 0)
    await right_again(pair)


@both
async def test_leaves_while_it_reads(pair: Pair) -> None:
    """The source does not answer the claim: its processes stand still."""
    question = await pair.question(200)
    prefilled = await pair.prefill(question.prompt)
    pair.p.freeze()
    try:
        async with leaving(pair.decode(question.prompt, prefilled.offer)):
            await seen(pair, pair.d, lambda state: state.blocks.loading > 0)
        await seen(pair, pair.d, lambda state: state.loading == state.running == state.waiting == 0)
        other = await pair.question(100)  # the engine core has met nothing that it didn't expect
        assert (await pair.local(other.prompt, retain=None)).token_ids == other.expected
    finally:
        pair.p.thaw()
    await right_again(pair)


@gqa
async def test_source_stands_still(pair: Pair) -> None:
    """Nobody leaves; the request is computed when its source has been silent for long enough."""
    question = await pair.question(200)
    prefilled = await pair.prefill(question.prompt)
    pair.p.freeze()
    try:
        answer = await pair.decode(question.prompt, prefilled.offer)
    finally:
        pair.p.thaw()
    assert answer.token_ids == question.expected
    record = await pair.d.record(answer.key.handoff_id)
    assert (record.transferred_tokens, len(record.reasons)) == (0, 1)
    await right_again(pair)


@gqa
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
async def test_leaves_while_the_prompt_is_computed(pair: Pair, push: bool) -> None:
    """Field case 7: a prefill leg that ends early offers nothing, and its destination computes."""
    for _ in range(3):
        question = await pair.question(400)
        key = new_key()
        if push:
            waits = asyncio.ensure_future(pair.decode_push(question.prompt, key=key))
            await seen(pair, pair.d, lambda state: state.blocks.granted > 0)
        async with leaving(pair.prefill(question.prompt, key=key, push=push, **ENDLESSLY)):
            await seen(pair, pair.p, lambda state: state.running > 0)
        if push:
            assert (await waits).token_ids == question.expected
            record = await pair.d.record(key.handoff_id)
            assert (record.transferred_tokens, record.reasons) == (0, [Reason.OFFER_ABANDONED])
        await seen(pair, pair.p, lambda state: state.running == state.blocks.offered == 0)
    await right_again(pair)


@gqa
async def test_leave_all_at_once(pair: Pair) -> None:
    """More than the engines run at a time, each at another point of its way."""
    prompts = [pair.tokens(tokens) for tokens in (40, 900, 300, 200, 700, 33, 600, 150, 500, 250, 800, 64)]
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(leaving((pair.push if index % 2 else pair.pull)(prompt)))
            for index, prompt in enumerate(prompts)
        ]

        def in_the_middle(state: EngineState) -> bool:
            """Or past it: all may have been answered before anybody looked."""
            busy = state.running + state.waiting + state.loading
            return busy > 2 or all(client.done() for client in clients)

        await seen(pair, pair.d, in_the_middle)
    await pair.settled()
    await right_again(pair)
