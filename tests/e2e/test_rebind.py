"""Re-binding by an operator, on real engines: only what has not begun is moved, and it stays right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.cluster import Cluster, cluster, until
from tests.e2e.stage import greedy, prompt
from tests.gates import StepGate


async def rebind(c: Cluster, handoff_id: str) -> tuple[int, dict[str, Any]]:
    async with c.session.post(f"{c.url}/v1/handoffs/{handoff_id}/rebind") as answer:
        return answer.status, await answer.json()


def handoff_at(c: Cluster) -> str:
    """The handoff id of the one decode leg under way."""
    (key,) = {key for engine in c.decode for key in engine.agent._legs}
    return key.handoff_id


@pytest.mark.parametrize("path", ["push", "pull"])
async def test_answer_under_way_is_not_thrown_away(tiny: Path, path: str) -> None:
    """Not streamed, so that the router sees nothing of it; with on_miss error, which would show a miss."""
    async with cluster(tiny, decode=2, router_options={"on_miss": "error"}) as c:
        tokens = prompt(1, 100)
        expected = await c.tokens(tokens, 40, url=c.prefill[0].url, body={"cache_salt": "alone"})
        gates = [StepGate(engine) for engine in c.decode]
        for gate in gates:  # the first token is the prefill engine's, and needs no step
            gate.close()
        request = asyncio.create_task(c.post(greedy(tokens, 40), path=path))
        await until(lambda: any(leg._begun for engine in c.decode for leg in engine.agent._legs.values()))
        status, refusal = await rebind(c, handoff_at(c))
        assert (status, refusal["error"]["code"]) == (409, "not_rebound")
        for gate in gates:
            gate.open()
        status, answer = await request
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
        assert (await c.record(answer["id"]))["rebound"] == 0
        await c.settled()


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_pushed_request_that_waits_is_moved(tiny: Path, transport: Literal["shm", "nixl"]) -> None:
    """Its prefill goes on, and the other engine gets what it computes."""
    async with cluster(tiny, decode=2, transport=transport, max_step_tokens=32) as c:
        tokens = prompt(2, 100)
        expected = await c.tokens(tokens, url=c.prefill[0].url, body={"cache_salt": "alone"})
        gate = StepGate(c.prefill[0])
        gate.close()
        request = asyncio.create_task(c.post(greedy(tokens), path="push"))
        await until(lambda: any(engine.blocks().granted for engine in c.decode))
        first = next(engine for engine in c.decode if engine.agent._legs)
        status, moved = await rebind(c, handoff_at(c))
        assert (status, moved["path"]) == (200, "push")
        assert moved["decode"]["engine_id"] != first.agent.me.engine_id
        gate.open()
        status, answer = await request
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
        record = await c.record(answer["id"])
        assert (record["rebound"], record["path"], record["kv_source"]) == (1, "push", "transferred")
        await c.settled()
