"""Pushes on a stage: both legs of a request sent straight to the engines, each held where a test wants it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.tickets import MissPolicy
from tests.cluster import LiveEngine, Transport, until
from tests.e2e.stage import CHUNK, Stage, idle, stage
from tests.legs import MAX_TOKENS, Answered, Legs, new_key, random_prompt
from tests.wire import Wire, nothing

transports = pytest.mark.parametrize("transport", ["shm", "nixl"])
policies = pytest.mark.parametrize("on_miss", ["recompute", "error"])


@dataclass
class Push:
    """One request whose legs are both under way."""

    key: HandoffKey
    prompt: list[int]
    prefill: asyncio.Task[Answered]
    decode: asyncio.Task[Answered]


class Pushing:
    """A prefill engine P and a decode engine D, whose steps, writes and messages can be held."""

    def __init__(self, s: Stage) -> None:
        self.s = s
        self.legs = Legs(s.cluster)
        self.p, self.d = s.prefill, s.decode
        self.steps, self.writes = s.prefill_steps, s.writes
        """P's."""
        self.from_d, self.from_p = Wire(self.d), Wire(self.p)
        self.rng = random.Random(5)

    def prompt(self, tokens: int = 5 * CHUNK) -> list[int]:
        """A prompt that no engine has seen; by default of five chunks, ten blocks."""
        return random_prompt(self.rng, tokens)

    async def alone(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
        """The oracle. It runs on P, and counts as none of its steps."""
        tokens = await self.legs.alone(self.p, prompt, max_tokens)
        self.reset()
        return tokens

    def start(
        self,
        prompt: list[int],
        *,
        key: HandoffKey | None = None,
        on_miss: MissPolicy = "recompute",
        max_tokens: int = MAX_TOKENS,
    ) -> Push:
        """Both legs of a push, sent at once; a client leaves when its task is cancelled."""
        key = key or new_key()
        prefill = self.legs.prefill_push(self.p, self.d, prompt, key=key)
        return Push(
            key,
            prompt,
            asyncio.create_task(prefill),
            self.decode(prompt, key, on_miss=on_miss, max_tokens=max_tokens),
        )

    def decode(self, prompt: list[int], key: HandoffKey, **options: Any) -> asyncio.Task[Answered]:
        """The decode leg of a push."""
        return asyncio.create_task(self.legs.decode_push(self.p, self.d, prompt, key=key, **options))

    async def computed(self, prompt: list[int], chunks: int, **options: Any) -> Push:
        """A push whose prompt P has computed so many chunks of, and no more; each is written at once."""
        self.steps.close()
        push = self.start(prompt, **options)
        await self.writable()
        self.steps.let(chunks)
        await until(lambda: self.steps.done == chunks and self.steps.holds, describe=self.s.where)
        return push

    async def half_written(self, prompt: list[int], **options: Any) -> Push:
        """Three of five chunks are computed; two of them are written, the third is on its way."""
        self.writes.closed = True
        self.writes.let(2)
        push = await self.computed(prompt, 3, **options)
        await until(lambda: self.writes.ended == 2 and self.writes.posted == 3, describe=self.s.where)
        return push

    async def named(self, grants: int = 1) -> None:
        """Wait until P knows which of D's blocks it is to write to, for so many requests."""
        await until(lambda: len(named_grants(self.p)) == grants, describe=self.s.where)

    async def writable(self) -> None:
        """Wait until P can write to them as well: it knows D."""
        await self.named()
        await until(lambda: all(grant.targets is not None for grant in named_grants(self.p)))

    async def record(self, push: Push) -> LegRecord:
        """D's account of it."""
        return await self.legs.record(self.d, push.key)

    async def idle(self) -> None:
        """Both engines have forgotten all but cached blocks, long before any lease or deadline would."""
        await until(lambda: idle(self.p) and idle(self.d), describe=self.s.where)
        assert self.s.errors.messages == []

    def reset(self) -> None:
        """Count anew."""
        self.s.reset()
        self.writes.posted = self.writes.ended = self.writes.blocks = 0

    def open(self) -> None:
        """Let everything go on."""
        self.writes.closed_to = None
        self.s.open()
        for wire in (self.from_d, self.from_p):
            wire.lose = wire.refuse = nothing


@asynccontextmanager
async def pushing(tiny: Path, transport: Transport = "shm", **options: Any) -> AsyncIterator[Pushing]:
    async with stage(tiny, transport=transport, **options) as s:
        made = Pushing(s)
        try:
            yield made
        finally:
            made.open()


def named_grants(engine: LiveEngine) -> list[Any]:
    """The grants that an engine has, and knows the blocks of."""
    grants = engine.agent._running_node.writes._grants.values()
    return [grant for grant in grants if grant.spans is not None]


async def left(*legs: asyncio.Task[Any]) -> None:
    """The clients close their connections."""
    for leg in legs:
        leg.cancel()
        with suppress(asyncio.CancelledError):
            await leg


def abort_all(engine: LiveEngine) -> None:
    """As an operator or a fault would: the engine ends every request by itself."""
    assert engine.core.live()
    for request_id in engine.core.live():
        engine.core.abort(request_id)
