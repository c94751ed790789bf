"""The benchmarks' own arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.report import Report, alternate, at_least, at_most, finish_together, paired_ratio


def test_goals_say_what_was_measured():
    assert at_least("speed", 0.95, 0.95).holds
    assert not at_least("speed", 0.949, 0.95).holds
    assert at_most("time", 3.0, 3.0).holds
    assert not at_most("time", 3.01, 3.0).holds
    assert not at_least("speed", float("nan"), 0.95).holds


def test_contestants_take_turns():
    order: list[str] = []
    rounds: list[int] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    results = alternate(
        {name: lambda name=name: contestant(name) for name in "ab"},  # type: ignore[misc]
        3,
        after_round=lambda: rounds.append(len(order)),
    )
    assert "".join(order) == "abbaab"
    assert results == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}
    assert rounds == [2, 4, 6]


def test_ratios_are_taken_round_by_round():
    # The machine was ten times as slow in the second round, for both.
    assert paired_ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0]) == 2.0
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0], [1.0, 2.0])


def test_a_report_writes_its_goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    report = Report("example", "An example", ("shape", "ratio"), conditions={"threads": 1})
    report.row("small", "0.900")
    report.goals.append(at_least("small", 0.9, 0.95))
    report.finish()
    written = json.loads((tmp_path / "build/bench/example.json").read_text())
    assert written["goals"] == [{"name": "small", "value": 0.9, "goal": ">= 0.95", "holds": False}]
    assert written["rows"] == [["small", "0.900"]]
    assert written["conditions"]["threads"] == 1


def test_tables_of_one_run_keep_their_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first = Report("cold", "Without a cache", ("shape",), conditions={"cache": "off"})
    second = Report("warm", "With a cache", ("shape",), conditions={"cache": "on"})
    first.goals.append(at_least("fast", 2.0, 1.0))
    second.goals.append(at_most("small", 2.0, 1.0))
    second.row("large")
    second.details.append({"bytes": 7})
    finish_together("both", [first, second])
    written = json.loads((tmp_path / "build/bench/both.json").read_text())
    assert [(goal["name"], goal["holds"]) for goal in written["goals"]] == [("fast", True), ("small", False)]
    tables = written["tables"]
    assert {name: table["conditions"]["cache"] for name, table in tables.items()} == {
        "cold": "off",
        "warm": "on",
    }
    assert tables["warm"]["rows"] == [["large"]]
    assert tables["warm"]["details"] == [{"bytes": 7}]
    assert "details" not in tables["cold"]
