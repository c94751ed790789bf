"""What all benchmarks share: alternating measurement, medians, a table, and goals in a JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_Name = TypeVar("_Name", bound=str)

OUTPUT = Path("build/bench")
console = Console(width=None if sys.stdout.isatty() else 160)


@dataclass(frozen=True)
class Goal:
    """A number with a bound. `holds` is what was measured, whatever was hoped for."""

    name: str
    value: float
    goal: str
    """The bound in words, e.g. `>= 0.95`."""
    holds: bool


def at_least(name: str, value: float, bound: float) -> Goal:
    """The goal that `value` is `bound` or more."""
    return Goal(name, value, f">= {bound:g}", value >= bound)


def at_most(name: str, value: float, bound: float) -> Goal:
    """The goal that `value` is `bound` or less."""
    return Goal(name, value, f"<= {bound:g}", value <= bound)


def alternate(
    contestants: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Let every contestant measure itself once a round, in turning order: what else the machine does then
    falls on all alike. Returns each one's results by round; compare them round by round (`paired_ratio`).
    """
    results: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds):
        for name in in_turn(list(contestants), turn):
            results[name].append(contestants[name]())
        after_round()
    return results


def in_turn(names: Sequence[_Name], turn: int) -> list[_Name]:
    """All of them, each round beginning with the next."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over the rounds of one contestant's result by another's of the same round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def machine() -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "python_built_with": sysconfig.get_config_var("CONFIG_ARGS"),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


@dataclass
class Report:
    """A table of a benchmark, and its goals. Make it before the measurement: it notes the machine's load."""

    name: str
    title: str
    columns: Sequence[str]
    conditions: dict[str, Any] = field(default_factory=dict)
    rows: list[list[str]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    details: list[Any] = field(default_factory=list)
    """More about each row than a table can show, for the file."""
    machine: dict[str, Any] = field(default_factory=machine)

    def row(self, *cells: str) -> None:
        """Add a line to the table: one cell a column."""
        self.rows.append(list(cells))

    def finish(self) -> None:
        """Print the table and the goals, and write `build/bench/<name>.json`."""
        self._show()
        _write(self.name, {"goals": [asdict(goal) for goal in self.goals], **self._content()})

    def _show(self) -> None:
        table = Table(title=self.title, title_justify="left")
        for position, column in enumerate(self.columns):
            table.add_column(column, justify="left" if position == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for goal in self.goals:
            verdict = "[green]holds[/]" if goal.holds else "[bold red]does not hold[/]"
            console.print(f"{goal.name}: {goal.value:.3g} (goal {goal.goal}) {verdict}")

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "conditions": self.machine | self.conditions,
            "columns": list(self.columns),
            "rows": self.rows,
        }
        return content | ({"details": self.details} if self.details else {})


def finish_together(name: str, reports: Sequence[Report]) -> None:
    """Print several tables of one run, and write them to one `build/bench/<name>.json`: the goals of all
    together, each table with the conditions that it holds under. They are different experiments: nothing is
    computed across tables."""
    for report in reports:
        report._show()
    goals = [asdict(goal) for report in reports for goal in report.goals]
    tables = {report.name: {"title": report.title} | report._content() for report in reports}
    _write(name, {"goals": goals, "tables": tables})


def _write(name: str, content: dict[str, Any]) -> None:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    console.print(f"written to {path}")


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal; calling what it yields moves it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
