"""Conversations of ten turns (field case 55): what moves in a turn follows what is new to whoever gets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.turns import BLOCK, MIN_RETURN, Forward, Talk, Turn, blocks_of, full, talk
from tests.legs import Answered, new_key

ANSWERS = [24, 70, 24]
"""Tokens of one turn's answer after the other's. Only the long ones are worth a read by themselves."""


def as_turn(t: Talk, answered: Answered, prompt: list[int]) -> Turn:
    """What a decode leg that retains has left."""
    return Turn(t.d, answered.key, prompt, answered.token_ids)


@pytest.mark.parametrize(
    ("forward", "p_cache", "d_cache", "turns"),
    [
        pytest.param("pull", True, True, 4, id="pull"),
        pytest.param("push", False, True, 4, id="push, P forgets"),
        pytest.param("push", True, True, 10, id="push"),
        pytest.param("pull", True, False, 4, id="pull, D forgets"),
        pytest.param("push", False, False, 4, id="push, both forget"),
    ],
)
async def test_bytes_of_turns(tiny: Path, forward: Forward, p_cache: bool, d_cache: bool, turns: int) -> None:
    """Field case 55: forward moves what D's cache lacks, back moves what P's cache lacks, whatever either
    has; the answers are one engine's."""
    async with talk(
        tiny, prefill_options={"prefix_cache": p_cache}, decode_options={"prefix_cache": d_cache}
    ) as t:
        size = t.d.region.block_bytes
        turn, at_p, moved = Turn(t.d, new_key(), [], []), 0, 0
        for number in range(turns):
            prompt = turn.transcript + t.prompt(20 + 3 * number)
            answer = ANSWERS[number % 3]
            expected = await t.legs.alone(t.d, prompt, answer)
            read = turn.history if number else None
            reply = await t.reply(prompt, read, forward, max_tokens=answer, retain="renewable")
            assert reply.token_ids == expected

            source, destination = reply.source, reply.destination
            lacks = turn.kept - at_p if number else 0
            back = lacks if lacks >= MIN_RETURN else 0
            assert (source.cached_tokens, source.transferred_tokens) == (at_p, back)
            assert source.bytes == back // BLOCK * size
            hit = turn.kept if d_cache and number else 0
            assert destination.cached_tokens == hit
            assert destination.bytes == (blocks_of(len(prompt)) - hit // BLOCK) * size
            moved += destination.bytes

            if number:
                await t.legs.withdraw(t.d, turn.key)
            turn = as_turn(t, reply.answered, prompt)
            at_p = full(len(prompt)) if p_cache else 0
        if d_cache:
            # All in all each block moved once, but for those with an end in them, which moved twice.
            assert moved <= (blocks_of(len(turn.transcript)) + turns) * size
        await t.forget(turn)


async def test_without_return(tiny: Path) -> None:
    """Field case 55: also a prefill engine that computes the history itself sends the new blocks only."""
    async with talk(tiny) as t:
        size, transcript, kept = t.d.region.block_bytes, [], 0
        for _ in range(4):
            prompt = transcript + t.prompt(50)
            reply = await t.reply(prompt, None, max_tokens=30)
            assert reply.token_ids == await t.legs.alone(t.d, prompt, 30)
            assert reply.source.computed_tokens == len(prompt)
            assert reply.destination.bytes == (blocks_of(len(prompt)) - kept // BLOCK) * size
            transcript = prompt + reply.token_ids
            kept = full(len(transcript) - 1)
        await t.deployment.settled()


async def test_hits_that_differ(tiny: Path) -> None:
    """Field case 55: D has lost its part of the history while P has it, and the other way round."""
    async with talk(tiny, prefill_options={"prefix_cache": True}, num_blocks=64) as t:
        turn = await t.turn(t.prompt(120), 30)
        prompt = turn.transcript + t.prompt(40)
        expected = await t.legs.alone(t.p, prompt)

        reply = await t.reply(prompt, turn.history)
        assert reply.token_ids == expected
        assert reply.source.transferred_tokens == reply.destination.cached_tokens == turn.kept

        await t.forget(turn)
        await t.legs.flood(t.d, t.rng)
        reply = await t.reply(prompt, turn.history)
        assert reply.token_ids == expected
        assert reply.source.cached_tokens == full(len(prompt) - 1)
        assert reply.destination.cached_tokens == 0

        await t.legs.flood(t.p, t.rng)
        reply = await t.reply(prompt, turn.history)
        assert reply.token_ids == expected
        assert (reply.source.cached_tokens, reply.source.transferred_tokens) == (0, 0)
        assert reply.destination.cached_tokens == full(len(prompt) - 1)
        await t.deployment.settled()
