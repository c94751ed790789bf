"""The policy study asks every binding the same, and puts its figures together right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.deployment import Setup, deployment
from benchmarks.path_runs import Prompts
from benchmarks.policies import LOAD
from benchmarks.policy_costs import (
    CHOICES,
    Measured,
    Regime,
    Verdict,
    cost_goals,
    errors_under_load,
    harm,
    measure_costs,
    modelled,
    prior,
    verdict,
)
from benchmarks.policy_figures import (
    PARTS,
    early_share,
    fallbacks,
    goals,
    mean_parts,
    other_answers,
    over_scenes,
    parts,
    percentile,
    ratio,
    slowest_tenth,
    tpots,
    ttfts,
    unused_bytes,
    why_unequal,
)
from benchmarks.policy_plot import page, plot
from benchmarks.policy_runs import (
    BINDINGS,
    ROUTERS,
    WAYS,
    Binding,
    Other,
    Play,
    Probe,
    body_of,
    play_all,
    token_ids_of,
)
from benchmarks.policy_tables import add_bindings, binding_report, learned_report, parts_report
from benchmarks.policy_trace import Load, make_scene
from benchmarks.small_model import SHAPE, small_model

from kvhandoff.core.ids import new_handoff_id
from kvhandoff.core.phases import Phase
from kvhandoff.core.reasons import Reason
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy.options import Expected
from kvhandoff.router.records import Draft, RequestRecord

VOCABULARY = 384

# ------------------------------------------------------------------------------------------------ the trace


def test_a_scene_is_the_same_each_time_and_each_scene_another() -> None:
    assert make_scene(LOAD, VOCABULARY, 7, 3) == make_scene(LOAD, VOCABULARY, 7, 3)
    assert make_scene(LOAD, VOCABULARY, 7, 3) != make_scene(LOAD, VOCABULARY, 7, 4)
    assert make_scene(LOAD, VOCABULARY, 7, 3) != make_scene(LOAD, VOCABULARY, 8, 3)


def test_probes_come_at_their_rate_with_prompts_of_their_own() -> None:
    scenes = [make_scene(LOAD, VOCABULARY, 0, index) for index in range(100)]
    probes = [a for scene in scenes for a in scene.arrivals if a.engine is None]
    assert sum(scene.probes for scene in scenes) == len(probes)
    assert len(probes) == pytest.approx(100 * LOAD.scene_s * LOAD.groups_per_s * LOAD.group_probes, rel=0.1)
    least, most = LOAD.probe_tokens
    assert all(least <= len(probe.prompt) <= most for probe in probes)
    assert all(0 <= probe.at_s < LOAD.scene_s for scene in scenes for probe in scene.arrivals)
    assert len({tuple(arrival.prompt) for scene in scenes for arrival in scene.arrivals}) == sum(
        len(scene.arrivals) for scene in scenes
    )


def test_a_scene_has_a_probe_however_short_it_is() -> None:
    assert make_scene(replace(LOAD, scene_s=1e-9), VOCABULARY, 0, 0).probes == LOAD.group_probes


def test_each_burst_heats_another_engine_than_the_one_before() -> None:
    load = replace(LOAD, scene_s=50.0)
    scene = make_scene(load, VOCABULARY, 0, 0)
    assert [a.at_s for a in scene.arrivals] == sorted(a.at_s for a in scene.arrivals)
    heated = []
    for step in range(int(load.scene_s / load.burst_every_s)):
        start = step * load.burst_every_s
        burst = [
            a for a in scene.arrivals if a.engine is not None and start <= a.at_s < start + load.burst_every_s
        ]
        assert len(burst) == load.burst_requests
        assert all(a.at_s <= start + load.burst_s for a in burst)
        assert all((len(a.prompt), a.answer_tokens) == (load.burst_tokens, load.burst_answer) for a in burst)
        [engine] = {a.engine for a in burst}
        heated.append(engine)
    assert set(heated) == set(range(load.engines))
    assert all(a != b for a, b in pairwise(heated))


def test_bindings_differ_by_nothing_but_the_binding() -> None:
    assert {WAYS[name].path for name in ("early", "rebind")} == {"push"}
    assert (WAYS["late"].path, WAYS["auto"].path) == ("pull", "auto")
    assert {name: ROUTERS[way.router] for name, way in WAYS.items() if way.router != "default"} == {
        "rebind": ("--binding", "rebind")
    }


def test_token_ids_of_a_stream() -> None:
    event = b'data: {"choices": [{"index": 0, "text": "a", "token_ids": [5, 6]}]}\n\n'
    last = b'data: {"choices": [{"index": 0, "text": "", "token_ids": [7]}]}\n\ndata: [DONE]\n\n'
    assert token_ids_of(event + last) == (5, 6, 7)
    assert token_ids_of(b'data: {"error": {"message": "gone"}}\n\n') == ()
    body = msgspec.json.decode(body_of([1, 2], 9))
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([1, 2], 9, 0)
    assert body["return_token_ids"]
    assert body["ignore_eos"]


# ---------------------------------------------------------------------------------------------- the figures


def record(**changes: Any) -> RequestRecord:
    draft = Draft(new_handoff_id(), endpoint=Endpoint.COMPLETIONS, requested_path="push", on_reason=print)
    served: dict[str, Any] = {"path": "push", "attempts": 1, "status": 200, "prompt_tokens": 1000}
    return msgspec.structs.replace(draft.record(), **served | changes)


def probe(ttft_s: float = 1.0, tpot_s: float = 0.01, tokens: Sequence[int] = (1, 2), **changes: Any) -> Probe:
    return Probe(ttft_s, tpot_s, tuple(tokens), record(**changes))


def play(scene: int, *probes: Probe, **changes: Any) -> Play:
    return replace(Play(scene, list(probes), [Other(0.02)], [], [1.5]), **changes)


def of(*seconds: float) -> list[Play]:
    """A scene of one probe for each TTFT."""
    return [play(index, probe(ttft_s)) for index, ttft_s in enumerate(seconds)]


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 1, 50, 99, 99.5, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_a_percentile_is_over_all_probes_not_of_scenes() -> None:
    plays = [play(0, probe(1.0), probe(2.0), probe(3.0)), play(1, probe(100.0, 0.5))]
    assert over_scenes(plays, ttfts, 50) == 2.0
    assert over_scenes(plays, ttfts, 99) == 100.0
    assert over_scenes(plays, tpots, 99) == 0.5


def test_a_ratio_and_what_it_is_worth() -> None:
    ours, theirs = of(1.0, 2.0, 3.0), of(2.0, 4.0, 6.0)
    exact = ratio(ours, theirs, ttfts, 99)
    assert (exact.value, exact.low, exact.high) == (0.5, 0.5, 0.5)  # the same scenes are drawn for both
    unsure = ratio(of(1.0, 1.0, 9.0), of(3.0, 3.0, 3.0), ttfts, 99)
    assert (unsure.value, unsure.low, unsure.high) == pytest.approx((3.0, 1 / 3, 3.0))
    assert str(unsure) == "3.00 (0.33–3.00)"
    assert ratio(of(1.0, 1.0, 9.0), of(3.0, 3.0, 3.0), ttfts, 99) == unsure


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        ([], "no scenes"),
        (of(1.0), "not the same scenes"),
        ([play(0, probe()), play(2, probe())], "not the same scenes"),
        ([play(0, probe()), play(1)], "scene 1: not the same number of answers"),
        ([play(0, probe()), play(1, probe(), others=[])], "scene 1: not the same number of answers"),
        ([play(0, probe(prompt_tokens=999)), play(1, probe())], "scene 0: not the same prompts"),
        ([play(0, probe()), play(1, probe(), failures=["HTTP 503"])], "scene 1: 1 without an answer, .*503"),
    ],
)
def test_unequal_runs_are_not_compared(ours: list[Play], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ratio(ours, of(1.0, 1.0), ttfts, 99)
    if ours:
        with pytest.raises(ValueError, match=why):
            ratio(of(1.0, 1.0), ours, ttfts, 99)
    assert why_unequal(of(1.0, 2.0), of(3.0, 4.0)) is None


def test_other_text_is_seen() -> None:
    same = {name: [play(0, probe(tokens=(1, 2)), probe(tokens=(3, 4)))] for name in BINDINGS}
    assert other_answers(same, "late") == 0
    changed = same | {"early": [play(0, probe(tokens=(1, 2)), probe(tokens=(3, 5)))]}
    assert other_answers(changed, "late") == 1


def test_bytes_that_nobody_used() -> None:
    """900 were written: 600 for the push that was answered; the 500 of a pull were read."""
    plays = [play(0, probe(bytes=600, early_bytes=450), probe(path="pull", bytes=500), written_bytes=900)]
    assert unused_bytes(plays) == 300
    assert early_share(plays) == 0.75
    assert early_share([play(0, probe(path="pull", bytes=500))]) is None


def test_only_declines_and_failures_are_fallbacks() -> None:
    plays = [play(0, probe(reasons=[Reason.FORCED, Reason.REBOUND, Reason.REVOKED])), *of(1.0)]
    assert fallbacks(plays) == {Reason.REVOKED: 1}


def test_every_phase_is_in_one_part() -> None:
    named = [phase for phases in PARTS.values() for phase in phases]
    assert sorted(named) == sorted(Phase)
    each = {phase: 2.0**index for index, phase in enumerate(Phase)}
    split = parts(probe(2.0**30, phases=each))
    assert sum(split.values()) == 2.0**30
    assert split["D queue"] == each[Phase.DECODE_TOKENIZE] + each[Phase.DECODE_QUEUE]
    assert split["client"] == 2.0**30 - sum(each.values())
    means = mean_parts([probe(4.0, phases={Phase.WIRE: 1.0}), probe(2.0, phases={Phase.POST: 2.0})])
    assert (means["handoff"], means["client"], sum(means.values())) == (1.5, 1.5, 3.0)


def test_the_slowest_tenth() -> None:
    plays = [play(0, *(probe(float(ttft_s)) for ttft_s in range(15))), play(1, *(probe(99.0),) * 5)]
    assert [each.ttft_s for each in slowest_tenth(plays)] == [99.0, 99.0]
    assert [each.ttft_s for each in slowest_tenth(of(3.0, 5.0))] == [5.0]


def bindings(**changed: list[Play]) -> dict[Binding, list[Play]]:
    usual: dict[Binding, list[Play]] = {name: of(1.0, 2.0) for name in BINDINGS}
    usual["rebind"] = [play(0, probe(1.0, rebound=1)), play(1, probe(2.0))]
    for name in BINDINGS:
        usual[name] = changed.get(name, usual[name])
    return usual


def held(plays: dict[Binding, list[Play]]) -> dict[str, bool]:
    return {goal.name: goal.holds for goal in goals(plays)}


def test_goals() -> None:
    assert list(held(bindings())) == [
        "requests without a whole answer",
        "answers that differ from late binding's",
        "re-binds",
        "TTFT p99: re-bound by early",
        "TPOT p99: re-bound by early",
        "TTFT p50: auto by the best of the others",
        "TTFT p99: auto by the best of the others",
    ]
    assert all(held(bindings()).values())


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"rebind": of(1.0, 2.0)}, {"re-binds"}),
        (
            {"early": of(1.0, 1.9)},
            {"TTFT p99: re-bound by early", "TTFT p99: auto by the best of the others"},
        ),
        (
            {"early": [play(0, probe(1.0)), play(1, probe(2.0, 0.01, (1, 3)))]},
            {"answers that differ from late binding's"},
        ),
        (
            {"early": [play(0, probe(1.0, 0.009)), play(1, probe(2.0, 0.009))]},
            {"TPOT p99: re-bound by early"},
        ),
        ({"auto": of(1.2, 2.0)}, {"TTFT p50: auto by the best of the others"}),
    ],
)
def test_goals_that_are_missed(changed: dict[str, list[Play]], missed: set[str]) -> None:
    found = held(bindings(**changed))
    assert {name for name, holds in found.items() if not holds} - {
        "TTFT p99: auto by the best of the others"
    } == missed - {"TTFT p99: auto by the best of the others"}


def test_after_a_failure_nothing_is_compared() -> None:
    broken = bindings(late=[play(0, probe()), play(1, failures=["HTTP 502"])])
    assert held(broken) == {"requests without a whole answer": False}


# ------------------------------------------------------------------------------------------- learned costs


def costed(path: str, ttft_s: float, phases: dict[str, float] | None = None, **changes: Any) -> RequestRecord:
    return record(path=path, ttft_s=ttft_s, phases=phases or {}, **changes)


def expected(local: float, pull: float, push: float) -> Expected:
    times = {"local": local, "pull": pull, "push": push}
    return Expected(prompt_tokens=1, text_bytes=None, ttft_s=times, harm_s={}, won_by=None)  # type: ignore[arg-type]


def test_what_all_paths_have_is_left_out() -> None:
    phases = {"route": 1.0, "decode_network": 2.0, "decode_tokenize": 4.0, "first_step": 8.0, "wire": 16.0}
    assert modelled(costed("pull", 31.5, phases)) == 16.5
    with pytest.raises(ValueError, match="without TTFT"):
        modelled(record())


def test_harm_is_computing_on_the_decode_engine() -> None:
    assert harm(costed("local", 9.0, {"recompute": 2.0}), 3) == 6.0
    assert harm(costed("local", 9.0, {"recompute": 2.0}), 0) == 2.0
    assert harm(costed("push", 9.0, {"recompute": 2.0}), 3) == 0.0


REGIME = Regime(name="r", tokens=1000, busy=2)


def judged(auto: Sequence[RequestRecord]) -> Verdict:
    forced = {
        "local": [costed("local", ttft_s, {"recompute": 1.0}) for ttft_s in (1.0, 2.0, 9.0)],
        "pull": [costed("pull", 5.0)] * 3,
        "push": [costed("push", 3.0)] * 3,
    }
    return verdict(Measured(REGIME, {**forced, "auto": auto}, 3), 16, "m")


def test_a_verdict() -> None:
    auto = [costed(path, 0.0, expected=expected(1.0, 5.0, 6.0)) for path in ("push", "push", "pull")]
    found = judged(auto)
    assert found.measured_s == {"local": 2.0, "pull": 5.0, "push": 3.0}
    assert found.cost_s == {"local": 4.0, "pull": 5.0, "push": 3.0}
    assert found.cheapest == "push"
    assert found.regret == pytest.approx((3 + 3 + 5) / 3 / 3)
    assert found.ended == 3
    assert [found.error(path, found.expected_s) for path in ("local", "pull", "push")] == [0.5, 0.0, 1.0]
    assert found.prior_s["local"] == pytest.approx(0.5)  # 1000 tokens at the prior's 2000 tokens/s
    assert found.prior_s == prior(REGIME, 16, "m")
    goals = {goal.name: (goal.value, goal.holds) for goal in cost_goals([found])}
    assert goals == {
        "expected TTFT of local, median relative error over the regimes": (0.5, False),
        "expected TTFT of pull, median relative error over the regimes": (0.0, True),
        "expected TTFT of push, median relative error over the regimes": (1.0, False),
        "cost of auto's path by the cheapest, worst regime (r)": (pytest.approx(11 / 9), False),
    }


def test_a_path_that_could_not_be_taken_was_not_expected() -> None:
    both = expected(1.0, 5.0, 6.0)
    without = msgspec.structs.replace(both, ttft_s={"local": 1.0, "pull": 7.0})
    found = judged([costed("pull", 0.0, expected=each) for each in (both, without)])
    assert found.expected_s == {"local": 1.0, "pull": 6.0, "push": 6.0}
    none = judged([costed("pull", 0.0, expected=without)])
    assert none.expected_s == {"local": 1.0, "pull": 7.0}
    assert none.error("push", none.expected_s) is None
    assert len(cost_goals([none])) == 3


def test_a_choice_without_the_model_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="did not decide"):
        judged([costed("local", 1.0)])


def test_errors_under_load_are_those_of_the_path_that_was_taken() -> None:
    plays = [
        play(
            0,
            Probe(1, 1, (), costed("pull", 4.0, expected=expected(9, 5, 9))),
            Probe(1, 1, (), costed("local", 2.0, expected=expected(1, 9, 9))),
            Probe(1, 1, (), costed("push", 2.0, expected=expected(9, 9, 9), attempts=2)),
            Probe(1, 1, (), costed("local", 2.0)),
        )
    ]
    assert errors_under_load(plays) == {"local": [0.5], "pull": [0.25], "push": []}


# ------------------------------------------------------------------------------------------------ the report


def test_the_page_has_every_table_and_goal() -> None:
    setup = Setup(
        model_dir=Path("m"),
        transport="shm",
        threads=1,
        kv_gib=1,
        chunk=64,
        prefill_cache=False,
        decode_cache=False,
    )
    plays = bindings(early=of(0.5, 1.0))
    report = binding_report(setup, LOAD, 2, 0)
    add_bindings(report, plays)
    auto = [costed("push", 0.0, expected=expected(1.0, 5.0, 6.0))]
    learned = learned_report(setup, [judged(auto)], 3, plays["auto"])
    text = page([report, parts_report(setup, plays), learned], "p.svg")
    rows = {row[0]: dict(zip(report.columns, row, strict=True)) for row in report.rows}
    assert rows["rebind"]["re-binds"] == "1"
    assert [row[5] for row in learned.rows] == ["2000.0", "5000.0", "3000.0"]
    for line in (
        "| rebind | 2 | 1.000 | 2.000 | ",
        "| early, slowest | 1 | 1000.0 | ",
        "| TTFT p99: re-bound by early | <= 1 | 2 | **not met** |",
        "| re-binds | >= 1 | 1 | holds |",
        "- seed: 0",
    ):
        assert line in text, text


def test_the_picture_has_every_binding_and_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(bindings(), tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    for label in (*BINDINGS, *PARTS, "client", "TTFT", "TPOT"):
        assert f"<!-- {label} -->" in text


# --------------------------------------------------------------------------------------------- on processes

SMALL = SHAPE | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SHORT = Load(
    scene_s=1.2,
    groups_per_s=2.0,
    group_probes=2,
    probe_tokens=(100, 200),
    probe_answer=4,
    burst_every_s=0.6,
    burst_s=0.2,
    burst_requests=2,
    burst_tokens=80,
    burst_answer=4,
    engines=2,
)


@pytest.mark.processes
def test_on_processes(tmp_path: Path) -> None:
    """Scenes under every binding, and forced paths, on real engines."""
    setup = Setup(
        model_dir=small_model(SMALL, tmp_path),
        transport="shm",
        threads=1,
        kv_gib=0.05,
        decode_kv_gib=0.02,
        chunk=64,
        prefill_cache=False,
        decode_cache=False,
        decode_engines=2,
        exact=True,
    )
    scenes = [make_scene(SHORT, VOCABULARY, 0, index) for index in range(2)]
    regime = Regime(name="all", tokens=150, ahead=1, busy=1)
    advances: list[str] = []
    with deployment(setup, ROUTERS) as served:
        assert list(served.engines) == ["prefill", "decode-0", "decode-1"]
        plays = play_all(served, scenes, lambda: advances.append("scene"))
        measured = measure_costs(served, Prompts(VOCABULARY), [regime], 1, lambda: advances.append("cost"))
    assert advances == 8 * ["scene"] + len(CHOICES) * ["cost"]
    for binding, played in plays.items():
        assert why_unequal(played, plays["late"]) is None
        for each, scene in zip(played, scenes, strict=True):
            prompts = [len(arrival.prompt) for arrival in scene.arrivals if arrival.engine is None]
            assert [each.record.prompt_tokens for each in each.probes] == prompts
            for one in each.probes:
                assert one.record.completion_tokens == len(one.token_ids) == SHORT.probe_answer
                assert WAYS[binding].path in ("auto", one.record.path) or one.record.rebound
                assert sum(parts(one).values()) == pytest.approx(one.ttft_s)
            assert len(each.others) == 4
            assert all(1 <= value <= 2 for value in each.imbalance)
    assert other_answers(plays, "late") == 0
    assert unused_bytes(plays["early"]) == unused_bytes(plays["late"]) == 0
    [found] = [verdict(each, 16, "benchmarked") for each in measured]
    assert all(seconds > 0 for seconds in (*found.measured_s.values(), *found.expected_s.values()))
    assert len(found.chosen) == 1
