"""The study as a picture, and as a page to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.policy_figures import Part, mean_parts, slowest_tenth, tpots, ttfts
from benchmarks.policy_runs import Binding, Play
from benchmarks.report import Report

_MEASURES = (("TTFT", "s", 1.0, ttfts), ("TPOT", "ms", 1e3, tpots))


def plot(plays: Mapping[Binding, Sequence[Play]], path: Path) -> None:
    """Write an SVG: how many probes took longer than so much, and where the slowest tenth's time went."""
    import matplotlib as mpl

    mpl.use("svg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for axis, (name, unit, scale, measure) in zip(axes, _MEASURES, strict=False):
        for binding, played in plays.items():
            values = sorted(scale * value for play in played for value in measure(play))
            # The share that took as long or longer: the tail is what a p99 is about, so on a logarithm.
            axis.step(values, [1 - i / len(values) for i in range(len(values))], where="post", label=binding)
        axis.set(
            yscale="log", xlabel=f"{name} ({unit})", ylabel="share of probes that took longer", title=name
        )
        axis.axhline(0.01, color="grey", linewidth=0.8, linestyle=":")
        axis.legend()
    _bars(axes[-1], {name: mean_parts(slowest_tenth(played)) for name, played in plays.items()})
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _bars(axis: Any, means: Mapping[Binding, Mapping[Part, float]]) -> None:
    bottom = dict.fromkeys(means, 0.0)
    for part in next(iter(means.values())):
        heights = [seconds[part] for seconds in means.values()]
        axis.bar(list(means), heights, bottom=list(bottom.values()), label=part)
        bottom = {name: bottom[name] + seconds[part] for name, seconds in means.items()}
    axis.set(ylabel="s", title="TTFT of the slowest tenth, mean")
    axis.legend()


def page(reports: Sequence[Report], picture: str | None) -> str:
    """All tables and goals in Markdown."""
    lines = ["# Policy study"]
    if picture is not None:
        lines += ["", f"![TTFT, TPOT and where the slowest tenth's time went]({picture})"]
    for report in reports:
        lines += ["", f"## {report.name.capitalize()}", "", *report.title.split("\n"), ""]
        lines += [_line(report.columns), _line(["---"] * len(report.columns)), *map(_line, report.rows)]
    goals = [goal for report in reports for goal in report.goals]
    lines += ["", "## Goals", "", _line(("goal", "bound", "measured", "")), _line(["---"] * 4)]
    for goal in goals:
        verdict = "holds" if goal.holds else "**not met**"
        lines.append(_line((goal.name, goal.goal, f"{goal.value:.3g}", verdict)))
    lines += ["", "## Conditions", ""]
    lines += [f"- {name}: {value}" for name, value in _conditions(reports).items()]
    return "\n".join(lines) + "\n"


def _conditions(reports: Sequence[Report]) -> dict[str, Any]:
    conditions: dict[str, Any] = {}
    for report in reports:
        conditions |= report.machine | report.conditions
    return conditions


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
