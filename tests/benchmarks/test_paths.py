"""The paths benchmark puts its figures together right, on records made by hand and on real processes."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import msgspec
import pytest
from benchmarks.deployment import Answer, Setup, deployment
from benchmarks.path_figures import (
    PARTS,
    Medians,
    early_goal,
    require,
    return_goal,
    split,
    wait_goal,
)
from benchmarks.path_runs import Cell, Prompts, measure_paths, measure_return
from benchmarks.path_tables import add_path_goals, add_paths, add_return, path_report, return_report
from benchmarks.paths import _check_lengths, _options

from kvhandoff.core.ids import new_handoff_id
from kvhandoff.core.phases import Phase
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import Path
from kvhandoff.router.records import Draft, RequestRecord
from tests.tinymodels import cached_tiny_model

CHUNK = 64
# Powers of two: a sum says which of them are in it.
EACH = {phase: 2.0**index for index, phase in enumerate(Phase)}


def record(asked: Path, phases: dict[str, float], **changes: Any) -> RequestRecord:
    """Of a request that was served as asked, unless changed."""
    draft = Draft(new_handoff_id(), endpoint=Endpoint.COMPLETIONS, requested_path=asked, on_reason=print)
    served: dict[str, Any] = {"path": asked, "attempts": 1, "status": 200, "phases": phases, "bytes": 800}
    served["kv_source"] = "local" if asked == "local" else "transferred"
    return msgspec.structs.replace(draft.record(), **served | changes)


def answer(path: Path, phases: dict[str, float], ttft_s: float = 2.0**30, **changes: Any) -> Answer:
    return Answer(ttft_s, record(path, phases, **changes))


def pulled(wait: float) -> Answer:
    return answer("pull", {Phase.WIRE: wait})


def pushed(wait: float = 0.0, *, early: int = 0) -> Answer:
    return answer("push", {Phase.WRITE_TAIL: wait}, early_bytes=early)


def total(*phases: Phase) -> float:
    return sum(EACH[phase] for phase in phases)


def test_parts_of_a_pull():
    parts = split(answer("pull", dict(EACH)))
    assert parts["queue"] == total(Phase.PREFILL_QUEUE)
    assert parts["return"] == total(Phase.RETURN)
    assert parts["compute"] == total(Phase.PREFILL_COMPUTE)
    assert parts["wait"] == total(
        *(Phase.PREFILL_OFFER, Phase.BIND, Phase.DECODE_NETWORK, Phase.DECODE_TOKENIZE, Phase.DECODE_QUEUE),
        *(Phase.POST, Phase.WIRE, Phase.CLAIM, Phase.DETECT),
    )
    assert parts["first"] == total(Phase.RECOMPUTE, Phase.FIRST_STEP)
    assert sum(parts.values()) == 2.0**30


def test_parts_of_a_push_take_the_prefill_leg_from_beside():
    beside = {phase: 2.0**24 * (1 + index) for index, phase in enumerate(Phase)}
    parts = split(answer("push", dict(EACH), prefill_phases=beside))
    assert parts["queue"] == beside[Phase.PREFILL_QUEUE]
    assert parts["compute"] == beside[Phase.PREFILL_COMPUTE]
    assert parts["return"] == beside[Phase.RETURN]
    assert parts["wait"] == total(Phase.WRITE_TAIL, Phase.DETECT)
    assert parts["first"] == total(Phase.RECOMPUTE, Phase.FIRST_STEP)
    assert sum(parts.values()) == 2.0**30


def test_parts_of_a_local_request():
    parts = split(answer("local", dict(EACH)))
    assert parts["queue"] == total(Phase.DECODE_QUEUE)
    assert parts["compute"] == total(Phase.RECOMPUTE)
    assert parts["wait"] == 0
    assert parts["first"] == total(Phase.FIRST_STEP)
    assert sum(parts.values()) == 2.0**30


def test_medians():
    answers = [
        answer(
            "push", {Phase.WRITE_TAIL: wait}, ttft_s=ttft, prefill_phases={Phase.PREFILL_COMPUTE: ttft / 2}
        )
        for wait, ttft in ((1.0, 10.0), (3.0, 50.0), (2.0, 20.0))
    ]
    medians = Medians.of(answers)
    assert (medians.ttft, medians.parts["wait"], medians.parts["compute"]) == (20.0, 2.0, 10.0)
    assert medians.beyond == 10.0
    assert medians.phases == {"write_tail": 2.0, "beside.prefill_compute": 10.0}
    detail = medians.detail(answers, path="push")
    assert detail["ttft_s"] == [10.0, 50.0, 20.0]
    assert detail["median_s"]["beside.prefill_compute"] == 10.0


def test_the_early_goal_is_for_prompts_that_can_reach_it():
    assert early_goal(7 * CHUNK, CHUNK, [pushed(early=800)]) is None
    goal = early_goal(7 * CHUNK + 1, CHUNK, [pushed(early=early) for early in (800, 0, 700)])
    assert goal is not None
    assert goal.value == 7 / 8
    assert goal.holds
    missed = early_goal(8 * CHUNK, CHUNK, [pushed(early=699)])
    assert missed is not None
    assert not missed.holds


def test_the_wait_goal_compares_round_by_round():
    # The machine was ten times as slow in the second round, for both.
    goal = wait_goal(8000, [pulled(4.0), pulled(40.0), pulled(4.0)], [pushed(2.0), pushed(20.0), pushed(2.0)])
    assert (goal.value, goal.goal, goal.holds) == (0.5, "<= 0.5", True)
    assert not wait_goal(8000, [pulled(4.0)], [pushed(2.25)]).holds


def test_the_return_goal_is_the_clients_time():
    off = [answer("pull", {}, ttft_s=10.0), answer("pull", {}, ttft_s=100.0)]
    goal = return_goal(7900, off, [answer("pull", {}, ttft_s=2.0), answer("pull", {}, ttft_s=20.0)])
    assert (goal.value, goal.goal, goal.holds) == (5.0, ">= 5", True)
    assert not return_goal(7900, off, off).holds


@pytest.mark.parametrize(
    "changes",
    [{"path": "local"}, {"kv_source": "recomputed"}, {"attempts": 2}, {"status": 502}],
)
def test_a_lone_request_that_went_another_way_is_no_result(changes: dict[str, Any]):
    with pytest.raises(RuntimeError, match="push was asked for"):
        require(Answer(1.0, record("push", {}, **changes)), "push")


def setup(model_dir: FilePath = FilePath("m"), **changes: Any) -> Setup:
    sizes: dict[str, Any] = {"transport": "shm", "threads": 1, "kv_gib": 0.05, "chunk": CHUNK}
    caches = {"prefill_cache": False, "decode_cache": True}
    return Setup(model_dir=model_dir, **sizes | caches | changes)


def test_a_fallback_in_a_train_is_seen():
    cell = Cell(8000, 1.0)
    report = path_report(setup(), [cell], rounds=1, trains=1)
    lost = answer("push", {}, ttft_s=9.0, kv_source="recomputed", bytes=0)
    add_paths(
        report,
        cell,
        {
            "pull": [answer("pull", {}, ttft_s=4.0), answer("pull", {}, ttft_s=6.0)],
            "push": [answer("push", {}, ttft_s=2.0, early_bytes=600), lost],
        },
    )
    [pull, push] = [dict(zip(report.columns, row, strict=True)) for row in report.rows]
    assert (pull["moved"], pull["TTFT"], pull["by pull"], pull["early"]) == ("2/2", "5.000", "1.00", "")
    # The lost one's user waited too.
    assert (push["moved"], push["TTFT"], push["by pull"], push["early"]) == ("1/2", "5.500", "1.00", "0.750")
    assert report.details[1]["early"] == 0.75
    assert report.conditions["requests_of_a_train"] == {"8000": 2}


def test_trains_of_long_prompts_are_short():
    assert [Cell(tokens, 1.0).requests for tokens in (100, 2000, 3000, 8000)] == [4, 4, 2, 2]
    assert Cell(100, None).requests == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "--rounds: got 0, allowed is more than 0"),
        (["--rates", "1", "-2"], "--rates: got"),
        (["--transport", "pigeon"], "invalid choice"),
    ],
)
def test_bad_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        _options(arguments)
    assert said in capsys.readouterr().err


def test_prompts_that_no_model_could_have():
    _check_lengths(_options(["--tokens", "8188", "--histories", "8088"]), 8192)
    with pytest.raises(SystemExit, match=r"--tokens: got 8189, allowed is 1 to 8188"):
        _check_lengths(_options(["--tokens", "1000", "8189"]), 8192)
    with pytest.raises(SystemExit, match=r"--histories: got 16, allowed is 17 to 8088"):
        _check_lengths(_options(["--histories", "16"]), 8192)


@pytest.mark.processes
def test_on_processes():
    """All that is asked of a deployment, and the tables made of it."""
    model_dir = cached_tiny_model("llama")
    prompts, advances = Prompts(384), []
    lone, train = Cell(9 * CHUNK, None), Cell(100, 50.0)
    with deployment(setup(model_dir)) as served:
        alone = measure_paths(served, prompts, lone, 2, lambda: advances.append(lone))
        together = measure_paths(served, prompts, train, 1, lambda: advances.append(train))
        turns = measure_return(served, prompts, 200, 2, lambda: advances.append(200))
    assert advances == 6 * [lone] + 3 * [train] + 4 * [200]

    for path, answers in alone.items():
        assert len(answers) == 2
        for each in answers:
            moved = 36 if path != "local" else 0
            assert (each.record.path, each.record.blocks) == (path, moved), each.record
            parts = split(each)
            assert tuple(parts) == PARTS
            # Not of the rest: a busy router may look at its clock after the client has what it wrote before.
            assert min(parts[part] for part in PARTS if part != "rest") >= 0, parts
            assert sum(parts.values()) == pytest.approx(each.ttft_s)
            assert parts["compute"] > 0
            assert sum(each.record.phases.values()) == pytest.approx(each.record.ttft_s)
    for each in alone["push"]:
        assert 0 <= each.record.early_bytes <= each.record.bytes * 32 / 36  # the last chunk can't be early
    assert {path: len(answers) for path, answers in together.items()} == {"pull": 4, "push": 4, "local": 4}

    for each in turns["off"]:
        assert each.record.computed_tokens.prefill == 300
        assert split(each)["return"] == 0
    for each in turns["on"]:
        assert (each.record.reused_tokens.returned, each.record.computed_tokens.prefill) == (192, 108)
        assert split(each)["return"] > 0

    paths = path_report(setup(model_dir), [lone, train], rounds=2, trains=1)
    add_paths(paths, lone, alone)
    add_path_goals(paths, lone, CHUNK, alone, longest=True)
    returned = return_report(setup(model_dir), rounds=2)
    add_return(returned, 200, turns, longest=True)
    names = [goal.name for goal in paths.goals + returned.goals]
    assert names == [
        "push, 576 tokens: part of the bytes moved before prefill ends",
        "post-prefill wait, 576 tokens: push by pull",
        "next turn's TTFT, 200 tokens of history: off by on",
    ]
    assert [row[:4] for row in paths.rows] == [["576", "lone", path, "2/2"] for path in alone]
    assert [row[-2:] for row in returned.rows] == [["0", "300"], ["192", "108"]]
