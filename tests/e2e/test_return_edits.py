"""Histories that clients edit, cut, strip and branch (field cases 2b and 56): what still matches is read,
what does not is computed, and too little is not worth asking for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import Claim
from tests.e2e.turns import BLOCK, MIN_RETURN, Forward, Talk, Turn, full, talk
from tests.legs import history
from tests.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT, ANSWER = 100, 60
NEW = 21


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def t(tiny: Path) -> AsyncIterator[Talk]:
    async with talk(tiny, num_blocks=160) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def turn(t: Talk) -> Turn:
    """A turn that all tests read, and that stays."""
    return await t.turn(t.prompt(PROMPT), ANSWER)


async def answered(
    t: Talk, turn: Turn, prompt: list[int], read: int, reasons: list[Reason], forward: Forward = "pull"
) -> None:
    """The right answer, with so many tokens of the history read, and why not more; the turn is retained as
    before."""
    held = t.d.blocks().retained
    reply = await t.reply(prompt, turn.history, forward)
    assert reply.token_ids == await t.legs.alone(t.d, prompt)
    assert (reply.source.transferred_tokens, reply.source.reasons) == (read, reasons)
    assert reply.source.bytes == -(-read // BLOCK) * t.p.region.block_bytes
    assert reply.source.computed_tokens == len(prompt) - read
    assert reply.destination.reasons == []
    await t.deployment.settled(t.p)
    assert t.d.blocks().retained == held
    assert t.d.blocks().offered == held


def changed_at(tokens: list[int], index: int) -> list[int]:
    """Another token there."""
    return [*tokens[:index], tokens[index] % 200 + 3, *tokens[index + 1 :]]


@pytest.mark.parametrize("forward", ["pull", "push"])
@pytest.mark.parametrize("index", [0, 15, 63, 64, 79, 80, 95, 99, 100, 143, 144, PROMPT + ANSWER - 1])
async def test_mismatch_at_a_token(t: Talk, turn: Turn, index: int, forward: Forward) -> None:
    """Field cases 2b and 56: reading stops at block floor(i / B)."""
    prompt = changed_at(turn.transcript, index) + t.prompt(NEW)
    assert prompt[index] != turn.transcript[index]
    matching = min(full(index), turn.kept)
    reasons = []
    if matching == 0:
        reasons = [Reason.CHAIN_MISMATCH]
    elif matching < MIN_RETURN:
        reasons = [Reason.RETURN_TOO_SHORT]
    await answered(t, turn, prompt, 0 if reasons else matching, reasons, forward)


EDITS: dict[str, tuple[Callable[[Turn], list[int]], int]] = {
    "oldest turn cut": (lambda turn: turn.transcript[40:], 0),
    "whole blocks of the oldest turn cut": (lambda turn: turn.transcript[2 * BLOCK :], 0),
    "first token dropped": (lambda turn: turn.transcript[1:], 0),
    "date put in front": (lambda turn: [7, 8, 9, *turn.transcript], 0),
    "thinking stripped": (lambda turn: turn.prompt + turn.answer[30:], full(PROMPT)),
    "answer dropped": (lambda turn: turn.prompt, full(PROMPT)),
    "answer edited": (lambda turn: changed_at(turn.transcript, PROMPT + 20), full(PROMPT + 20)),
    "answer cut": (lambda turn: turn.transcript[: PROMPT + 40], full(PROMPT + 40)),
    "prompt edited": (lambda turn: changed_at(turn.transcript, 70), 64),
    "parts in another order": (lambda turn: turn.answer + turn.prompt, 0),
    "unchanged": (lambda turn: turn.transcript, full(PROMPT + ANSWER - 1)),
}


@pytest.mark.parametrize("name", EDITS)
async def test_edited_history(t: Talk, turn: Turn, name: str) -> None:
    """Field case 2b."""
    edit, matching = EDITS[name]
    kept = edit(turn)
    prompt = kept + t.prompt(NEW)
    # New tokens take the place of what was cut; they match by no accident.
    same = [a == b for a, b in zip(prompt, turn.transcript, strict=False)]
    first = same.index(False) if False in same else len(same)
    assert min(full(first), turn.kept) == matching
    await answered(t, turn, prompt, matching, [] if matching else [Reason.CHAIN_MISMATCH])


@pytest.mark.parametrize("tokens", [6 * BLOCK, 6 * BLOCK + 1, PROMPT])
async def test_regenerated_answer(t: Talk, turn: Turn, tokens: int) -> None:
    """The same prompt again, or a shorter one: a branch. Its last token is computed, for its logits."""
    prompt = turn.prompt[:tokens]
    reply = await t.reply(prompt, turn.history)
    assert reply.token_ids == await t.legs.alone(t.d, prompt)
    assert reply.source.transferred_tokens == min(full(tokens), tokens - 1)
    assert reply.source.computed_tokens == max(tokens - full(tokens), 1)
    await t.deployment.settled(t.p)


async def test_branches_of_branches(t: Talk, turn: Turn) -> None:
    """Two answers to one turn, each continued: each has a history of its own, with a beginning in common."""
    branches = [await t.turn(turn.transcript + t.prompt(NEW), ANSWER) for _ in range(2)]
    for branch in branches:
        other = branches[1 - branches.index(branch)]
        prompt = branch.transcript + t.prompt(NEW)
        expected = await t.legs.alone(t.d, prompt)
        reply = await t.reply(prompt, branch.history)
        assert (reply.token_ids, reply.source.transferred_tokens) == (expected, branch.kept)
        reply = await t.reply(prompt, other.history)
        assert (reply.token_ids, reply.source.transferred_tokens) == (expected, full(len(turn.transcript)))
        await t.deployment.settled(t.p)
    for branch in branches:
        await t.legs.withdraw(t.d, branch.key)


@pytest.mark.parametrize(("hint", "asks"), [(MIN_RETURN - BLOCK, False), (8192, True)])
async def test_short_history(t: Talk, hint: int, asks: bool) -> None:
    """With less than `min_return_tokens` to gain nothing is read, whether the router knew or not."""
    short = await t.turn(t.prompt(40), 20)
    assert short.kept == MIN_RETURN - BLOCK
    wire = Wire(t.p)
    prompt = short.transcript + t.prompt(NEW)
    reply = await t.reply(prompt, history(t.d, short.key, hint))
    assert reply.token_ids == await t.legs.alone(t.d, prompt)
    assert (reply.source.transferred_tokens, reply.source.bytes) == (0, 0)
    assert reply.source.reasons == [Reason.RETURN_TOO_SHORT]
    assert any(claim.offer == short.key for claim in wire.sent_of(Claim)) == asks
    await t.deployment.settled(t.p)
    await t.legs.withdraw(t.d, short.key)


async def test_prefix_cache_comes_first(tiny: Path) -> None:
    """What the prefill engine has itself is not read; with too little beyond it, nothing is."""
    async with talk(tiny, num_blocks=32, prefill_options={"prefix_cache": True}) as t:
        turn = await t.turn(t.prompt(PROMPT), ANSWER)
        cases = [  # what the prefill engine computes before, and what is read then
            (3 * BLOCK, turn.kept - 3 * BLOCK, []),
            (turn.kept - MIN_RETURN, MIN_RETURN, []),
            (turn.kept - MIN_RETURN + BLOCK, 0, [Reason.RETURN_TOO_SHORT]),
            (turn.kept - BLOCK, 0, [Reason.RETURN_TOO_SHORT]),
            (turn.kept, 0, [Reason.ALREADY_CACHED]),
            (turn.kept + BLOCK, 0, [Reason.ALREADY_CACHED]),
        ]
        for cached, read, reasons in cases:
            await t.legs.flood(t.p, t.rng)  # out of its prefix cache
            prompt = turn.transcript + t.prompt(3 * BLOCK)
            await t.deployment.tokens(prompt[: cached + 1], 1, url=t.p.url)
            reply = await t.reply(prompt, turn.history)
            assert reply.token_ids == await t.legs.alone(t.d, prompt)
            source = reply.source
            assert (source.cached_tokens, source.transferred_tokens, source.reasons) == (
                cached,
                read,
                reasons,
            )
            assert source.bytes == read // BLOCK * t.p.region.block_bytes
        await t.forget(turn)


async def test_history_read_is_cached(tiny: Path) -> None:
    """What was read serves the next turn from the prefill engine's own cache."""
    async with talk(tiny, prefill_options={"prefix_cache": True}) as t:
        turn = await t.turn(t.prompt(PROMPT), ANSWER)
        for cached, read in ((0, turn.kept), (full(PROMPT + ANSWER), 0)):
            prompt = turn.transcript + t.prompt(NEW)
            reply = await t.reply(prompt, turn.history)
            assert reply.token_ids == await t.legs.alone(t.d, prompt)
            assert reply.source.transferred_tokens == read
            assert reply.source.cached_tokens == cached
        assert reply.source.reasons == [Reason.ALREADY_CACHED]
        await t.forget(turn)
