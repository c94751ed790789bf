"""Many aborts at once, and at any moment: whoever stays is served right, and nothing is left behind.

The oracle is one engine serving alone: greedy token ids, in exact mode.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.cluster import until
from tests.e2e.stage import BLOCK, Stage, leave, prompt, stage


async def test_nine_of_ten_clients_leave_at_once(tiny: Path) -> None:
    """Field case 13: 60 requests stand in every state; the legs of those that leave are let go while all is
    still held, and who stays, or comes then, is served at once."""
    prompts = [prompt(seed, 3 * BLOCK + seed % 20) for seed in range(60)]
    staying = range(0, 60, 10)
    async with stage(tiny, max_num_seqs=4) as s:
        expected = [await s.alone(prompts[index]) for index in staying]
        late = prompt(99, 3 * BLOCK)
        expected_late = await s.alone(late)
        s.reset()
        # The first ones decode, the next ones read, the rest are in the prefill engine or queue for it.
        s.decode_steps.close()
        clients = [s.request(tokens) for tokens in prompts[:20]]
        await until(lambda: s.decode_steps.holds)
        s.transfers.closed = True
        s.prefill_steps.close()
        s.prefill_steps.let(3)
        clients += [s.request(tokens) for tokens in prompts[20:]]
        await until(lambda: s.prefill_steps.holds and s.prefill.core.load()["waiting"] >= 30)

        await leave(*(client for index, client in enumerate(clients) if index not in staying))
        await until(lambda: open_legs(s) <= len(staying), describe=s.where)
        s.prefill_steps.let(1)
        s.decode_steps.let(1)
        await until(
            lambda: len(s.prefill.core.live()) + len(s.decode.core.live()) <= len(staying), describe=s.where
        )
        s.open()
        assert await s.request(late) == expected_late
        assert [await clients[index] for index in staying] == expected
        await s.idle()


def open_legs(s: Stage) -> int:
    """Legs on either engine that somebody still waits for."""
    legs = [*s.prefill.agent._by_request.values(), *s.decode.agent._by_request.values()]
    return sum(not leg.is_finished for leg in legs)


class Moments:
    """Numbers the moments of a run: each step's begin and end, each transfer's. Acts at a chosen one."""

    def __init__(self, s: Stage) -> None:
        self._loop = asyncio.get_running_loop()
        self._actions: list[tuple[int, int, Callable[[], None]]] = []
        self._now = self._made = 0
        for gate in (s.prefill_steps, s.decode_steps, s.transfers):
            gate.on_event = self._happened

    def after(self, moments: int, action: Callable[[], None]) -> None:
        """Do `action` when so many more moments have passed."""
        self._made += 1
        heappush(self._actions, (self._now + moments, self._made, action))

    def _happened(self) -> None:
        self._loop.call_soon_threadsafe(self._pass)

    def _pass(self) -> None:
        self._now += 1
        while self._actions and self._actions[0][0] <= self._now:
            heappop(self._actions)[2]()


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_aborts_at_any_moment(tiny: Path, transport: Literal["shm", "nixl"]) -> None:
    """Field case 18b: of 150 requests most are aborted at a random moment, by their client, by the prefill
    engine or by the decode engine, and every other transfer takes its time, while its target blocks are
    wanted by others. Both engines go on, and what is answered is right."""
    rng = random.Random(18)
    prompts = [prompt(seed, 2 * BLOCK + 5 * seed) for seed in range(6)]
    async with stage(tiny, transport=transport, max_num_seqs=8, num_blocks=32) as s:
        expected = [await s.alone(tokens, 3) for tokens in prompts]
        moments = Moments(s)
        s.transfers.late_by = lambda: rng.choice((0, 0, 3, 30))
        lanes = asyncio.Semaphore(12)
        outcomes: dict[str, int] = {}

        def strike(client: asyncio.Task[Any]) -> None:
            match rng.choice(["client", "client", "prefill", "decode", "nobody"]):
                case "client":
                    client.cancel()
                case "prefill":
                    abort_one(s.prefill.core)
                case "decode":
                    abort_one(s.decode.core)

        def abort_one(core: Any) -> None:
            live = core.live()
            if live:
                core.abort(rng.choice(live))

        async def one(index: int) -> None:
            which = index % len(prompts)
            async with lanes:
                # A salt each, so that nothing is found in a prefix cache.
                client = s.ask(prompts[which], 3, cache_salt=str(index))
                moments.after(rng.randrange(60), lambda: strike(client))
                await asyncio.wait([client])
            if client.cancelled():
                outcome = "left"
            else:
                status, answer = client.result()
                outcome = str(status)
                if status == 200:
                    assert answer["choices"][0]["token_ids"] == expected[which]
                else:
                    assert answer["error"]["code"] in ("prefill_failed", "decode_failed", "engine_aborted")
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

        await asyncio.gather(*(one(index) for index in range(150)))
        assert outcomes["left"] > 30, outcomes
        assert outcomes["200"] > 30, outcomes
        await s.idle()
        status, answer = await s.ask(prompts[0], 3, cache_salt="after")
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected[0])
        assert (await s.cluster.record(answer["id"]))["kv_source"] == "transferred"


async def test_clients_leave_and_the_prefill_engine_dies(tiny: Path) -> None:
    """Field case 23: the decode engine is never told how the transfers ended; still every block comes back,
    those of transfers in flight with their fence and not before."""
    async with stage(tiny, decode_options={"num_blocks": 100}) as s:
        s.transfers.closed = True
        clients = [s.ask(prompt(seed, 3 * BLOCK)) for seed in range(20)]
        await until(lambda: s.transfers.held == 20)
        await s.prefill.close()
        await leave(*clients)
        await until(lambda: s.decode.blocks().quarantined == 60, describe=s.where)
        s.transfers.closed = False
        await until(lambda: s.decode.at_baseline(), describe=s.where)
