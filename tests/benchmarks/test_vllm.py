"""What `make bench-vllm` puts together, on samples made by hand, and how it asks a deployment."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
from benchmarks.path_runs import Prompts
from benchmarks.report import Report
from benchmarks.vllm import _options, _split, report_on
from benchmarks.vllm_cases import Case, Client, Sample, cases
from benchmarks.vllm_engines import MODEL as BENCHMARKED
from benchmarks.vllm_engines import ROOT, EngineFailed, EngineSpec, Running, VllmSettings, engines
from benchmarks.vllm_figures import COLUMNS, after_prefill, goals, prefill_leg, spread
from benchmarks.vllm_pairs import Pair, PairKind

from tests.router.upstream_engines import UpstreamCluster, failing, upstream_cluster

CASES = [
    Case(name="monolithic", path="local"),
    Case(name="upstream pull", path="pull"),
    Case(name="upstream pull tuned", path="pull"),
    Case(name="upstream return tuned", path="pull", second_turn=True),
    Case(name="kvhandoff pull", path="pull", rival="upstream pull"),
    Case(name="kvhandoff return", path="pull", second_turn=True, rival="upstream return"),
]


def samples(*seconds: float, **phases: float) -> list[Sample]:
    return [Sample(ttft_s=each, phases=phases) for each in seconds]


def measured(**changed: list[Sample]) -> dict[str, list[Sample]]:
    usual = {
        "monolithic": samples(3.9, 4.0, 4.1),
        "upstream pull": samples(9.0, 9.0, 9.0),
        "upstream pull tuned": samples(4.5, 4.5, 4.5),
        "upstream return tuned": samples(2.0, 2.0, 2.0),
        "kvhandoff pull": samples(4.2, 4.2, 4.2),
        "kvhandoff return": samples(1.5, 1.5, 1.5),
    }
    return usual | {name.replace("_", " "): value for name, value in changed.items()}


def test_goals_compare_with_upstream_in_the_same_mode() -> None:
    found = {goal.name: goal for goal in goals(CASES, measured(), 4.0)}
    assert found.keys() == {
        "handoff wait, kvhandoff pull by upstream pull",
        "TTFT, kvhandoff pull by upstream pull: no slower beyond noise",
        "handoff wait, kvhandoff pull by upstream pull tuned",
        "TTFT, kvhandoff pull by upstream pull tuned: no slower beyond noise",
        "TTFT, kvhandoff return by upstream return tuned: no slower beyond noise",
    }
    wait = found["handoff wait, kvhandoff pull by upstream pull tuned"]
    assert (wait.value, wait.goal, wait.holds) == (pytest.approx(0.4), "<= 0.7", True)
    assert found["handoff wait, kvhandoff pull by upstream pull"].value == pytest.approx(0.04)
    assert found["TTFT, kvhandoff return by upstream return tuned: no slower beyond noise"].value == 0.75


def test_goals_that_do_not_hold() -> None:
    slow = measured(kvhandoff_pull=samples(4.4, 4.4, 4.4), kvhandoff_return=samples(2.1, 2.1, 2.1))
    found = {goal.name: goal.holds for goal in goals(CASES, slow, 4.0)}
    assert not found["handoff wait, kvhandoff pull by upstream pull tuned"]
    assert found["TTFT, kvhandoff pull by upstream pull tuned: no slower beyond noise"]
    assert not found["TTFT, kvhandoff return by upstream return tuned: no slower beyond noise"]


def test_a_rival_that_costs_nothing_is_not_divided_by() -> None:
    free = measured(upstream_pull_tuned=samples(4.0, 4.0, 4.0))
    found = {goal.name: goal for goal in goals(CASES, free, 4.0)}
    wait = found["handoff wait, kvhandoff pull by upstream pull tuned (which is none): wait in s"]
    assert (wait.value, wait.holds) == (pytest.approx(0.2), False)


def test_noise_is_what_the_middle_half_spreads() -> None:
    assert spread(samples(1.0, 2.0, 3.0, 4.0, 5.0)) == pytest.approx(1 / 3)
    assert spread(samples(1.0)) == 0.0


def test_legs_of_a_pull_and_of_a_push() -> None:
    [pulled] = samples(
        10.0, route=1.0, prefill_network=2.0, prefill_compute=4.0, bind=0.5, decode_network=2.5
    )
    assert (prefill_leg(pulled), after_prefill(pulled)) == (6.0, 3.0)
    pushed = Sample(ttft_s=9.0, phases={"route": 1.0, "decode_network": 8.0, "beside.prefill_network": 5.0})
    assert (prefill_leg(pushed), after_prefill(pushed)) == (5.0, 3.0)


def test_the_table_shows_every_case() -> None:
    options = _options(["--upstream", "tuned", "--only", "upstream pull tuned"])
    report = Report("vllm", "", COLUMNS, machine={})
    phases: Mapping[str, float] = {"route": 0.1, "prefill_network": 4.0, "bind": 0.1, "decode_network": 0.3}
    made = measured(upstream_pull_tuned=samples(4.5, 4.6, 4.7, **phases))
    report_on(None, options, made, report)  # type: ignore[arg-type]
    assert report.rows == [
        ["monolithic", "3", "4.000", "3.900", "4.100", "", "", ""],
        ["upstream pull tuned", "3", "4.600", "4.500", "4.700", "0.600", "4.000", "0.400"],
    ]
    assert report.details[1]["median_s"]["bind"] == 0.1


def test_all_cases_stand_beside_their_rivals() -> None:
    assert [case.name for case in cases(shipped=True, tuned=True)] == [
        "monolithic",
        *("upstream pull", "upstream pull tuned", "kvhandoff pull"),
        *("upstream push", "upstream push tuned", "kvhandoff push"),
        *("upstream return tuned", "kvhandoff return"),
    ]
    assert "upstream return" in [case.name for case in cases(shipped=True, tuned=False)]
    pull, push, again = (case for case in cases(shipped=False, tuned=True) if case.rival is None if case.kind)
    assert pull.kind is not None
    assert push.kind is not None
    assert again.kind is not None
    assert (pull.kind.connector, pull.kind.tuned, pull.kind.extra) == ("nixl", True, {})
    assert (push.kind.connector, push.path) == ("nixl-push", "push")
    assert (again.kind.extra, again.second_turn) == ({"bidirectional_kv_xfer": True}, True)


@pytest.mark.parametrize(("requests", "blocks", "split"), [(20, 2, [10, 10]), (5, 2, [2, 3]), (1, 3, [1])])
def test_blocks(requests: int, blocks: int, split: list[int]) -> None:
    found = _split(requests, blocks)
    assert [len(numbers) for numbers in found] == split
    assert [number for numbers in found for number in numbers] == list(range(requests))


@pytest.mark.parametrize("wrong", [["--requests", "0"], ["--only", "nobody"], ["--upstream", "patched"]])
def test_bad_options(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _options(wrong)
    assert "allowed is" in (said := capsys.readouterr().err) or "choose from" in said


def test_command_lines() -> None:
    kind = PairKind(name="k", connector="nixl-push", tuned=True, prefill_arguments=("--x",))
    p, d = kind.spec("prefill", "key"), kind.spec("decode", "key")
    assert (p.arguments, d.arguments) == (("--x",), ())
    assert p.transfer is not None
    assert p.transfer["kv_connector"] == "TunedNixlPushConnector"
    assert p.transfer["kv_connector_module_path"] == "benchmarks.tuned_upstream"
    assert p.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(p.side_port)
    line = kind.router(Running(p, "http://h:1"), Running(d, "http://h:2"))
    assert f"http://h:1,engine_id=prefill,side_channel=127.0.0.1:{p.side_port}" in line
    assert line[line.index("--decode") + 1] == "http://h:2"

    ours = PairKind(name="k", connector="kvhandoff")
    p = ours.spec("prefill", "key")
    assert p.environment == {"KVHANDOFF_CLUSTER_KEY": "key"}
    assert ours.router(Running(p, "http://h:1"), Running(p, "http://h:2"))[-3] == (
        f"http://h:1,internal=http://127.0.0.1:{p.side_port}"
    )


PULL = Case(name="upstream pull", path="pull")
RETURN = Case(name="upstream return", path="pull", second_turn=True)


def client(c: UpstreamCluster) -> Client:
    return Client(c.session, c.url, routed=True)


@pytest.fixture
def _served_as_benchmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.router.upstream_engines.MODEL", BENCHMARKED)


@pytest.mark.usefixtures("_served_as_benchmarked")
async def test_a_sample_has_the_phases_of_its_record() -> None:
    async with upstream_cluster() as c:
        sample = await client(c).measure(PULL, Prompts(1000), 32)
        assert list(sample.phases) == ["route", "prefill_network", "bind", "decode_network"]
        assert sample.ttft_s >= sum(sample.phases.values())
        leg = await c.d.leg()
        assert (len(leg.body["prompt"]), leg.body["stream"], leg.body["max_tokens"]) == (32, True, 4)


@pytest.mark.usefixtures("_served_as_benchmarked")
async def test_a_second_turn_follows_its_first() -> None:
    async with upstream_cluster() as c:
        await client(c).measure(RETURN, Prompts(1000), 32, number=21)
        first, second = await c.d.leg(), await c.d.leg()
        assert not first.body.get("stream")
        assert first.body["max_tokens"] == 16 + 21 % 16
        assert second.body["prompt"][:37] == [*first.body["prompt"], *b"hello"]
        assert len(second.body["prompt"]) == 137
        await c.p.leg()
        assert (await c.p.leg()).params["remote_engine_id"] == "d0"


@pytest.mark.usefixtures("_served_as_benchmarked")
async def test_what_was_not_served_as_asked_is_no_sample() -> None:
    async with upstream_cluster() as c:
        c.p.script = failing  # the decode engine computes the prompt
        with pytest.raises(RuntimeError, match="upstream pull was asked for"):
            await client(c).measure(PULL, Prompts(1000), 32)
    async with upstream_cluster(keep_references=False) as c:
        with pytest.raises(RuntimeError, match="upstream return was asked for"):
            await client(c).measure(RETURN, Prompts(1000), 32)


async def test_an_engine_that_does_not_start_says_why(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.vllm_engines.LOGS", tmp_path)
    spec = EngineSpec(name="e", transfer=None)
    missing = VllmSettings(python=str(tmp_path / "python"), model_dir=tmp_path)
    with pytest.raises(EngineFailed, match=r"vllm-python: got .* which was not found"):
        async with engines(missing, [spec]):
            pass
    failing_python = tmp_path / "fails"
    failing_python.write_text("#!/bin/sh\necho no such device\nexit 3\n")
    failing_python.chmod(0o755)
    with pytest.raises(EngineFailed, match=r"(?s)ended with exit code 3.*no such device"):
        async with engines(VllmSettings(python=str(failing_python), model_dir=tmp_path), [spec]):
            pass


def test_options_of_a_quick_run() -> None:
    options: argparse.Namespace = _options(["--quick"])
    assert (options.tokens, options.requests, options.blocks) == (512, 2, 1)


def test_a_pair_names_its_engines() -> None:
    kind = PairKind(name="k", connector="nixl")
    p, d = (Running(kind.spec(role, ""), role) for role in ("prefill", "decode"))  # type: ignore[arg-type]
    assert Pair(kind, p, d, "").engines == (p, d)


STARTS = """
import asyncio, sys
from pathlib import Path
from benchmarks import vllm_engines as v

v.LOGS = Path(sys.argv[1])
settings = v.VllmSettings(python=sys.argv[1] + "/engine", model_dir=Path("m"))

async def main():
    async with v.engines(settings, [v.EngineSpec(name="e", transfer=None)]):
        pass

v.run_to_the_end(main())
"""


def test_engines_end_with_a_benchmark_that_is_told_to(tmp_path: Any) -> None:
    engine = tmp_path / "engine"
    engine.write_text(f"#!/bin/sh\ncd {tmp_path}; echo $$ > new; mv new pid; exec sleep 600\n")
    engine.chmod(0o755)
    benchmark = subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / "pid").exists():
            assert benchmark.poll() is None
            assert time.monotonic() < deadline
        benchmark.terminate()
        assert benchmark.wait(60.0) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
    finally:
        benchmark.kill()
        benchmark.wait()
