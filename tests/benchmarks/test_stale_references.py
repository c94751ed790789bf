"""How `stale_references` goes on when an engine is lost, what it shows, and what it exits with."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.stale_references import _options, main, markdown, play_on, run, shortcomings, systems, table
from benchmarks.stale_scenes import SCENES, Played
from benchmarks.vllm_engines import EngineFailed
from rich.console import Console

from benchmarks import stale_references
from tests.benchmarks.naive_system import Naive

ROW = Played(
    scene="recycled",
    system="upstream",
    right=" apple",
    came=" [not markup] | 1",
    status=200,
    verdict="WRONG TEXT",
    reason="not recorded",
)
DIED = Played(
    scene="longer prompt",
    system="upstream",
    status=500,
    verdict="the engine died",
    reason="the decode engine died: AssertionError at base_worker.py:3453: assert few <= many",
)


def ours(scene: str, **changed: Any) -> Played:
    """A row of this connector's, as it should be."""
    right = Played(
        scene=scene,
        system="kvhandoff",
        right=" apple",
        came=" apple",
        status=200,
        verdict="right text",
        reason=f"recomputed, {SCENES[scene].account}128 of 340 tokens",
    )
    return replace(right, **changed)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_references, "OUTPUT", tmp_path / "compare")


class Lives:
    """Pairs of engines that are started, and what is played on them: `lost` scenes cost an engine."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Sequence[str]) -> None:
        self.started: list[str] = []
        self.ended = 0
        self.played: list[Played] = []
        self.lost = lost
        self.tmp_path = tmp_path
        monkeypatch.setattr(stale_references, "pair", self.pair)
        monkeypatch.setattr(stale_references, "play", self.play)

    @asynccontextmanager
    async def pair(self, _: object, kind: Any) -> AsyncIterator[Any]:
        self.started.append(kind.name)
        engines = []
        for role in ("prefill", "decode"):
            log = self.tmp_path / f"{kind.name}-{role}.log"
            log.write_text(f"life {len(self.started)}")
            engines.append(SimpleNamespace(spec=SimpleNamespace(name=f"{kind.name}-{role}", log=log)))
        yield SimpleNamespace(kind=kind, engines=engines)
        self.ended += 1

    async def play(self, system: Any, scene: str, deadline_s: float) -> Played:
        assert deadline_s == 60.0
        assert self.ended == len(self.started) - 1, "played on a pair that is not there"
        row = replace(ROW, scene=scene, system=system.pair.kind.name)
        return replace(row, verdict="the engine died") if scene in self.lost else row

    async def run(self, chosen: Sequence[str], scenes: Sequence[str]) -> list[tuple[str, str, str]]:
        settings: Any = None
        await run(settings, chosen, scenes, 60.0, self.played.append)
        return [(each.system, each.scene, each.verdict) for each in self.played]


async def test_a_pair_that_lost_an_engine_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(tmp_path, monkeypatch, lost=["recycled"])
    assert await lives.run(["upstream", "kvhandoff"], ["consumed", "recycled", "expired"]) == [
        (system, scene, "the engine died" if scene == "recycled" else "WRONG TEXT")
        for system in ("upstream", "kvhandoff")
        for scene in ("consumed", "recycled", "expired")
    ]
    assert lives.started == ["upstream", "upstream", "kvhandoff", "kvhandoff"]
    assert lives.ended == 4
    kept = {path.name: path.read_text() for path in stale_references.OUTPUT.iterdir()}
    assert kept == {
        "upstream-prefill-recycled.log": "life 1",
        "upstream-decode-recycled.log": "life 1",
        "kvhandoff-prefill-recycled.log": "life 3",
        "kvhandoff-decode-recycled.log": "life 3",
    }


async def test_none_is_started_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(tmp_path, monkeypatch, lost=["expired"])
    await lives.run(["upstream-tuned"], ["consumed", "expired"])
    assert lives.started == ["upstream-tuned"]


async def test_a_verdict_alone_costs_no_engine() -> None:
    left, played = deque(["another prompt", "consumed"]), list[Played]()
    await play_on(Naive(), left, 60.0, played.append)
    assert [each.verdict for each in played] == ["WRONG TEXT", "right text"]


def test_what_is_compared() -> None:
    shipped, tuned, own = (kind for kind, _ in systems().values())
    assert list(systems()) == ["upstream", "upstream-tuned", "kvhandoff"]
    assert (shipped.tuned, tuned.tuned) == (False, True)
    assert replace(tuned, name=shipped.name, tuned=False) == shipped
    assert own.prefill_arguments == shipped.prefill_arguments
    assert own.extra["offer_lease_s"] == shipped.extra["kv_lease_duration"] == 30


def test_the_table_shows_upstreams_rows_as_they_are() -> None:
    console = Console(width=220, record=True, file=StringIO())
    console.print(table([DIED, ROW]))
    shown = console.export_text()
    assert "' [not markup] | 1'" in shown
    for cell in ("WRONG TEXT", "the engine died", "500", "assert few <= many"):
        assert cell in shown
    assert shown.index("recycled") < shown.index("longer prompt")  # as they are told of


def test_the_same_for_a_document() -> None:
    assert markdown([replace(DIED, status=None), ROW]).splitlines() == [
        "| scene | system | right text | what came | HTTP | verdict | what record or log says |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        r"| recycled | upstream | `' apple'` | `' [not markup] \| 1'` | 200 | WRONG TEXT | not recorded |",
        "| longer prompt | upstream | - | - | - | the engine died | the decode engine died: "
        "AssertionError at base_worker.py:3453: assert few <= many |",
    ]


def test_only_this_connectors_rows_can_fall_short() -> None:
    rows = [ours(scene) for scene in SCENES]
    assert shortcomings([ROW, DIED, replace(ROW, system="upstream-tuned"), *rows]) == []
    for changed, said in (
        ({"verdict": "WRONG TEXT"}, "expired: WRONG TEXT"),
        ({"verdict": "the engine died"}, "expired: the engine died"),
        ({"verdict": "no answer"}, "expired: no answer"),
        ({"verdict": "error"}, "expired: error"),
        ({"reason": "transferred"}, "expired: its record says 'transferred', not 'offer_expired'"),
    ):
        assert shortcomings([*rows, ours("expired", **changed)]) == [said]


@pytest.fixture
def _started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["stale_references", "--systems", "upstream", "kvhandoff"])
    monkeypatch.setattr(stale_references, "resolve_model", Path)


def plays(monkeypatch: pytest.MonkeyPatch, rows: Sequence[Played], then: Exception | None = None) -> None:
    async def run(*arguments: Any) -> None:
        for row in rows:
            arguments[-1](row)
        if then:
            raise then

    monkeypatch.setattr(stale_references, "run", run)


def written() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((stale_references.OUTPUT / "stale_references.json").read_text())
    return content


@pytest.mark.usefixtures("_started")
def test_exit_code_0_whatever_came_of_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, [ROW, DIED, *(ours(scene) for scene in SCENES)])
    main()
    assert len(written()["played"]) == 8
    assert written()["played"][1]["reason"] == DIED.reason
    assert written()["conditions"]["lease_s"] == 30.0
    assert markdown([DIED]).splitlines()[-1] in (stale_references.OUTPUT / "stale_references.md").read_text()


@pytest.mark.usefixtures("_started")
def test_exit_code_1_when_ours_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, [ROW, ours("consumed"), ours("expired", verdict="the engine died", reason="KeyError")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == "kvhandoff falls short: expired: the engine died"  # printed; the code is 1
    assert written()["played"][2]["verdict"] == "the engine died"


@pytest.mark.usefixtures("_started")
def test_what_was_played_is_written_when_a_pair_does_not_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, [DIED], then=EngineFailed("upstream-decode was not healthy after 400 s"))
    with pytest.raises(SystemExit, match="was not healthy"):
        main()
    assert written()["played"][0]["status"] == 500


@pytest.mark.parametrize("wrong", [["--deadline", "30"], ["--deadline", "nan"], ["--scenes", "stale"]])
def test_bad_options(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _options(wrong)
    assert ended.value.code == 2
    assert "allowed is more than" in (said := capsys.readouterr().err) or "choose from" in said
