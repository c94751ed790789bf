"""Everything at once: all paths, conversations with return, clients that leave, engines that are killed.

Two prefill and two decode engines as real processes, eight requests at a time. Whatever completes is what one
engine alone answers, token for token; afterwards every engine has all its memory back. By hand, in full (500
requests, 100 conversations of 5 turns with 200 to 2000 new tokens each; half an hour for each transport):

    KVHANDOFF_MIXED=full pytest tests/e2e/test_mixed.py
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pytest

from kvhandoff.handoff.settings import HandoffSettings
from tests.cluster import MODEL
from tests.e2e.workload import CONCURRENCY, Sizes, Turn, conversations, singles
from tests.processes import Deployment, EngineProcess, deployment, eventually
from tests.tinymodels import cached_tiny_model

pytestmark = pytest.mark.processes

SMALL = Sizes(requests=60, conversations=10, turns=4, longest_request=1000, new_tokens=(40, 300))
FULL = Sizes(requests=500, conversations=100, turns=5, longest_request=4000, new_tokens=(200, 2000))
SETTINGS = HandoffSettings(retain_lease_s=20.0)
"""What the last turns leave is gone soon, so that the test sees the pools empty."""
PATHS = ("auto", "push", "pull", "local")
ATTEMPTS = 4
"""A client asks again when an engine died under its request and the router's own attempts were not enough."""


class Run:
    """The deployment under test, and what has come of the requests."""

    def __init__(self, d: Deployment, rng: random.Random, *, kill_every: int, leave_every: int) -> None:
        self.d = d
        self.rng = rng
        self.kill_every, self.leave_every = kill_every, leave_every
        self.gate = asyncio.Semaphore(CONCURRENCY)
        self.progress = asyncio.Condition()
        self.completed = self.left = self.failed = self.kills = 0
        self.over = False
        self.wrong: list[str] = []
        self.ids: list[str] = []

    async def serve(self, turns: Iterable[Turn]) -> None:
        """One client's requests, one after the other."""
        async with self.gate:
            for turn in turns:
                if self.rng.randrange(self.leave_every) == 0:
                    await self.leave(turn)
                await self.ask(turn)

    async def ask(self, turn: Turn) -> None:
        for _ in range(ATTEMPTS):
            status, answer = await self.post(turn)
            if status == 200:
                break
            self.failed += 1
        if status == 200:
            self.ids.append(answer["id"])
            got = answer["choices"][0]["token_ids"]
            if got != turn.expected:
                where = f"{turn.conversation} ({turn.edit}), {len(turn.prompt)} tokens, {answer['id']}"
                self.wrong.append(f"{where}: {got} instead of {turn.expected}")
        async with self.progress:
            self.completed += 1
            self.progress.notify_all()

    async def leave(self, turn: Turn) -> None:
        """A client that closes its connection when some other requests have come to an end."""
        request = asyncio.create_task(self.post(turn))
        goal = self.completed + self.rng.randrange(3)
        async with self.progress:
            reached = asyncio.create_task(self.progress.wait_for(lambda: self.completed >= goal))
        await asyncio.wait((request, reached), return_when=asyncio.FIRST_COMPLETED)
        for task in (request, reached):
            task.cancel()
        await asyncio.gather(request, reached, return_exceptions=True)
        self.left += 1

    async def post(self, turn: Turn) -> tuple[int, dict[str, Any]]:
        body = {"prompt": turn.prompt, "max_tokens": turn.max_tokens, "temperature": 0, "ignore_eos": True}
        if turn.conversation is not None:
            body["conversation_id"] = turn.conversation
        path = self.rng.choice(PATHS)
        async with self.d.session.post(
            f"{self.d.url}/v1/completions",
            json={"model": MODEL, "return_token_ids": True, **body},
            headers={"x-kvhandoff-path": path},
        ) as answer:
            return answer.status, await answer.json()

    async def kill_now_and_then(self) -> None:
        """An engine dies after each `kill_every` requests, and comes back."""
        while not self.over:
            goal = self.completed + self.kill_every
            async with self.progress:
                await self.progress.wait_for(lambda goal=goal: self.over or self.completed >= goal)  # type: ignore[misc]
            victim: EngineProcess = self.rng.choice(self.d.processes)
            await victim.restart()
            self.kills += 1

    async def end(self) -> None:
        """All requests have been asked."""
        async with self.progress:
            self.over = True
            self.progress.notify_all()


async def oracle(d: Deployment, turns: Sequence[Turn]) -> None:
    """What the engine says alone: other salts keep its prefix cache and everybody's KV apart."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(turn: Turn) -> None:
        async with gate:
            turn.expected = await alone(d, turn.prompt, turn.max_tokens)

    await asyncio.gather(*(one(turn) for turn in turns))


async def alone(d: Deployment, prompt: Sequence[int], max_tokens: int) -> list[int]:
    engine = d.prefillers[len(prompt) % 2]
    return await d.tokens(list(prompt), max_tokens, url=engine.url, body={"cache_salt": "alone"})


async def idle(d: Deployment) -> None:
    """No request, no grant, no quarantine; in the end no retained turn either: every block is free or
    cached."""

    async def held() -> str:
        return "; ".join([f"{e.config.engine_id}: {await d.blocks(e)}" for e in d.processes])

    async def at_rest() -> bool:
        counts = [await d.blocks(engine) for engine in d.processes]
        return all(c.free + c.cached + c.retained == c.total for c in counts)

    await eventually(at_rest, 30.0, held)
    await d.at_baseline(within=SETTINGS.retain_lease_s + 30.0)


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_everything_at_once(transport: Literal["shm", "nixl"]) -> None:
    full = os.environ.get("KVHANDOFF_MIXED") == "full"
    sizes = FULL if full else SMALL
    rng = random.Random(f"mixed {transport}")
    model = cached_tiny_model("llama", max_position_embeddings=16384)
    async with deployment(
        model,
        prefill=2,
        decode=2,
        transport=transport,
        settings=SETTINGS,
        num_blocks=4096 if full else 768,
        max_step_tokens=256,
    ) as d:
        requests = singles(sizes, rng)
        await oracle(d, requests)
        talks = await conversations(sizes, rng, lambda prompt, n: alone(d, prompt, n))
        turns = len(requests) + sum(len(talk) for talk in talks)
        run = Run(d, rng, kill_every=turns // (20 if full else 6), leave_every=8)
        killer = asyncio.create_task(run.kill_now_and_then())
        clients = [[request] for request in requests] + talks
        rng.shuffle(clients)
        await asyncio.gather(*(run.serve(client) for client in clients))
        await run.end()
        await killer
        await d.healthy()
        await idle(d)

        assert run.wrong == []
        assert len(run.ids) >= 0.95 * turns, f"{run.failed} requests failed of {turns}"
        assert run.kills >= 2
        assert run.left >= turns // 20
        records = [await d.record(completion) for completion in run.ids]
        paths = Counter(record["path"] for record in records)
        assert min(paths[path] for path in ("push", "pull", "local")) >= turns // 20, paths
        assert sum(record["reused_tokens"]["transferred"] for record in records) > 0
        assert sum(record["reused_tokens"]["returned"] for record in records) > 0
        assert sum(record["early_bytes"] for record in records) > 0
