"""Engines that refuse connections, or have just come back.

The oracle is one engine serving alone: greedy token ids, in exact mode.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.router.config import Timeouts
from tests.cluster import cluster, engine, until
from tests.e2e.stage import BLOCK, PATIENT, greedy, leftovers, mute, prompt
from tests.gates import StepGate

UNPOLLED: dict[str, Any] = {"poll_interval_s": 600.0}
"""The router learns of an engine's end only by trying."""
TOKENS = prompt(1, 5 * BLOCK)


async def test_decode_engine_refuses_after_prefill_began(tiny: Path) -> None:
    """Field case 14: another decode engine answers, with the KV of the same offer."""
    async with cluster(tiny, decode=2, settings=PATIENT, router_options=UNPOLLED) as d:
        prefill = d.prefill[0]
        expected = await d.tokens(TOKENS, url=prefill.url, body={"cache_salt": "alone"})
        with StepGate(prefill) as steps:
            steps.close()
            client = asyncio.create_task(d.post(greedy(TOKENS)))
            await until(lambda: steps.holds)
            await d.decode[0].close()  # the router's first choice
        status, answer = await client
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
        record = await d.record(answer["id"])
        assert (record["decode"]["engine_id"], record["kv_source"]) == ("decode-1", "transferred")
        assert record["attempts"] == 2
        assert "decode_failed" in record["reasons"]
        assert steps.begun == 1  # the prompt was not computed again
        await d.settled(prefill, d.decode[1])


async def test_no_other_decode_engine(tiny: Path) -> None:
    """Field case 14: an error, and the prefill engine's blocks are free at once, not when a lease ends."""
    async with cluster(tiny, settings=PATIENT, router_options=UNPOLLED) as d:
        prefill = d.prefill[0]
        with StepGate(prefill) as steps:
            steps.close()
            client = asyncio.create_task(d.post(greedy(TOKENS)))
            await until(lambda: steps.holds)
            await d.decode[0].close()
        status, answer = await client
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        await until(lambda: not leftovers(prefill), describe=lambda: str(leftovers(prefill)))


async def test_decode_engine_hangs(tiny: Path) -> None:
    """Field case 14: it takes the connection and never answers. After the deadline, another one answers; the
    first offer is withdrawn, so that there are never two live pairs (field case 15)."""
    timeouts = Timeouts(answer_s=2.0)
    async with cluster(tiny, decode=2, settings=PATIENT, router_options={"timeouts": timeouts}) as d:
        expected = await d.tokens(TOKENS, url=d.prefill[0].url, body={"cache_salt": "alone"})
        with StepGate(d.decode[0]) as steps:
            steps.close()
            status, answer = await d.post(greedy(TOKENS))
            assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
            record = await d.record(answer["id"])
            assert (record["decode"]["engine_id"], record["attempts"]) == ("decode-1", 2)
            assert steps.holds
        await d.settled()


async def test_a_dead_prefill_engine_frees_the_decode_engine_at_once(tiny: Path) -> None:
    """Field case 13: the prefill engine has offered, never answers a claim, and ends. The decode engine waits
    for no deadline: they are all ten minutes off."""
    late = HandoffSettings(handshake_s=600.0, claim_s=600.0, read_s=600.0)
    async with cluster(tiny, settings=late, router_options=UNPOLLED) as d:
        prefill, decode = d.prefill[0], d.decode[0]
        others = [prompt(seed, 3 * BLOCK) for seed in range(5)]
        expected = [await d.tokens(p, url=decode.url, body={"cache_salt": "alone"}) for p in others]
        assert await d.tokens(others[0], body={"cache_salt": "acquaint"}) == expected[0]
        mute(prefill)
        clients = [asyncio.create_task(d.post(greedy(p))) for p in others]
        await until(lambda: decode.core.load()["loading"] == 5)
        await prefill.close()
        answers = await asyncio.gather(*clients)
        assert [answer["choices"][0]["token_ids"] for _, answer in answers] == expected
        records = [await d.record(answer["id"]) for _, answer in answers]
        assert {record["kv_source"] for record in records} == {"recomputed"}
        assert all("peer_lost" in record["reasons"] for record in records)
        await d.settled(decode)


async def test_decode_engine_is_used_as_soon_as_it_is_back(tiny: Path) -> None:
    """Field case 17: the first request after a restart is answered, however long the router's next poll is
    off; the one after it has its KV transferred to the new life."""
    async with AsyncExitStack() as stack:
        d = await stack.enter_async_context(cluster(tiny, settings=PATIENT, router_options=UNPOLLED))
        expected = await d.tokens(TOKENS, url=d.prefill[0].url, body={"cache_salt": "alone"})
        port = int(d.decode[0].url.rsplit(":", 1)[1])
        await d.decode[0].close()
        status, answer = await d.post(greedy(TOKENS))
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        again = await stack.enter_async_context(engine("decode", tiny, name="decode-0", port=port))
        for salt in ("first", "second"):
            status, answer = await d.post({**greedy(TOKENS), "cache_salt": salt})
            assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
        assert (await d.record(answer["id"]))["kv_source"] == "transferred"
        await d.settled(d.prefill[0], again)
