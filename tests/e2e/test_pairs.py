"""Field case 21: what the router's tests of pairs say of real engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, cluster
from tests.e2e.stage import greedy, prompt

ON = {"pair_tests": "on"}


async def pairs_of(c: Cluster) -> dict[str, Any]:
    """What /ready says of the pairs, when all have been tested."""
    async with asyncio.timeout(60.0):
        while True:
            async with c.session.get(f"{c.url}/ready") as answer:
                pairs: dict[str, Any] = (await answer.json())["pairs"]
            if not pairs["untested"]:
                return pairs
            await asyncio.sleep(0.02)


async def test_pairs_that_hand_over(tiny: Path) -> None:
    """Nothing is left of the tests."""
    async with cluster(tiny, prefill=2, decode=2, router_options=ON) as c:
        assert await pairs_of(c) == {"passed": 4, "untested": 0, "failed": []}
        await c.settled()


async def test_a_pair_that_does_not(tiny: Path) -> None:
    """Another block size: every handshake is refused, and prompts would be computed twice."""
    async with cluster(tiny, router_options=ON, decode_options={"block_size": 32}) as c:
        pairs = await pairs_of(c)
        assert (pairs["passed"], len(pairs["failed"])) == (0, 1)
        assert "computed the prompt itself (handshake_refused)" in pairs["failed"][0]["problem"]
        await c.settled()
        tokens = prompt(1, 80)
        expected = await c.tokens(tokens, url=c.decode[0].url, body={"cache_salt": "alone"})
        status, answer = await c.post(greedy(tokens))
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
        record = await c.record(answer["id"])
        assert (record["path"], record["reasons"]) == ("local", ["no_prefill_engine"])
        await c.settled()
