"""kill -9 of either engine in the middle of pushes (field cases 13, 17, 23, 25): the other one goes on, with
all its memory, as soon as the operating system says that the process has ended.

All leases and deadlines are a minute long: nothing here waits for one.
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from kvhandoff.core.clock import monotonic
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity
from kvhandoff.core.records import LegRecord
from kvhandoff.embedded import process
from kvhandoff.embedded.process import EngineConfig
from tests.cluster import Transport
from tests.e2e.pushes import transports
from tests.e2e.stage import CHUNK, PATIENT, prompt
from tests.gates import TransferGate
from tests.legs import MAX_TOKENS, Answered, Legs, new_key
from tests.processes import Deployment, EngineProcess, deployment, eventually, serve, when_told_to_go_on

pytestmark = pytest.mark.processes

PROMPTS = [prompt(seed, 5 * CHUNK) for seed in range(6)]
BLOCKS = 10
"""Of a prompt."""

OPTIONS: dict[str, Any] = {"settings": PATIENT, "max_step_tokens": CHUNK}


def serve_with_writes_that_hang(config: EngineConfig, news: Connection) -> None:
    """An engine whose first two writes land and whose others never end."""
    gate = TransferGate(closed=True)
    gate.let(2)
    serve_behind(gate, config, news)


def serve_with_writes_that_wait(config: EngineConfig, news: Connection) -> None:
    """An engine whose writes begin when it is told to go on."""
    gate = TransferGate(closed=True)

    def open_gate() -> None:
        gate.closed = False

    when_told_to_go_on(open_gate)
    serve_behind(gate, config, news)


def serve_behind(gate: TransferGate, config: EngineConfig, news: Connection) -> None:
    create = process.create_plane
    process.create_plane = lambda kind, me: gate.wrap(create(kind, me))
    serve(config, news)


class Pushes:
    """Legs of a push, sent to engine processes."""

    def __init__(self, d: Deployment) -> None:
        self.d, self.legs = d, Legs(d)
        (self.p_process,), (self.d_process,) = d.prefillers, d.decoders
        self.salt = 0

    async def alone(self) -> list[list[int]]:
        """The oracle, of all prompts."""
        salt = {"cache_salt": "alone"}
        url = self.d_process.url
        return [await self.d.tokens(tokens, MAX_TOKENS, url=url, body=salt) for tokens in PROMPTS]

    async def start(self) -> list[tuple[HandoffKey, asyncio.Task[Answered], asyncio.Task[Answered]]]:
        """A push of each prompt: key, prefill leg and decode leg."""
        self.salt += 1
        p, d = as_live(self.p_process), as_live(self.d_process)
        started = []
        for tokens in PROMPTS:
            key, salt = new_key(), f"{self.salt}"
            prefill = self.legs.prefill_push(p, d, tokens, key=key, salt=salt)
            decode = self.legs.decode_push(p, d, tokens, key=key, salt=salt)
            started.append((key, asyncio.create_task(prefill), asyncio.create_task(decode)))
        return started

    async def all_transferred(self, expected: list[list[int]]) -> None:
        """Push all prompts, between the lives that there are now."""
        for number, (key, prefill, decode) in enumerate(await self.start()):
            assert (await decode).token_ids == expected[number]
            assert (await prefill).status == 200
            assert (await self.record(key)).kv_source == "transferred"
        await self.d.at_baseline()

    async def record(self, key: HandoffKey) -> LegRecord:
        """D's account of a leg."""
        records = (await self.d.state(self.d_process)).records
        (found,) = (r for r in records if (r.handoff_id, r.attempt) == (key.handoff_id, key.attempt))
        return found

    async def granted(self, blocks: int, *legs: asyncio.Task[Answered]) -> None:
        """Wait until D has granted so many blocks, or all of `legs`, if any, have been answered."""

        async def reached() -> bool:
            over = bool(legs) and all(leg.done() for leg in legs)
            return over or (await self.d.blocks(self.d_process)).granted >= blocks

        async def where() -> str:
            states = [await self.d.state(engine) for engine in self.d.processes]
            return "; ".join(f"{state.engine_id}: {state.blocks}" for state in states)

        await eventually(reached, describe=where)


def as_live(engine: EngineProcess) -> Any:
    """What a leg needs to know of an engine. All processes of a machine read one clock."""
    me = Identity(EngineId(engine.config.engine_id), Epoch(engine.epoch))
    agent = SimpleNamespace(me=me, control_address=engine.config.control, clock=monotonic)
    return SimpleNamespace(url=engine.url, agent=agent)


@transports
async def test_source_is_killed_with_writes_in_flight(tiny: Path, transport: Transport) -> None:
    """Field cases 13 and 23: D's blocks come back by the proof that P has ended, and every answer is
    right."""
    async with deployment(tiny, transport=transport, **OPTIONS) as d:
        pushes = Pushes(d)
        expected = await pushes.alone()
        source = pushes.p_process
        source.run = serve_with_writes_that_hang
        await source.restart()
        await d.healthy()
        started = await pushes.start()
        for _, prefill, _ in started:
            assert (await prefill).status == 200
        await pushes.granted((len(PROMPTS) - 2) * BLOCKS)
        source.kill()
        answers = [await decode for _, _, decode in started]
        assert [answer.token_ids for answer in answers] == expected
        sources = [(await pushes.record(key)).kv_source for key, _, _ in started]
        assert sources.count("recomputed") >= len(PROMPTS) - 2  # two writes may have been two whole prompts
        await d.at_baseline(pushes.d_process)

        source.run = serve
        await source.start()
        await d.healthy()
        await pushes.all_transferred(expected)


@transports
async def test_destination_is_killed_with_writes_in_flight(tiny: Path, transport: Transport) -> None:
    """Field case 25, without waiting for a lease: the writes end, well or badly, and when the router has said
    that nobody comes, all of P's blocks are back."""
    async with deployment(tiny, transport=transport, **OPTIONS) as d:
        pushes = Pushes(d)
        expected = await pushes.alone()
        source, destination = pushes.p_process, pushes.d_process
        source.run = serve_with_writes_that_wait
        await source.restart()
        await d.healthy()
        started = await pushes.start()
        await pushes.granted(len(PROMPTS) * BLOCKS)
        destination.kill()
        source.go_on()
        for key, prefill, decode in started:
            assert (await prefill).status == 200
            with pytest.raises(aiohttp.ClientError):
                await decode
            await pushes.legs.withdraw(as_live(source), key)
        await d.at_baseline(source)

        await destination.start()
        await d.healthy()
        await pushes.all_transferred(expected)


@pytest.mark.parametrize("victim", ["source", "destination"])
async def test_killed_at_some_moment_of_many_pushes(tiny: Path, victim: str) -> None:
    """Field case 17: whatever they were at, if only at their end. Twice over, at other moments."""
    async with deployment(tiny, transport="nixl", **OPTIONS) as d:
        pushes = Pushes(d)
        expected = await pushes.alone()
        for moment in range(2):
            started = await pushes.start()
            await pushes.granted(1 + moment * 3 * BLOCKS, *(decode for _, _, decode in started))
            killed = pushes.p_process if victim == "source" else pushes.d_process
            other = pushes.d_process if victim == "source" else pushes.p_process
            killed.kill()
            results = [
                await asyncio.gather(prefill, decode, return_exceptions=True)
                for _, prefill, decode in started
            ]
            if victim == "source":
                assert [decode.token_ids for _, decode in results if isinstance(decode, Answered)] == expected
            else:
                for key, _, _ in started:
                    await pushes.legs.withdraw(as_live(other), key)
            await d.at_baseline(other)
            await killed.start()
            await d.healthy()
        await pushes.all_transferred(expected)
