"""What Prometheus is told: requests by path, phases, reasons, leases, blocks, and hits of the index."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvhandoff.core.phases import Phase
from tests.cluster import WAIT_S, Cluster, cluster, until
from tests.gates import TransferGate

PROMPT = [3 + n % 200 for n in range(100)]
Sample = dict[tuple[str, ...], float]


async def page(deployment: Cluster, url: str) -> dict[str, Sample]:
    """Samples by name and labels' values, in the order of the labels' names."""
    async with deployment.session.get(url + "/metrics") as response:
        text = await response.text()
    samples: dict[str, Sample] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


async def test_requests_and_their_phases(tiny: Path) -> None:
    """On the router by path, on each engine by leg; their phases are those of the records."""
    async with cluster(tiny) as deployment:
        phases: list[str] = []
        for path in ("pull", "push", "local"):
            body = {"prompt": [*PROMPT, len(path)], "max_tokens": 2, "conversation_id": path}
            for _ in range(2):
                status, answer = await deployment.post(body, path=path)
                assert status == 200
                phases += (await deployment.record(answer["id"]))["phases"]
        router = await page(deployment, deployment.url)
        engines = [await page(deployment, engine.url) for engine in deployment.engines]

    for path in ("pull", "push", "local"):
        assert router["kvhandoff_router_requests_total"]["completions", path, "200"] == 2
        assert router["kvhandoff_router_ttft_seconds_count"][(path,)] == 2
    counts = router["kvhandoff_router_phase_seconds_count"]
    assert {name: counts[(name,)] for name in set(phases)} == {name: phases.count(name) for name in phases}
    assert router["kvhandoff_router_reasons_total"]["choice", "forced"] == 6
    assert router["kvhandoff_router_return_lookups_total"] == {("hit",): 3, ("miss",): 3}
    assert router["kvhandoff_router_moved_bytes_total"][("late",)] > 0
    p, d = engines
    assert sum(p["kvhandoff_engine_legs_total"].values()) == 4
    assert sum(d["kvhandoff_engine_legs_total"].values()) == 6
    assert p["kvhandoff_engine_phase_seconds_count"][("prefill_compute",)] == 4
    assert d["kvhandoff_engine_phase_seconds_count"][("await_prefill",)] == 2
    seen = {name for (name,) in p["kvhandoff_engine_phase_seconds_count"]}
    seen |= {name for (name,) in d["kvhandoff_engine_phase_seconds_count"]}
    assert seen == {each.value for each in Phase} & set(phases) - {
        *("route", "retry", "bind", "prefill_network", "decode_network"),
    } | {"prefill_tokenize", "prefill_queue", "prefill_compute", "prefill_offer"}
    states = {("total",), ("free",), ("cached",), ("used",), ("offered",), ("retained",)}
    states |= {("loading",), ("granted",), ("quarantined",)}
    for engine in engines:
        assert set(engine["kvhandoff_engine_blocks"]) == states
        assert engine["kvhandoff_engine_blocks"][("quarantined",)] == 0


async def test_leases(tiny: Path) -> None:
    """While a read, then a write, is held up; and none after it, but what is kept for the next turn."""
    reads, writes = TransferGate(), TransferGate()
    async with cluster(
        tiny, prefill_options={"wrap_plane": writes.wrap}, decode_options={"wrap_plane": reads.wrap}
    ) as deployment:
        p, d = (engine.url for engine in deployment.engines)

        async def leases(url: str) -> dict[str, int]:
            shown = (await page(deployment, url))["kvhandoff_engine_leases"]
            return {kind: int(value) for (kind,), value in shown.items() if value}

        for path, gate, target in (("pull", reads, "read"), ("push", writes, "grant")):
            gate.closed = True
            body = {"prompt": [*PROMPT, len(path)], "max_tokens": 2, "conversation_id": path}
            asked = asyncio.create_task(deployment.post(body, path=path))
            await until(lambda gate=gate: gate.held > 0)  # type: ignore[misc]
            async with asyncio.timeout(WAIT_S):
                while await leases(p) != {"offer": 1, "pin": 1}:
                    pass
            kept = 1 if path == "push" else 0  # the first one's turn
            assert await leases(d) == {target: 1} | ({"retained": kept} if kept else {})
            blocks = (await page(deployment, d))["kvhandoff_engine_blocks"]
            assert blocks["loading" if path == "pull" else "granted",] > 0
            gate.closed = False
            assert (await asked)[0] == 200
            await deployment.settled()
            assert await leases(p) == {}
            assert await leases(d) == {"retained": kept + 1}
