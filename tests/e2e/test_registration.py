"""Engines that no router was told of: they register, move to other ports, and are found there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig
from tests.cluster import CLUSTER_KEY
from tests.e2e.stage import BLOCK, greedy, prompt
from tests.processes import DEADLINE, deployment

pytestmark = pytest.mark.processes


async def test_engines_register_and_move(tiny: Path) -> None:
    async with deployment(tiny) as d:
        expected = await d.tokens(prompt(1, 5 * BLOCK), url=d.decoders[0].url, body={"cache_salt": "alone"})
        config = RouterConfig(
            registration=True, cluster_key=CLUSTER_KEY, port=0, path="pull", pair_tests="on"
        )
        router = await serve(config)
        try:
            d.url = url = f"http://127.0.0.1:{router.port}"
            for move in ({}, {"port": 0}, {"port": 0}):
                for engine in d.processes:
                    await engine.restart(register=(url,), **move)
                here = {engine.url for engine in d.processes}
                async with asyncio.timeout(DEADLINE):
                    while True:
                        async with d.session.get(f"{url}/ready") as page:
                            ready = await page.json()
                        if {e["url"] for e in ready["engines"] if e["healthy"]} == here:
                            break
                        await asyncio.sleep(0.02)
                status, answer = await d.post(greedy(prompt(1, 5 * BLOCK)))
                assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
                assert (await d.record(answer["id"]))["kv_source"] == "transferred"
        finally:
            await router.close()
