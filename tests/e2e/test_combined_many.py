"""Conversations side by side on two prefill and two decode engines, each turn at other engines than the one
before: everybody reads from, writes to and pulls from everybody.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.turns import Forward, Turn, talk


async def test_many_conversations_at_once(tiny: Path) -> None:
    """Eight conversations of three turns, by pull, by push and alone; some are edited."""
    async with talk(tiny, transport="nixl", prefill=2, decode=2, num_blocks=64) as t:
        prompts: dict[int, list[int]] = {n: t.prompt(80 + 7 * n) for n in range(8)}
        kept: list[Turn] = []

        async def conversation(number: int) -> int:
            """How many tokens came back."""
            transcript, turn, back = prompts[number], None, 0
            for which in range(3):
                prompt = transcript + prompts[(number + which) % 8][:40]
                if which == 2 and number % 3 == 0:
                    prompt[90] = 5
                p = t.deployment.prefill[(number + which) % 2]
                d = t.deployment.decode[(number // 2 + which) % 2]
                read = turn.history if turn else None
                if number % 4 == 3:
                    answered = await t.legs.local(d, prompt, max_tokens=20, history=read)
                    record = await t.legs.record(d, answered.key)
                else:
                    forward: Forward = "push" if number % 2 else "pull"
                    reply = await t.reply(prompt, read, forward, p=p, d=d, max_tokens=20, retain="renewable")
                    answered, record = reply.answered, reply.source
                transcript = prompt + answered.token_ids
                turn = Turn(d, answered.key, prompt, answered.token_ids)
                kept.append(turn)
                back += record.transferred_tokens
            return back

        back = await asyncio.gather(*map(conversation, range(8)))
        assert sum(back) > 0
        for turn in kept:
            assert turn.answer == await t.legs.alone(t.deployment.prefill[0], turn.prompt, 20)
        for turn in kept:
            await t.legs.withdraw(turn.engine, turn.key)
        await t.deployment.settled()
