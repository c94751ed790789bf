"""Engines killed under load, and started again at the same address (field cases 9, 13 and 17).

By hand, ten deaths of each:

    KVHANDOFF_VLLM=full pytest tests/vllm/test_deaths.py
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import pytest

from kvhandoff.core.reasons import Reason
from tests.vllm.engines import eventually
from tests.vllm.fleet import Fleet, fleet
from tests.vllm.marks import FULL, gqa
from tests.vllm.pair import Pair, Question

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLIENTS = 4
DEATHS = 10 if FULL else 1


@dataclass
class Load:
    """Clients that ask one question after the other until they are told to stop."""

    routed: Fleet
    questions: list[Question]
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    over: bool = False
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while clients ask. Not while an engine starts: on two cores it would take minutes."""

    async def client(self, number: int) -> None:
        asked = 0
        while not self.over:
            await self.open.wait()
            question = self.questions[(number + asked) % len(self.questions)]
            path = ("pull", "push")[(number + asked) % 2]
            # A salt of its own: nothing is found in a prefix cache, everything has to be moved.
            salt = f"client {number}, {asked}"
            asked += 1
            try:
                status, answer = await self.routed.post(
                    {
                        "prompt": question.prompt,
                        "max_tokens": question.max_tokens,
                        "temperature": 0,
                        "ignore_eos": True,
                        "return_token_ids": True,
                        "cache_salt": salt,
                    },
                    path=path,
                )
            except aiohttp.ClientError as error:
                raise AssertionError("the router left a client without an answer") from error
            self.statuses[status] += 1
            if status == 200 and answer["choices"][0]["token_ids"] != question.expected:
                self.wrong.append(f"{answer['id']}: {answer['choices'][0]['token_ids']}")
            elif status != 200:
                await self.routed.healthy()

    async def answered(self, more: int) -> None:
        """Wait for so many more right answers."""
        goal = self.statuses[200] + more

        async def reached() -> bool:
            return self.statuses[200] >= goal

        await eventually(reached, 60.0)


@gqa
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_killed_under_load(pair: Pair, role: str) -> None:
    """The survivor lives and holds nothing of the dead one; no answer is wrong; then KV moves again, and
    what the life before had offered is known to be gone."""
    pair.restarted = True
    victim, survivor = (pair.p, pair.d) if role == "prefill" else (pair.d, pair.p)
    questions = [await pair.question(tokens) for tokens in (40, 130, 250, 500, 700)]
    async with fleet(pair) as routed:
        for _ in range(DEATHS):
            before, other = await victim.identity(), await survivor.identity()
            load = Load(routed, questions)
            load.open.set()
            clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
            await load.answered(10)
            question = await pair.question(170)
            offered = await pair.prefill(question.prompt) if role == "prefill" else None
            await victim.kill()
            if role == "prefill":
                await load.answered(10)  # by the decode engine alone
            load.open.clear()
            await victim.start()
            await routed.healthy()
            load.open.set()
            await load.answered(10)
            load.over = True
            await asyncio.gather(*clients)
            if offered is not None:  # its maker's successor listens at the same address
                answer = await pair.decode(question.prompt, offered.offer)
                assert answer.token_ids == question.expected
                record = await pair.d.record(answer.key.handoff_id)
                assert (record.transferred_tokens, record.reasons) == (0, [Reason.EPOCH_CHANGED])

            assert load.wrong == []
            if role == "prefill":
                assert set(load.statuses) == {200}
            assert (await victim.identity()).epoch != before.epoch
            assert await survivor.identity() == other
            await pair.settled()
            for path in ("pull", "push"):
                question = await pair.question(200)
                completion = await routed.ask(question.prompt, question.max_tokens, path)
                assert completion["choices"][0]["token_ids"] == question.expected
                account = await routed.record(completion["id"])
                assert account["reused_tokens"]["transferred"] == 199, account["reasons"]
