"""The router's benchmark: its figures, and that its mock engines and load speak what they measure."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.router_figures import (
    Lone,
    Round,
    added,
    goals,
    growth,
    growth_goal,
    percentile,
    workers_goal,
)
from benchmarks.router_load import Load
from benchmarks.router_systems import Cores, System, SystemFailed, kvhandoff, mocks, set_pace

ROUND = Round(
    lone=(Lone(p50_s=0.002, p99_s=0.004),),
    requests_per_s=3000,
    busy=0.9,
    request_cpu_s=250e-6,
    token_cpu_s=20e-6,
    tokens_per_s=50_000,
    rss=50_000_000,
)


@pytest.mark.parametrize(
    ("values", "part", "expected"),
    [([1], 0.5, 1), ([1, 2, 3, 4], 0.5, 2), ([4, 3, 2, 1], 0.99, 4), (list(range(1, 101)), 0.99, 99)],
)
def test_percentile(values: list[float], part: float, expected: float) -> None:
    assert percentile(values, part) == expected


def test_added() -> None:
    assert added([5.0, 6.0, 9.0], [1.0, 1.5, 2.0]) == Lone(p50_s=4.5, p99_s=7.0)


def test_growth_is_what_goes_on() -> None:
    flat = [(n, 1000) for n in range(0, 120, 10)]
    assert growth(flat) == 0
    assert growth([*flat[:5], *((n, 900 + rss) for n, rss in flat[5:])]) == 0, "one step is no growth"
    assert growth([(n, 1000 + 7 * n) for n in range(0, 120, 10)]) == pytest.approx(7)
    assert growth([(n, 900 * (n // 30)) for n in range(0, 120, 10)]) > 0, "one in each stretch is"
    assert growth_goal(flat).holds
    assert not growth_goal([(n, 65 * n) for n in range(0, 120, 10)]).holds


def test_goals_are_ratios_of_the_same_round() -> None:
    slow = replace(ROUND, lone=(Lone(p50_s=0.004, p99_s=0.01),), request_cpu_s=500e-6, token_cpu_s=40e-6)
    ours = [ROUND, slow, slow]
    theirs = [
        replace(
            r,
            lone=[replace(lone, p50_s=2 * lone.p50_s) for lone in r.lone],
            request_cpu_s=r.request_cpu_s / 2,
        )
        for r in ours
    ]
    found = goals({"a": ours, "b": theirs}, "a", "b")
    assert [round(goal.value, 3) for goal in found] == [0.5, 1.0, 0.5]
    assert [goal.holds for goal in found] == [True, True, False]


def test_requests_of_a_core() -> None:
    assert ROUND.requests_per_core_s == pytest.approx(4000)


def test_workers_are_compared_with_one_core() -> None:
    fast = replace(ROUND, request_cpu_s=125e-6)
    goal = workers_goal(6000.0, [fast, ROUND, ROUND], 2, "b")
    assert (goal.name, goal.value, goal.holds) == (
        "requests/s of 2 cores with --workers 2, by b's of one",
        pytest.approx(1.5),
        True,
    )
    assert not workers_goal(3900.0, [ROUND], 2, "b").holds


@pytest.mark.processes
def test_a_round_trip_through_the_router(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed over by both mock engines, whose accounts come in; and wrong answers are found."""
    cores = tuple(os.sched_getaffinity(0))  # one does, for what is shown here
    everything = Cores(cores, cores)
    with mocks(everything) as urls, kvhandoff(urls, everything) as system:
        measured = system.run(Load(port=0, connections=4, requests=40, tokens=5))
        assert (measured.requests, measured.tokens, len(measured.ttft_s)) == (40, 200, 40)
        assert system.first == 40
        assert system.cpu_s() > 0
        assert system.rss() > 2**20
        page = asyncio.run(_metrics(system))
        assert 'path="pull"' in page
        assert 'path="local"' not in page
        set_pace(urls, 1.0)
        assert system.run(Load(port=0, connections=2, requests=4, tokens=3)).requests == 4
        stranger = replace(system, key="kvh_nobody")
        with pytest.raises(SystemFailed, match="status 401, 0 events of 2"):
            stranger.run(Load(port=0, requests=1))


async def _metrics(system: System) -> str:
    import aiohttp

    headers = {"Authorization": f"Bearer {system.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"http://127.0.0.1:{system.port}/metrics") as response,
    ):
        return await response.text()


def test_without_vllm_router(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import router_systems

    monkeypatch.setenv(router_systems.ROUTER_ENV, sys.executable)
    assert router_systems.vllm_router() == sys.executable
