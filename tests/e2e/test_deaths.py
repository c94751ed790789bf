"""Engines that are killed, or stop, with many requests under way: the others go on and get their memory back.

The oracle is one engine serving alone: greedy token ids, in exact mode.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from kvhandoff.core.records import EngineState
from kvhandoff.handoff.settings import HandoffSettings
from tests.e2e.stage import BLOCK, PATIENT, greedy, leave, prompt
from tests.processes import Deployment, EngineProcess, deployment, eventually

pytestmark = pytest.mark.processes


def busy(state: EngineState) -> int:
    return state.running + state.waiting + state.loading


def has_work(d: Deployment, engine: EngineProcess, requests: int) -> Callable[[], Awaitable[bool]]:
    """Whether the engine has at least so many requests."""

    async def reached() -> bool:
        return busy(await d.state(engine)) >= requests

    return reached


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_prefill_engine_is_killed_under_load(tiny: Path, transport: Literal["shm", "nixl"]) -> None:
    """Field case 13: 60 requests are in flight, on both engines, which stand still until one is killed. The
    decode engine's slots don't wait for the dead engine: all requests are answered right, and the new life
    serves as the old one did."""
    prompts = [prompt(seed, 4 * BLOCK + seed % 17) for seed in range(6)]
    async with deployment(tiny, transport=transport, max_num_seqs=4, settings=PATIENT) as d:
        (prefill,), (decode,) = d.prefillers, d.decoders
        expected = [await d.tokens(p, url=decode.url, body={"cache_salt": "alone"}) for p in prompts]

        def ask(numbers: range) -> list[asyncio.Task[tuple[int, dict[str, Any]]]]:
            return [asyncio.create_task(d.post(greedy(prompts[n % 6], cache_salt=str(n)))) for n in numbers]

        decode.hold()
        clients = ask(range(20))
        await eventually(has_work(d, decode, 20))
        prefill.hold()
        clients += ask(range(20, 60))
        await eventually(has_work(d, prefill, 40))
        prefill.kill()
        decode.go_on()
        answers = await asyncio.gather(*clients)
        for number, (status, answer) in enumerate(answers):
            assert (status, answer["choices"][0]["token_ids"]) == (200, expected[number % 6])
        await d.at_baseline(decode)
        assert decode.alive

        await prefill.start()
        await d.healthy()
        status, answer = await d.post(greedy(prompts[0], cache_salt="after"))
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected[0])
        assert (await d.record(answer["id"]))["kv_source"] == "transferred"
        await d.at_baseline()


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_clients_leave_and_the_prefill_engine_dies(
    tiny: Path, transport: Literal["shm", "nixl"]
) -> None:
    """Field case 23: the decode engine has read, but its claims stay unanswered; the clients leave, and the
    prefill engine dies. Still all 500 blocks of the decode engine come back."""
    async with deployment(tiny, transport=transport, settings=PATIENT, num_blocks=500) as d:
        (prefill,), (decode,) = d.prefillers, d.decoders
        expected = await d.tokens(prompt(1, 50), url=decode.url, body={"cache_salt": "alone"})
        decode.freeze()
        clients = [asyncio.create_task(d.post(greedy(prompt(seed, 100)))) for seed in range(40)]
        await eventually(offers(d, prefill, 40 * 7))
        prefill.freeze()
        decode.thaw()

        async def waits() -> bool:
            return (await d.state(decode)).loading > 10

        await eventually(waits)
        await leave(*clients)
        prefill.kill()
        await d.at_baseline(decode)
        await prefill.start()
        await d.healthy()
        assert await d.tokens(prompt(1, 50)) == expected
        await d.at_baseline()


def offers(d: Deployment, engine: EngineProcess, blocks: int) -> Callable[[], Awaitable[bool]]:
    """Whether the engine keeps at least so many blocks for others."""

    async def reached() -> bool:
        return (await d.blocks(engine)).offered >= blocks

    return reached


async def test_client_leaves_before_a_decode_engine_that_is_stuck(tiny: Path) -> None:
    """Field case 30: the prefill engine is done, the decode engine has not begun. The prefill engine's blocks
    are free again at once, and nothing is left of the request when the decode engine goes on."""
    async with deployment(tiny, settings=PATIENT) as d:
        (prefill,), (decode,) = d.prefillers, d.decoders
        expected = await d.tokens(prompt(2, 50), url=prefill.url, body={"cache_salt": "alone"})
        decode.freeze()
        client = asyncio.create_task(d.post(greedy(prompt(1, 100))))
        await eventually(offers(d, prefill, 7))
        await leave(client)
        await d.at_baseline(prefill)
        decode.thaw()
        assert await d.tokens(prompt(2, 50)) == expected
        await d.at_baseline()


async def test_decode_engine_dies_with_many_offers_pending(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 25: the decode engine has claimed a hundred offers and is killed, and the router's word that
    nobody comes for them is lost. The leases end them, not before their time, and the prefill engine goes
    on."""

    async def lost(*_: object) -> bool:
        return False

    leases = HandoffSettings(offer_lease_s=4.0, claim_lease_s=4.0)
    slow = {"num_blocks": 14, "max_num_seqs": 1}
    once = {"max_attempts": 1}
    async with deployment(
        tiny, settings=leases, num_blocks=800, decode_options=slow, router_options=once
    ) as d:
        (prefill,), (decode,) = d.prefillers, d.decoders
        decode.hold()
        clients = [asyncio.create_task(d.post(greedy(prompt(seed, 100), 100))) for seed in range(100)]
        await eventually(has_work(d, decode, 100))
        monkeypatch.setattr("kvhandoff.router.engine.Engine.tell", lost)
        decode.kill()
        assert (await d.blocks(prefill)).offered >= 90 * 7
        answers = await asyncio.gather(*clients)
        assert {status for status, _ in answers} <= {502, 503}
        await d.at_baseline(prefill)
        async with d.session.get(f"{prefill.url}/metrics") as metrics:
            lapsed = re.search(
                r'reasons_total{kind="failure",reason="lease_lapsed"} (\d+)', await metrics.text()
            )
        assert lapsed is not None
        assert int(lapsed[1]) >= 90
        assert prefill.alive
