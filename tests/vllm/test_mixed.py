"""Mixed requests and conversations, eight at a time: all paths, return, edited histories.

By hand, 200 requests and 20 conversations of five turns, with each model:

    KVHANDOFF_VLLM=full pytest tests/vllm/test_mixed.py
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable

import pytest

from tests.e2e.workload import CONCURRENCY, Sizes, Turn, conversations, singles
from tests.vllm.fleet import fleet
from tests.vllm.marks import FULL, every
from tests.vllm.pair import Pair

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL = Sizes(requests=24, conversations=3, turns=3, longest_request=700, new_tokens=(80, 130))
LARGE = Sizes(requests=200, conversations=20, turns=5, longest_request=900, new_tokens=(80, 130))
PATHS = ("pull", "push", "local", "auto")


@every
async def test_mixed(pair: Pair) -> None:
    sizes = LARGE if FULL else SMALL
    rng = random.Random("mixed")
    gate = asyncio.Semaphore(CONCURRENCY)
    wrong: list[str] = []
    ids: list[str] = []

    async def ask_alone(prompt: Iterable[int], max_tokens: int) -> list[int]:
        question, _ = await pair.alone(list(prompt), max_tokens)
        return question.expected

    async def expect(turn: Turn) -> None:
        async with gate:
            turn.expected = await ask_alone(turn.prompt, turn.max_tokens)

    requests = singles(sizes, rng)
    await asyncio.gather(*(expect(request) for request in requests))
    talks = await conversations(sizes, rng, ask_alone)

    async with fleet(pair) as routed:

        async def serve(turns: Iterable[Turn]) -> None:
            async with gate:
                for number, turn in enumerate(turns):
                    named = {} if turn.conversation is None else {"conversation_id": turn.conversation}
                    # Where the decode engine answers alone, the next turn's prefill engine has all to read.
                    path = "local" if number == 0 and named else rng.choice(PATHS)
                    answer = await routed.ask(turn.prompt, turn.max_tokens, path, **named)
                    got = answer["choices"][0]["token_ids"]
                    ids.append(answer["id"])
                    if got != turn.expected:
                        where = f"{turn.conversation} ({turn.edit}), {len(turn.prompt)} tokens, {path}"
                        wrong.append(f"{where}, {answer['id']}: {got} instead of {turn.expected}")

        clients = [[request] for request in requests] + talks
        rng.shuffle(clients)
        await asyncio.gather(*(serve(client) for client in clients))

        assert wrong == []
        records = [await routed.record(completion) for completion in ids]
        ran = Counter(record["path"] for record in records)
        assert min(ran[path] for path in ("pull", "push", "local")) >= len(ids) // 20, ran
        assert sum(record["reused_tokens"]["transferred"] for record in records) > 0
        assert sum(record["reused_tokens"]["returned"] for record in records) > 0
        failures = Counter(reason for record in records for reason in record["reasons"])
        print(f"{len(ids)} requests, {dict(ran)}, reasons {dict(failures)}")  # noqa: T201
