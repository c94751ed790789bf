"""Salts never mix (rule 6; field cases 61 and 62, as far as tenants exist yet).

The same prompt under another salt finds nothing: not in a prefix cache, not through a handoff, not with a
reference of the other's. Under the same salt it finds all there is: each test has both halves.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.tickets import MissPolicy
from tests.cluster import MODEL, LiveEngine, cluster
from tests.legs import MAX_TOKENS, Legs, counted, random_prompt, ticket

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
LENGTH = 4 * BLOCK
CACHED = 3 * BLOCK
"""What a prefix cache can have of such a prompt: the last token is always computed."""
SALTS: list[str | None] = [None, "A", "B", "a", "A ", "AB", "ä"]
"""No salt is a salt too: the one that everybody without one shares."""


@dataclass
class Tenants:
    """A deployment that several salts share."""

    legs: Legs
    p: LiveEngine
    d: LiveEngine
    rng: random.Random

    def prompt(self) -> list[int]:
        """A prompt that no engine has seen."""
        return random_prompt(self.rng, LENGTH)

    async def ask(
        self, asked: dict[str, Any], salt: str | None, path: str = "pull"
    ) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
        """One request through the router: token ids, usage, record."""
        body = {**asked, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        if salt is not None:
            body["cache_salt"] = salt
        chat = "messages" in asked
        status, answer = await self.legs.cluster.post(
            {**body, "return_token_ids": True}, chat=chat, path=path
        )
        assert status == 200, answer
        record = await self.legs.cluster.record(answer["id"])
        return answer["choices"][0]["token_ids"], answer["usage"], record


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tiny: Path) -> AsyncIterator[Tenants]:
    async with cluster(tiny) as deployment:
        yield Tenants(Legs(deployment), deployment.prefill[0], deployment.decode[0], random.Random(11))


def _cached(usage: dict[str, Any]) -> int:
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def test_prefix_caches_behind_a_pull(tenants: Tenants) -> None:
    """Neither engine's prefix cache answers for another salt; both do for the same."""
    prompt = {"prompt": tenants.prompt()}
    first: list[int] = []
    for salt in SALTS:
        token_ids, usage, record = await tenants.ask(prompt, salt)
        first = first or token_ids
        assert token_ids == first, "a salt changes what is shared, never what is said"
        reused = {"prefill_cache": 0, "decode_cache": 0, "transferred": LENGTH, "returned": 0}
        assert record["reused_tokens"] == reused
        assert _cached(usage) == 0
    for salt in SALTS:
        token_ids, usage, record = await tenants.ask(prompt, salt)
        assert token_ids == first
        assert record["reused_tokens"]["prefill_cache"] == CACHED
        assert record["reused_tokens"]["decode_cache"] == CACHED
        assert _cached(usage) == CACHED
    await tenants.legs.cluster.settled()


async def test_prefix_cache_of_a_local_path(tenants: Tenants) -> None:
    """The same without a handoff."""
    prompt = {"prompt": tenants.prompt()}
    for hit in (0, CACHED):
        for salt in SALTS:
            _, usage, record = await tenants.ask(prompt, salt, "local")
            reused = {"prefill_cache": 0, "decode_cache": hit, "transferred": 0, "returned": 0}
            assert record["reused_tokens"] == reused
            assert _cached(usage) == hit


async def test_chat(tenants: Tenants) -> None:
    """The salt of a chat counts as that of a completion does."""
    asked = {"messages": [{"role": "user", "content": "What is the capital of France? Paris, on the Seine."}]}
    hits = []
    for salt in ("chat A", "chat B", None, "chat A", "chat B", None):
        _, usage, record = await tenants.ask(asked, salt)
        assert (record["reused_tokens"]["prefill_cache"] > 0) == (_cached(usage) > 0)
        hits.append(_cached(usage) > 0)
    assert hits == [False] * 3 + [True] * 3
    await tenants.legs.cluster.settled()


async def test_no_salt_in_all_its_spellings(tenants: Tenants) -> None:
    """Absent, null and empty are one salt."""
    prompt = tenants.prompt()
    hits = []
    for fields in ({}, {"cache_salt": None}, {"cache_salt": ""}, {"cache_salt": "x"}, {}):
        _, usage, _ = await tenants.ask({"prompt": prompt, **fields}, None)
        hits.append(_cached(usage))
    assert hits == [0, CACHED, CACHED, 0, CACHED]


async def test_salts_at_the_same_time(tenants: Tenants) -> None:
    """In one batch, before anything is cached."""
    prompt = {"prompt": tenants.prompt()}
    answers = await asyncio.gather(*(tenants.ask(prompt, f"together {n}") for n in range(6)))
    assert len({tuple(token_ids) for token_ids, _, _ in answers}) == 1
    for _, usage, record in answers:
        assert _cached(usage) == 0
        reused = {"prefill_cache": 0, "decode_cache": 0, "transferred": LENGTH, "returned": 0}
        assert record["reused_tokens"] == reused
    await tenants.legs.cluster.settled()


@pytest.mark.parametrize("on_miss", ["recompute", "error"])
async def test_reference_of_another_salt(tenants: Tenants, on_miss: MissPolicy) -> None:
    """An offer made under one salt is no good under another, whatever the prompt; it is under its own."""
    legs, p, d = tenants.legs, tenants.p, tenants.d
    prompt = tenants.prompt()
    expected = await legs.alone(d, prompt)
    salts = ["", "A", "B"]
    for made, used in permutations(salts, 2):
        offer = await legs.offer(p, prompt, salt=made)
        before = await legs.reasons(d)
        answer = await legs.decode(d, offer, prompt, salt=used, on_miss=on_miss)
        if on_miss == "recompute":
            assert answer.token_ids == expected
        else:
            assert (answer.status, answer.error["code"]) == (503, Reason.CHAIN_MISMATCH)
        assert (await legs.record(d, answer.key)).transferred_tokens == 0
        assert await legs.reasons(d) - before == counted(Reason.CHAIN_MISMATCH)
        await legs.withdraw(p, offer.key)
    for salt in salts:
        fresh = tenants.prompt()
        offer = await legs.offer(p, fresh, salt=salt)
        answer = await legs.decode(d, offer, fresh, salt=salt, on_miss=on_miss)
        assert answer.status == 200
        assert (await legs.record(d, answer.key)).transferred_tokens == LENGTH
    await legs.cluster.settled()


async def test_ticket_s_salt_overrides_the_body_s(tenants: Tenants) -> None:
    """What the router says counts: a client can't choose another tenant's salt behind its back."""
    legs, d = tenants.legs, tenants.d
    prompt = tenants.prompt()

    async def cached(ticket_salt: str | None, body_salt: str) -> int:
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": body_salt}
        if ticket_salt is not None:
            body["kv_transfer_params"] = {"ticket": ticket(d, "local", cache_salt=ticket_salt)}
        status, answer = await legs.cluster.post(body, url=d.url)
        assert status == 200, answer
        return _cached(answer["usage"])

    assert await cached("tenant", "theirs") == 0
    assert await cached("theirs", "tenant") == 0, "the body's salt has counted"
    assert await cached("tenant", "anything") == CACHED
    assert await cached(None, "tenant") == CACHED, "without a router the body's is all there is"
    assert await cached(None, "anything") == 0


@pytest.mark.parametrize("salt", [17, True, [], {"a": 1}, 1.5])
async def test_salt_that_is_no_text(tenants: Tenants, salt: object) -> None:
    """Refused, not taken for no salt."""
    body = {"prompt": tenants.prompt(), "cache_salt": salt, "max_tokens": 1}
    for path in ("pull", "local"):
        status, answer = await tenants.legs.cluster.post(body, path=path)
        assert (status, answer["error"]["param"]) == (400, "cache_salt"), answer
    await tenants.legs.cluster.settled()
