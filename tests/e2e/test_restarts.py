"""Field case 17: kill -9 of either engine and a new start, twenty times over: the other one goes on.

The oracle is one engine serving alone: greedy token ids, in exact mode.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.e2e.stage import BLOCK, greedy, prompt
from tests.processes import ANY_PORT, deployment

pytestmark = pytest.mark.processes

PROMPTS = [prompt(seed, 5 * BLOCK + seed) for seed in range(3)]
NEW = 8

RESTARTS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 96},
    {"control": ANY_PORT, "num_blocks": 400},
    {"port": 0},
    {"port": 0, "control": ANY_PORT, "num_blocks": 64},
]
"""What is other after each kill. Nothing: the same addresses, the same pool."""


@pytest.mark.parametrize("transport", ["shm", "nixl"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_killed_and_started_again(
    tiny: Path, role: Literal["prefill", "decode"], transport: Literal["shm", "nixl"]
) -> None:
    """After each start the very first request is answered right, whoever computes the prompt; as soon as the
    router knows of the new life, KV moves again. The other engine lives through it all."""
    salts = count()
    async with deployment(tiny, transport=transport) as d:
        (prefill,), (decode,) = d.prefillers, d.decoders
        victim, survivor = (prefill, decode) if role == "prefill" else (decode, prefill)
        expected = [await d.tokens(p, NEW, url=survivor.url, body={"cache_salt": "alone"}) for p in PROMPTS]

        async def served(which: int) -> str:
            """Where the KV of a right answer came from."""
            status, answer = await d.post(greedy(PROMPTS[which], NEW, cache_salt=str(next(salts))))
            assert (status, answer.get("choices", [answer])[0].get("token_ids")) == (200, expected[which])
            return str((await d.record(answer["id"]))["kv_source"])

        assert await served(0) == "transferred"
        life = survivor.epoch
        for changes in RESTARTS:
            await victim.restart(**changes)
            if "port" in changes:
                await d.start_router()  # engines are named by URL
            assert await served(0) in ("transferred", "recomputed", "local")
            await d.healthy()
            assert [await served(which) for which in (1, 2)] == ["transferred", "transferred"]
            assert (await d.state(survivor)).epoch == life
        await d.at_baseline()
