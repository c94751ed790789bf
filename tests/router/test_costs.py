"""What is learned of engines, and what the cost model makes of it."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import LegRecord
from kvhandoff.router.policy import (
    UNMEASURED,
    EngineCosts,
    EngineView,
    Estimate,
    FleetView,
    History,
    Speed,
    expected_costs,
    learn,
    learn_leg,
    tokens_of,
)
from kvhandoff.router.policy.estimates import CLIP
from kvhandoff.router.policy.options import Cost
from kvhandoff.router.policy.path import choose_path
from tests.router.test_policy import engine, request

# ---------------------------------------------------------------------------------------------- estimates

POSITIVE = st.floats(1e-6, 1e6)


@given(POSITIVE, st.floats(1e-4, 1e4))
def test_an_estimate_comes_to_what_is_observed(prior: float, factor: float) -> None:
    value = prior * factor
    estimate = reduce(lambda e, _: e.observe(value), range(500), Estimate(prior))
    assert estimate.value == pytest.approx(value, rel=0.01)
    assert estimate.n == 500


@given(POSITIVE, st.floats(0, 1e12), st.integers(0, 100))
def test_one_observation_is_not_believed_beyond_bounds(value: float, seen: float, n: int) -> None:
    after = Estimate(value, n).observe(seen).value
    low, high = sorted((value, min(max(seen, value / CLIP), value * CLIP)))
    assert low * (1 - 1e-9) <= after <= high * (1 + 1e-9)


def test_disturbed_legs_move_it_little() -> None:
    """A quarter of the legs took five times as long, since others ran beside them."""
    legs = [1.0, 1.0, 5.0, 1.0] * 50
    estimate = reduce(Estimate.observe, legs, Estimate(3.0))
    assert 1.0 <= estimate.value < 1.3


# ----------------------------------------------------------------------------------------------- learning


def leg(role: str, phases: dict[str, float], **fields: Any) -> LegRecord:
    return LegRecord(handoff_id="h", attempt=0, leg=role, engine_id="e", epoch="1", phases=phases, **fields)


def learned(*legs: LegRecord) -> EngineCosts:
    return reduce(learn, legs * 500, UNMEASURED)


def unlike(costs: EngineCosts) -> dict[str, float]:
    """What has been measured."""
    estimates = {name: getattr(costs, name) for name in costs.__slots__}
    estimates["compute_s"] = costs.compute_s.at(0)
    return {name: estimate.value for name, estimate in estimates.items() if estimate.n}


@pytest.mark.parametrize(
    ("record", "measured"),
    [
        (leg("prefill", {"prefill_compute": 2.0}, computed_tokens=1000), {"compute_s": 0.002}),
        (leg("local", {"decode_queue": 9.0, "recompute": 2.0}, computed_tokens=1000), {"compute_s": 0.002}),
        (
            leg(
                "prefill",
                {"return": 0.5, "prefill_compute": 0.1},
                computed_tokens=100,
                transferred_tokens=1000,
                bytes=10**8,
            ),
            {"compute_s": 0.001, "token_bytes": 1e5, "read_s": 5e-9},
        ),
        (
            leg(
                "decode",
                {
                    "decode_queue": 0.02,
                    "post": 0.1,
                    "wire": 0.3,
                    "claim": 0.01,
                    "detect": 0.03,
                    "recompute": 0.02,
                },
                computed_tokens=1,
                transferred_tokens=1000,
                bytes=10**8,
            ),
            {"token_bytes": 1e5, "read_s": 4e-9, "pull_s": 0.06},
        ),
        (
            # The last 10 MB take 5 ms at the prior's 2 GB/s.
            leg(
                "decode",
                {"decode_queue": 0.02, "await_prefill": 2.0, "write_tail": 0.025, "detect": 0.01},
                transferred_tokens=1000,
                bytes=10**8,
                early_bytes=9 * 10**7,
            ),
            {"token_bytes": 1e5, "push_s": 0.05},
        ),
        (leg("prefill", {"prefill_compute": 2.0}, computed_tokens=63), {}),
        (leg("prefill", {}, computed_tokens=1000), {}),
        (leg("decode", {"await_prefill": 2.0}, bytes=10**8), {}),
        (leg("brand_new", {}, bytes=5, transferred_tokens=5), {"token_bytes": 1.0}),
    ],
)
def test_what_a_leg_teaches(record: LegRecord, measured: dict[str, float]) -> None:
    assert unlike(learned(record)) == pytest.approx(measured, rel=0.01)


# Seconds per token, as measured with SmolLM2-135M: (cached, returned, computed) tokens of a leg.
LENGTHS = {
    (0, 0, 1000): 0.00126,
    (0, 0, 2000): 0.00148,
    (0, 0, 4000): 0.0022,
    (0, 0, 8000): 0.0036,
    (0, 7888, 112): 0.0070,
    (8200, 0, 100): 0.0072,
}


def test_long_prompts_are_learned_apart_from_short_ones() -> None:
    legs = [
        leg(
            "prefill",
            {"prefill_compute": computed * token_s},
            cached_tokens=cached,
            transferred_tokens=returned,
            computed_tokens=computed,
        )
        for (cached, returned, computed), token_s in LENGTHS.items()
    ]
    speed = learned(*legs).compute_s
    for (cached, returned, computed), token_s in LENGTHS.items():
        assert speed.at(cached + returned + computed / 2).value == pytest.approx(token_s, rel=0.1)
    assert speed.at(10**7) == speed.at(9000)  # the nearest one that has been measured
    costs = replace(MEASURED, compute_s=speed)
    p, d = engine("p", costs=costs, queue=8000, running=8), engine("d", costs=costs)
    options = expected_costs(FleetView([p], [d]), p, d, 8000)
    assert options["local"].compute == pytest.approx(8000 * 0.0036, rel=0.1)
    assert options["pull"].queue == pytest.approx(8000 * 0.00126, rel=0.1)  # eight short ones
    one = replace(p, running=1)
    assert expected_costs(FleetView([one], [d]), one, d, 500)["pull"].queue == pytest.approx(28.8, rel=0.1)
    turn = expected_costs(FleetView([one], [d]), one, d, 8000, History("d", 7888))
    assert turn["local"].compute == pytest.approx(0.78, rel=0.1)


def test_a_band_without_measurements_takes_those_of_the_nearest() -> None:
    speed = Speed.same(Estimate(1.0)).observe(0, 4.0)
    assert speed.n == 1
    assert speed.at(0) == speed.at(100) == speed.at(10**6) == Estimate(2.0, 1)
    both = speed.observe(5000, 8.0)
    assert both.at(5000) == Estimate(4.0, 1)  # from 2, not from the prior
    assert (both.at(511).value, both.at(512).value, both.at(9000).value) == (2.0, 4.0, 4.0)


def test_what_the_routers_own_account_teaches() -> None:
    phases = {
        "route": 5.0,
        "prefill_network": 0.01,
        "prefill_tokenize": 0.04,
        "prefill_offer": 0.02,
        "bind": 0.03,
        "wire": 7.0,
    }
    costs = reduce(lambda costs, _: learn_leg(costs, phases), range(500), UNMEASURED)
    assert unlike(costs) == pytest.approx({"leg_s": 0.1}, rel=0.01)


@pytest.mark.parametrize(("awaited", "beside_s"), [(2.05, 0.05), (1.0, 0.0)])
def test_what_a_pushed_leg_teaches(awaited: float, beside_s: float) -> None:
    """What the decode engine has waited for it beyond its own account of queue, return and computing."""
    phases = {"await_prefill": awaited, "write_tail": 3.0}
    beside = {"prefill_network": 9.0, "prefill_queue": 0.5, "return": 0.3, "prefill_compute": 1.2}
    costs = reduce(lambda costs, _: learn_leg(costs, phases, beside), range(500), UNMEASURED)
    assert unlike(costs) == pytest.approx({"beside_s": beside_s}, rel=0.01, abs=1e-9)


def test_text_is_measured() -> None:
    fleet = FleetView([], [], tokens_per_byte=0.25)
    assert tokens_of(request(prompt_bound=1000), fleet) == 250
    assert tokens_of(request(prompt_bound=1000, prompt_exact=True), fleet) == 1000
    assert tokens_of(request(prompt_bound=0), fleet) == 1


# --------------------------------------------------------------------------------------------- the choice

MEASURED = EngineCosts(
    compute_s=Speed.same(Estimate(0.001, 9)),
    read_s=Estimate(1e-9, 9),
    token_bytes=Estimate(1e5, 9),
    pull_s=Estimate(0.01, 9),
    push_s=Estimate(0.015, 9),
    leg_s=Estimate(0.03, 9),
    beside_s=Estimate(0.005, 9),
)


def measured(url: str, **fields: Any) -> EngineView:
    changed: dict[str, Any] = {
        name: Estimate(fields.pop(name), 9) for name in MEASURED.__slots__ & fields.keys()
    }
    if "compute_s" in changed:
        changed["compute_s"] = Speed.same(changed["compute_s"])
    costs = replace(MEASURED, **changed)
    return engine(url, costs=costs, **({"room": 10**6} | fields))


def costs(p: EngineView, d: EngineView, tokens: int, history: History | None = None, cached: int = 0) -> Any:
    return expected_costs(FleetView([p], [d]), p, d, tokens, history, cached=cached)


def near(*terms: float) -> Any:
    return pytest.approx(terms, abs=1e-9)


def test_the_costs_of_a_new_prompt() -> None:
    p, d = measured("p", queue=500), measured("d", queue=100, running=3)
    options = costs(p, d, 2000)
    assert options == {
        #             queue compute return wire coordination harm
        "local": near(0.1, 2.0, 0.0, 0.0, 0.0, 6.0),
        "pull": near(0.5, 2.0, 0.0, 0.2, 0.04, 0.0),
        "push": near(0.5, 2.0, 0.0, 0.0512, 0.02, 0.0),
    }
    assert (options["local"].ttft, options["local"].total) == (2.1, 8.1)


def test_the_costs_of_a_next_turn() -> None:
    """1500 of 2000 tokens are kept by the decode engine, and 1200 of them cached by the prefill engine."""
    p, d = measured("p"), measured("d")
    options = costs(p, d, 2000, History("d", 1500), cached=1200)
    assert options == {
        "local": near(0.0, 0.5, 0.0, 0.0, 0.0, 0.5),
        "pull": near(0.0, 0.8, 0.0, 0.05, 0.04, 0.0),
        "pull+return": near(0.0, 0.5, 0.04, 0.05, 0.04, 0.0),
        "push": near(0.0, 0.8, 0.0, 0.05, 0.02, 0.0),
        "push+return": near(0.0, 0.5, 0.04, 0.05, 0.02, 0.0),
    }
    elsewhere = costs(p, d, 2000, History("d2", 1500))
    assert elsewhere["local+return"] == near(0.0, 0.5, 0.16, 0.0, 0.0, 0.5)
    assert elsewhere["pull+return"] == near(0.0, 0.5, 0.16, 0.2, 0.04, 0.0)
    assert elsewhere["local"] == near(0.0, 2.0, 0.0, 0.0, 0.0, 2.0)
    required = costs(p, d, 2000, History("d2", 1500, required=True))
    assert set(required) == {"local+return", "pull+return", "push+return"}
    # Nothing is left to be returned to an engine that has it all; the last token is computed all the same.
    all_there = costs(p, d, 2000, History("d", 9999), cached=9999)
    assert all_there["pull"] == near(0.0, 0.001, 0.0, 0.0001, 0.04, 0.0)
    assert set(all_there) == {"local", "pull", "push"}


def test_a_write_is_hidden_only_behind_computing() -> None:
    """10 s on the wire, 2 s of computing."""
    options = costs(measured("p"), measured("d", read_s=5e-8), 2000)
    assert options["push"].wire == pytest.approx(8.0)
    assert options["pull"].wire == pytest.approx(10.0)


def test_what_is_not_measured_is_taken_from_engines_like_it() -> None:
    """An engine that has computed nothing yet is as fast as the others of its model: their geometric mean."""
    p, d = measured("p", compute_s=0.001), engine("d", room=10**6)
    p2 = measured("p2", compute_s=0.004)
    other = measured("p3", compute_s=5.0, model="other")
    assert expected_costs(FleetView([p, p2, other], [d]), p, d, 1000)["local"].compute == pytest.approx(2.0)
    assert expected_costs(FleetView([engine("p")], [d]), p, d, 1000)["local"].compute == pytest.approx(0.5)


def chosen(p: EngineView, d: EngineView, tokens: int, history: History | None = None) -> Any:
    return choose_path("auto", request(prompt_bound=tokens), FleetView([p], [d]), history)


@pytest.mark.parametrize(
    ("p", "d", "path", "why"),
    [
        ({}, {}, "push", "wire"),
        ({}, {"push_s": 0.5}, "pull", "coordination"),
        ({}, {"waiting": 1}, "pull", "harm"),
        ({"queue": 10_000}, {}, "local", "queue"),
        ({"queue": 10_000}, {"running": 20}, "push", "wire"),
        ({"compute_s": 0.01}, {}, "local", "compute"),
        ({}, {"read_s": 1e-6}, "local", "wire"),
    ],
)
def test_the_choice_follows_what_is_measured(
    p: dict[str, Any], d: dict[str, Any], path: str, why: str
) -> None:
    decision = chosen(measured("p", **p), measured("d", **d), 2000)
    assert decision.path == path
    assert decision.reason == (Reason.LOCAL_CHEAPER if path == "local" else None)
    assert decision.expected is not None
    assert decision.expected.won_by == why


def test_a_mostly_cached_prompt_is_computed_where_it_is_cached() -> None:
    decision = chosen(measured("p"), measured("d", read_s=1e-8), 2000, History("d", 1990))
    assert (decision.path, decision.reason) == ("local", Reason.LOCAL_CHEAPER)


def test_a_history_that_takes_longer_to_fetch_than_to_compute_is_computed() -> None:
    p, d = measured("p", read_s=1e-7), measured("d", running=99)
    assert chosen(p, d, 2000, History("d", 1000))[:3] == ("push", None, False)
    assert chosen(p, d, 2000, History("d", 1000, required=True))[:3] == ("push", None, True)
    assert chosen(measured("p"), d, 2000, History("d", 1000))[:3] == ("push", None, True)


def test_the_statement_is_small_and_whole() -> None:
    decision = chosen(measured("p"), measured("d"), 2000)
    expected = decision.expected
    assert expected is not None
    assert (expected.prompt_tokens, expected.text_bytes) == (2000, 2000)
    assert expected.ttft_s == {"local": 2.0, "pull": 2.24, "push": 2.0712}
    assert expected.harm_s == {"local": 2.0}
    assert Cost(1, 2, 3, 4, 5, 6).ttft == 15
