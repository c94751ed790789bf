"""How a turn can end: at a length, a stop token or a stop string, by a client that leaves, by an error. All
that was computed is retained, unless it went wrong or had not begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvhandoff.core.ids import HandoffKey
from kvhandoff.embedded.api import SequenceStep
from tests.cluster import LiveEngine, until
from tests.e2e.stage import leave, leftovers
from tests.e2e.turns import BLOCK, Talk, Turn, full, talk
from tests.gates import StepGate
from tests.legs import MAX_TOKENS, Answered, history

PROMPT, ANSWER = 100, 60


def kept_tokens(engine: LiveEngine) -> int:
    """How many tokens are retained of the only turn."""
    (offer,) = engine.agent._running_node.offers._offers.values()
    assert offer.retention is not None
    return offer.chain.n_tokens


async def read_again(t: Talk, key: HandoffKey, transcript: list[int], kept: int) -> None:
    """The next turn reads `kept` tokens of it, and is answered right."""
    prompt = transcript + t.prompt(30)
    reply = await t.reply(prompt, history(t.d, key, t.p.core.max_model_len))
    assert reply.token_ids == await t.legs.alone(t.d, prompt)
    assert (reply.source.transferred_tokens, reply.source.reasons) == (kept, [])
    await t.legs.withdraw(t.d, key)
    await t.deployment.settled()


async def test_stop_string(tiny: Path) -> None:
    """The engine has computed a little beyond the stop string, which the client does not get: the next turn
    reads up to where the transcript ends."""
    async with talk(tiny) as t:
        prompt = t.prompt(PROMPT)
        whole = await t.legs.local(t.d, prompt, max_tokens=ANSWER, retain=None)
        text = whole.body["choices"][0]["text"]
        middle = range(len(text) // 2, len(text) - 4)
        stop = next(text[i : i + 4] for i in middle if text.find(text[i : i + 4]) == i)
        answer = await t.legs.local(t.d, prompt, max_tokens=ANSWER, stop=[stop])
        choice = answer.body["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert text.startswith(choice["text"] + stop)
        generated = len(answer.token_ids)
        assert 0 < generated < ANSWER
        await until(lambda: t.d.blocks().retained > 0)
        kept = kept_tokens(t.d)
        assert full(PROMPT + generated - 1) <= kept <= full(PROMPT + ANSWER - 1)
        record = await t.legs.record(t.d, answer.key)
        assert (record.retained_tokens, record.finish_reason) == (kept, "stop")
        transcript = prompt + answer.token_ids
        await read_again(t, answer.key, transcript, min(kept, full(len(transcript))))


async def test_stop_token(tiny: Path) -> None:
    """The stop token was sampled, and never computed."""
    async with talk(tiny) as t:
        prompt = t.prompt(PROMPT)
        whole = await t.legs.alone(t.d, prompt, ANSWER)
        stop = next(token for token in whole[BLOCK:] if token not in whole[:BLOCK])
        answer = await t.legs.local(t.d, prompt, max_tokens=ANSWER, stop_token_ids=[stop])
        assert answer.token_ids == whole[: whole.index(stop) + 1]
        kept = full(PROMPT + whole.index(stop))
        assert kept_tokens(t.d) == kept
        assert (await t.legs.record(t.d, answer.key)).retained_tokens == kept
        await read_again(t, answer.key, prompt + answer.token_ids, kept)


@pytest.mark.parametrize(("tokens", "kept"), [(15, 0), (16, 1), (17, 1), (PROMPT, PROMPT // BLOCK)])
async def test_answer_of_one_token(tiny: Path, tokens: int, kept: int) -> None:
    """What is computed then is the prompt; less than a block is nothing to retain."""
    async with talk(tiny) as t:
        answer = await t.legs.local(t.d, t.prompt(tokens), max_tokens=1)
        record = await t.legs.record(t.d, answer.key)
        assert t.d.blocks().retained == kept
        assert record.retained_tokens == kept * BLOCK
        await t.legs.withdraw(t.d, answer.key)
        await t.deployment.settled()


async def test_only_what_the_ticket_says(tiny: Path) -> None:
    """Without `retain` in the ticket, nothing is kept."""
    async with talk(tiny) as t:
        answer = await t.legs.local(t.d, t.prompt(PROMPT), retain=None)
        assert (await t.legs.record(t.d, answer.key)).retained_tokens == 0
        await t.deployment.settled()


# --------------------------------------------------------------------------------------- clients that leave


@asynccontextmanager
async def held_turn(tiny: Path, steps: int, **fields: Any) -> AsyncIterator[tuple[Talk, list[int], Any]]:
    """A turn that has made so many steps of its own, and stands before the next."""
    async with talk(tiny) as t:
        prompt = t.prompt(PROMPT)
        with StepGate(t.d) as gate:
            gate.close()
            leg = asyncio.create_task(t.legs.local(t.d, prompt, max_tokens=ANSWER, **fields))
            gate.let(steps)
            await until(lambda: gate.done == steps and gate.holds)
            yield t, prompt, leg


@pytest.mark.parametrize("steps", [1, 2, 30])
async def test_client_leaves_in_the_middle(tiny: Path, steps: int) -> None:
    """After the first token: what was computed until then is retained, for a client that comes back."""
    async with held_turn(tiny, steps) as (t, prompt, leg):
        (key,) = t.d.agent._legs
        await leave(leg)
        await until(lambda: t.d.agent._legs[key].is_finished)
        open_gate(t.d)
        await until(lambda: t.d.blocks().retained > 0)
        # The step that stood there was computed before the engine heard of the client.
        kept = full(PROMPT + steps)
        assert kept_tokens(t.d) == kept
        record = await t.legs.record(t.d, key)
        assert (record.retained_tokens, record.finish_reason) == (kept, "abort")
        transcript = prompt + await t.legs.alone(t.d, prompt, steps)
        await read_again(t, key, transcript, min(kept, full(len(transcript))))


async def test_client_leaves_before_the_first_token(tiny: Path) -> None:
    """A prompt of which a part is computed is no turn."""
    async with talk(tiny, max_step_tokens=2 * BLOCK) as t:
        with StepGate(t.d) as gate:
            gate.close()
            leg = asyncio.create_task(t.legs.local(t.d, t.prompt(PROMPT)))
            gate.let(1)
            await until(lambda: gate.done == 1 and gate.holds)
            (key,) = t.d.agent._legs
            await leave(leg)
            await until(lambda: t.d.agent._legs[key].is_finished)
            gate.open()
            await until(lambda: not leftovers(t.d))
            assert (await t.legs.record(t.d, key)).retained_tokens == 0
        await t.deployment.settled()


async def test_withdrawn_in_the_middle(tiny: Path) -> None:
    """Nobody wants the turn any more before it has ended: it ends, and nothing is retained."""
    async with held_turn(tiny, 5) as (t, _, leg):
        (key,) = t.d.agent._legs
        await t.legs.withdraw(t.d, key)
        open_gate(t.d)
        await until(lambda: not leftovers(t.d))
        assert (await leg).status != 200
        await t.deployment.settled()


def open_gate(engine: LiveEngine) -> None:
    """Let the engine go on."""
    gate = engine.runner.forward.__self__  # type: ignore[attr-defined]
    assert isinstance(gate, StepGate)
    gate.open()


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("fault", ["raises", "no numbers"])
@pytest.mark.parametrize("after", [0, 1, 20])
async def test_error_retains_nothing(tiny: Path, fault: str, after: int) -> None:
    """Whatever went wrong: what the request had computed is not trusted with another turn."""
    async with talk(tiny) as t:
        prompt = t.prompt(PROMPT)
        expected = await t.legs.alone(t.d, prompt)
        forward, steps = t.d.runner.forward, 0

        def broken(sequences: Sequence[SequenceStep]) -> list[Any]:
            nonlocal steps
            steps += 1
            if steps <= after:
                return forward(sequences)
            if fault == "raises":
                raise RuntimeError("a fault of the model")
            return [rows * float("nan") if rows is not None else None for rows in forward(sequences)]

        t.d.runner.forward = broken  # type: ignore[method-assign]
        answer: Answered = await t.legs.local(t.d, prompt, max_tokens=ANSWER)
        t.d.runner.forward = forward  # type: ignore[method-assign]
        assert answer.status == 500
        record = await t.legs.record(t.d, answer.key)
        assert (record.retained_tokens, record.finish_reason) == (0, "error")
        await t.deployment.settled()
        assert await t.legs.alone(t.d, prompt) == expected


async def test_turn_on_a_turn(tiny: Path) -> None:
    """A turn that was itself computed from a history is retained as any other."""
    async with talk(tiny) as t:
        turn = await t.turn(t.prompt(PROMPT), 20)
        prompt = turn.transcript + t.prompt(30)
        reply = await t.reply(prompt, turn.history, retain="renewable", max_tokens=MAX_TOKENS)
        second = Turn(t.d, reply.answered.key, prompt, reply.token_ids)
        assert reply.destination.retained_tokens == second.kept
        await t.legs.withdraw(t.d, turn.key)  # the second one holds all its blocks itself
        await t.legs.flood(t.d, t.rng)
        await read_again(t, second.key, second.transcript, second.kept)
