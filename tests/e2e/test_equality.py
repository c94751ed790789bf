"""Two hundred mixed requests: what comes through pull equals what the same engine says alone.

By hand with the default model, in exact mode (about a quarter of an hour on two cores):

    KVHANDOFF_EQUALITY_MODEL=smollm2 pytest tests/e2e/test_equality.py
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any, Literal

import pytest

from kvhandoff.embedded.models import resolve_model
from tests.cluster import Cluster, cluster

REQUESTS = 200
CONCURRENCY = 8
BLOCK = 16
LONGEST = 4000
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "seven", "lazy", "wizards", "mixing", "potions"]


def mixed_requests(seed: int = 7) -> list[tuple[bool, dict[str, Any]]]:
    """(chat?, body) of 1 to 4000 tokens, block-boundary lengths among them, some with shared beginnings."""
    rng = random.Random(seed)
    edges = [k * BLOCK + d for k in (1, 2, 5, 32) for d in (-1, 0, 1)]
    requests: list[tuple[bool, dict[str, Any]]] = []
    for index in range(REQUESTS):
        if index % 3 == 2:
            words = " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 5, 40, 200))))
            turns = [{"role": "user", "content": f"{index}: {words}?"}]
            if index % 2:
                turns = [{"role": "system", "content": "Answer briefly."}, *turns]
            requests.append((True, {"messages": turns}))
        else:
            length = edges[index % len(edges)] if index % 2 else round(LONGEST ** rng.random())
            if index in (0, 100):
                length = LONGEST
            shared = [5] * min(length, BLOCK * 3) if index % 5 == 0 else []
            prompt = (shared + [rng.randrange(10, 250) for _ in range(length)])[:length]
            requests.append((False, {"prompt": prompt}))
    return requests


async def answers(
    deployment: Cluster, requests: list[tuple[bool, dict[str, Any]]], **where: Any
) -> list[tuple[list[int], str]]:
    """(token ids, completion id) of all requests, eight at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(chat: bool, body: dict[str, Any]) -> tuple[list[int], str]:
        options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        async with gate:
            status, answer = await deployment.post({**body, **options}, chat=chat, **where)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"], answer["id"]

    return await asyncio.gather(*(one(chat, body) for chat, body in requests))


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_two_hundred_mixed_requests(tiny: Path, transport: Literal["shm", "nixl"]) -> None:
    name = os.environ.get("KVHANDOFF_EQUALITY_MODEL")
    model = tiny if name is None else resolve_model(name)
    requests = mixed_requests()
    async with cluster(model, transport=transport, num_blocks=2048) as deployment:
        salted = [(chat, {**body, "cache_salt": "alone"}) for chat, body in requests]
        alone = await answers(deployment, salted, url=deployment.decode[0].url)
        pulled = await answers(deployment, requests, path="pull")
        same = sum(got == expected for (got, _), (expected, _) in zip(pulled, alone, strict=True))
        assert same == REQUESTS

        records = [await deployment.record(completion) for _, completion in pulled]
        assert {record["path"] for record in records} == {"pull"}
        transferred = sum(record["kv_source"] == "transferred" for record in records)
        cached = sum("already_cached" in record["reasons"] for record in records)
        # What was not transferred had nothing to transfer: a one-token prompt, or a cached beginning.
        assert transferred + cached == REQUESTS
        assert transferred > REQUESTS // 2
        await deployment.settled()
