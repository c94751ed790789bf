"""Pull, end to end: the same tokens as one engine alone, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Literal

import pytest

from tests.cluster import cluster

BLOCK = 16


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_pull_equals_serving_alone(tiny: Path, transport: Literal["shm", "nixl"]) -> None:
    rng = random.Random(1)
    lengths = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 300]
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in lengths]
    async with cluster(tiny, transport=transport) as deployment:
        alone = deployment.prefill[0].url  # an engine without a ticket serves alone
        expected = [await deployment.tokens(p, url=alone, body={"cache_salt": "alone"}) for p in prompts]
        got = await asyncio.gather(*(deployment.tokens(prompt) for prompt in prompts))
        assert got == expected
        await deployment.settled()
