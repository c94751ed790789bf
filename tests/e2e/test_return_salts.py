"""Another tenant's conversation never comes back (rule 6; field cases 61 and 62): the same history under
another salt gives nothing, under the same one all. Each test has both halves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvhandoff.core.reasons import Reason
from tests.e2e.turns import BLOCK, Forward, Talk, forwards, talk

pytestmark = pytest.mark.asyncio(loop_scope="module")

SALTS = ["", "A", "a", "A ", "AB", "ä"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def t(tiny: Path) -> AsyncIterator[Talk]:
    async with talk(tiny, prefill_options={"prefix_cache": True}) as made:
        yield made


@forwards
@pytest.mark.parametrize("owner", ["", "A"])
async def test_history_of_another_salt(t: Talk, owner: str, forward: Forward) -> None:
    """Field cases 61 and 62: who knows the conversation's key and every token of it still gets nothing, from
    the retained turn or from a cache; the text is the same for all."""
    turn = await t.turn(t.prompt(120), 20, salt=owner)
    prompt = turn.transcript + t.prompt(30)
    expected = await t.legs.alone(t.d, prompt)
    size = t.d.region.block_bytes
    for salt in [*(salt for salt in SALTS if salt != owner), owner]:
        same = salt == owner
        reply = await t.reply(prompt, turn.history, forward, salt=salt)
        assert reply.token_ids == expected
        source, destination = reply.source, reply.destination
        assert source.cached_tokens == 0
        assert source.transferred_tokens == (turn.kept if same else 0)
        assert source.reasons == ([] if same else [Reason.CHAIN_MISMATCH])
        assert source.bytes == (turn.kept // BLOCK * size if same else 0)
        assert destination.cached_tokens == (turn.kept if same else 0)
        await t.deployment.settled(t.p)
        assert t.d.blocks().retained == turn.kept // BLOCK, "a stranger's claim does not end it"
    await t.forget(turn)


async def test_two_tenants_with_the_same_conversation(t: Talk) -> None:
    """Each has its own turn retained, with the same tokens; each is read by its owner only."""
    prompt = t.prompt(120)
    turns = {salt: await t.turn(prompt, 20, salt=salt) for salt in ("one", "two")}
    assert t.d.blocks().retained == 2 * turns["one"].kept // BLOCK
    following = turns["one"].transcript + t.prompt(30)
    expected = await t.legs.alone(t.d, following)
    for salt, other in (("one", "two"), ("two", "one")):
        reply = await t.reply(following, turns[other].history, salt=salt)
        assert reply.token_ids == expected
        assert (reply.source.transferred_tokens, reply.source.reasons) == (0, [Reason.CHAIN_MISMATCH])
    for salt in turns:
        await t.legs.flood(t.p, t.rng)  # out of the prefill engine's cache
        reply = await t.reply(following, turns[salt].history, salt=salt)
        assert reply.token_ids == expected
        assert (reply.source.transferred_tokens, reply.source.reasons) == (turns[salt].kept, [])
    await t.forget(*turns.values())


async def test_local_turn_of_another_salt(tiny: Path) -> None:
    """The same for a decode engine that reads another one's history."""
    async with talk(tiny, decode=2) as t:
        here, there = t.deployment.decode
        turn = await t.turn(t.prompt(120), 20, engine=there, salt="A")
        prompt = turn.transcript + t.prompt(30)
        for salt, read in (("B", 0), ("", 0), ("A", turn.kept)):
            answer = await t.legs.local(here, prompt, salt=salt, history=turn.history, retain=None)
            assert answer.token_ids == await t.legs.alone(there, prompt)
            record = await t.legs.record(here, answer.key)
            assert record.transferred_tokens == read
            assert record.reasons == ([] if read else [Reason.CHAIN_MISMATCH])
        await t.forget(turn)
