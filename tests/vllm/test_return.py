"""Return: the prefill engine reads what the decode engine kept of a conversation's last turn."""

from __future__ import annotations

import pytest

from kvhandoff.core.reasons import Reason
from tests.vllm.engines import BLOCK
from tests.vllm.marks import both, gqa
from tests.vllm.pair import Answered, Pair, Question, greedy

pytestmark = pytest.mark.asyncio(loop_scope="session")

ways = pytest.mark.parametrize("way", ["pull", "push"])


async def size(pair: Pair) -> int:
    """Tokens of a block, which vLLM may have chosen itself."""
    return (await pair.d.state()).block_size


async def reply(pair: Pair, way: str, turn: Answered, question: Question) -> Answered:
    """The next turn: history from the decode engine, the new KV back to it."""
    history = await pair.history(turn)
    forward = pair.pull if way == "pull" else pair.push
    answer = await forward(question.prompt, history=history)
    assert answer.token_ids == question.expected
    return answer


@both
@ways
@pytest.mark.parametrize("first", ["local", "pull", "push"])
async def test_second_turn(pair: Pair, way: str, first: str) -> None:
    """Return and forward in one turn: only what is new is computed, and only that moves forward."""
    opening = await pair.question(150, 100)
    if first == "local":
        turn = await pair.local(opening.prompt, 100)
    else:
        turn = await (pair.pull if first == "pull" else pair.push)(opening.prompt, 100, retain="renewable")
    assert turn.token_ids == opening.expected
    block = await size(pair)
    kept = (250 - 1) // block * block  # the answer's last token was sampled, and never computed
    assert (await pair.d.record(turn.key.handoff_id)).retained_tokens == kept

    question = await pair.question(300, begins=opening.transcript)
    answer = await reply(pair, way, turn, question)
    p, d = await pair.records(answer.key)
    cached = p.cached_tokens  # of the first turn's prompt, where this engine computed it
    assert (cached > 0) == (first != "local" and pair.prefix_cache)
    assert (p.transferred_tokens, p.computed_tokens) == (kept - cached, 300 - kept)
    held = kept if pair.prefix_cache else 0
    assert (d.cached_tokens, d.transferred_tokens) == (held, 299 - held)
    await pair.withdraw(pair.d, turn.key)


EDITS = {"first block": 5, "inside the fourth block": 101, "the answer": 160, "last token": 189}


@both
@pytest.mark.parametrize("where", EDITS.values(), ids=EDITS.keys())
async def test_edited_history(pair: Pair, where: int) -> None:
    """Field case 2b: what still matches is used in whole blocks; not one token after the edit."""
    opening = await pair.question(150, 40)
    turn = await pair.local(opening.prompt, 40)
    edited = list(opening.transcript)
    edited[where] = 3 + (edited[where] + 1) % 240
    question = await pair.question(250, begins=edited)
    answer = await reply(pair, "pull", turn, question)
    p, _ = await pair.records(answer.key)
    block = await size(pair)
    matching = min(where, 189) // block * block
    worth_it = matching >= 64  # with less to gain, computing is as cheap as asking
    assert p.transferred_tokens == (matching if worth_it else 0)
    assert p.computed_tokens == 250 - p.transferred_tokens
    await pair.withdraw(pair.d, turn.key)


@gqa
async def test_history_read_by_many(pair: Pair) -> None:
    """A branched conversation: each branch gets what they share, also one after the other."""
    opening = await pair.question(150, 40)
    turn = await pair.local(opening.prompt, 40)
    for way in ("pull", "push", "pull"):
        question = await pair.question(250, begins=opening.transcript)
        answer = await reply(pair, way, turn, question)
        p, _ = await pair.records(answer.key)
        assert p.cached_tokens + p.transferred_tokens == 189 // BLOCK * BLOCK
    await pair.withdraw(pair.d, turn.key)


@gqa
async def test_turn_that_a_stop_string_ended(pair: Pair) -> None:
    """It ends as an abort inside vLLM; the turn is retained all the same, as far as it was computed."""
    opening = await pair.question(150, 40)
    text = (await pair.post(pair.d, greedy(opening.prompt, 40, cache_salt="alone, stop"))).choices[0]["text"]
    stop = next(letter for letter in text[len(text) // 2 :] if letter.isascii() and letter.isprintable())
    turn = await pair.local(opening.prompt, 40, stop=[stop])
    assert turn.choices[0]["finish_reason"] == "stop"
    kept = (await pair.d.record(turn.key.handoff_id)).retained_tokens
    assert kept >= 150 // BLOCK * BLOCK
    begins = opening.transcript[: 150 + len(turn.token_ids) - 1]
    question = await pair.question(250, begins=begins)
    answer = await reply(pair, "pull", turn, question)
    p, _ = await pair.records(answer.key)
    assert p.transferred_tokens >= 150 // BLOCK * BLOCK
    await pair.withdraw(pair.d, turn.key)


@gqa
async def test_withdrawn_history(pair: Pair) -> None:
    """What was kept is gone; the next turn computes it."""
    opening = await pair.question(150, 40)
    turn = await pair.local(opening.prompt, 40)
    history = await pair.history(turn)
    await pair.withdraw(pair.d, turn.key)
    question = await pair.question(250, begins=opening.transcript)
    answer = await pair.pull(question.prompt, history=history)
    assert answer.token_ids == question.expected
    p, _ = await pair.records(answer.key)
    assert (p.transferred_tokens, p.computed_tokens) == (0, 250)
    assert p.reasons == [Reason.OFFER_WITHDRAWN]


@gqa
async def test_kept_turns_give_way(pair: Pair) -> None:
    """Memory that is kept for later is no reason to make a request of now wait, or to fail."""
    turns: list[Answered] = []
    total = (await pair.d.blocks()).total
    while len(turns) * (400 // BLOCK) < 1.5 * total:
        opening = await pair.question(400)
        turn = await pair.local(opening.prompt)
        assert turn.token_ids == opening.expected
        turns.append(turn)
    records = [await pair.d.record(turn.key.handoff_id) for turn in turns]
    assert all(record.retained_tokens == 407 // BLOCK * BLOCK for record in records)
    assert (await pair.d.blocks()).retained < total
    for turn in turns:
        await pair.withdraw(pair.d, turn.key)
    assert (await pair.d.blocks()).retained == 0
