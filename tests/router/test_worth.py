"""Whether a transfer is worth it (field case 54), and in which order (field case 46): what the policies make
of what they have learned, against what each path takes in truth (`machines.py`)."""

from __future__ import annotations

import random

import pytest

from kvhandoff.core.reasons import Reason
from kvhandoff.router.policy import FleetView, Policies
from kvhandoff.router.policy.path import PathDecision
from tests.router.machines import MACHINES, OTHERS_TOKENS, Machine, Order
from tests.router.test_policy import request

PATHS: tuple[Order, ...] = ("local", "pull", "push")
PROMPTS = (8, 64, 500, 4000, 32_000)
BUSY = 8
"""Requests on a decode engine that has something to do."""

machines = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


def chosen(machine: Machine, tokens: int, p_queue: int, running: int) -> PathDecision:
    """By engines whose accounts have been learned."""
    p = machine.engine("p", machine.learned(1), queue=p_queue * OTHERS_TOKENS, load=p_queue * OTHERS_TOKENS)
    d = machine.engine("d", machine.learned(2), running=running)
    summary = request(prompt_bound=tokens, prompt_exact=True)
    return Policies().choose_path("auto", summary, FleetView([p], [d]))


@pytest.mark.parametrize("p_queue", [0, 10])
@pytest.mark.parametrize("running", [0, BUSY])
@pytest.mark.parametrize("tokens", PROMPTS)
@machines
def test_the_path_is_within_a_tenth_of_the_best(
    machine: Machine, tokens: int, running: int, p_queue: int
) -> None:
    """Field case 54, cell by cell."""
    decision = chosen(machine, tokens, p_queue, running)
    costs = {path: machine.cost(path, tokens, p_queue, running) for path in PATHS}
    assert costs[decision.path] <= 1.1 * min(costs.values()), (decision, costs)
    if decision.expected is None:
        assert (decision.path, decision.reason) == ("local", Reason.SHORT_PROMPT)
        return
    assert set(decision.expected.ttft_s) == set(PATHS)
    assert decision.expected.won_by is not None
    assert (decision.reason is Reason.LOCAL_CHEAPER) == (decision.path == "local")


def test_no_single_path_would_do() -> None:
    """The cells differ: whichever path is taken everywhere, somewhere another takes less than half."""
    for path in PATHS:
        assert any(
            machine.cost(path, tokens, p_queue, running)
            > 2 * min(machine.cost(other, tokens, p_queue, running) for other in PATHS)
            for machine in MACHINES
            for tokens in PROMPTS
            for p_queue in (0, 10)
            for running in (0, BUSY)
        )


@machines
def test_push_is_never_used_where_it_loses(machine: Machine) -> None:
    """Field case 46, on one trace: a push in sequence takes longer than both a pull and a push at once, and
    what the router takes is as good as the better one of these."""
    rng = random.Random(5)
    trace = [(rng.choice((64, 300, 1000, 4000, 16_000)), rng.choice((0, 1, 4))) for _ in range(200)]
    total = dict.fromkeys(("pull", "push", "push in sequence", "chosen"), 0.0)
    pushed = 0
    for tokens, p_queue in trace:
        ttft = {order: machine.ttft(order, tokens, p_queue) for order in ("pull", "push", "push in sequence")}
        # A decode engine that has much to do, so that no prompt is computed there.
        path = chosen(machine, tokens, p_queue, running=1000).path
        assert path in ("pull", "push")
        assert ttft[path] <= 1.1 * ttft["pull"]
        pushed += path == "push"
        for order in ttft:
            total[order] += ttft[order]
        total["chosen"] += ttft[path]
    assert total["push in sequence"] > total["push"]
    assert total["chosen"] <= 1.01 * min(total["pull"], total["push"])
    assert pushed == 0 if machine.push_s > 0.1 else pushed > 0
