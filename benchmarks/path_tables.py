"""The two tables of `make bench-paths`: two experiments, each with its own conditions and goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.deployment import Answer, Setup
from benchmarks.path_figures import (
    PARTS,
    Medians,
    as_asked,
    early_goal,
    early_median,
    return_goal,
    wait_goal,
)
from benchmarks.path_runs import (
    ANSWER_TOKENS,
    MAX_TOKENS,
    NEW_TOKENS,
    PATHS,
    RETURNS,
    Cell,
    Return,
)
from benchmarks.report import Report, paired_ratio
from kvhandoff.router.policy import Path

COMMON: dict[str, Any] = {
    "prompts": "random token ids, nothing shared",
    "sampling": f"greedy, {MAX_TOKENS} tokens",
    "ttft": "at the client: from before the request is sent to the first content of its stream",
    "alternating": "contestants take turns within each round, another one first each time",
}


def path_report(setup: Setup, cells: Sequence[Cell], rounds: int, trains: int) -> Report:
    """An empty table of the paths."""
    return Report(
        name="paths",
        title="TTFT by path, and where it goes; in s, medians.\n"
        "wait: from the prompt's last chunk computed to the decode engine running; beyond: TTFT less queue, "
        "return and compute;\nmoved: requests that were served as asked; early: part of the bytes moved "
        "before prefill ended.",
        columns=("tokens", "rate/s", "path", "moved", "TTFT", "by pull", *PARTS, "beyond", "early"),
        conditions=setup.conditions()
        | COMMON
        | {
            "return": "off",
            "rounds_of_lone_requests": rounds,
            "trains": trains,
            "requests_of_a_train": {
                str(cell.tokens): cell.requests for cell in cells if cell.rate is not None
            },
        },
    )


def add_paths(report: Report, cell: Cell, answers: Mapping[Path, Sequence[Answer]]) -> None:
    """A line for each path."""
    rate = "lone" if cell.rate is None else f"{cell.rate:g}"
    base = [answer.ttft_s for answer in answers[PATHS[0]]]
    for path, asked in answers.items():
        medians = Medians.of(asked)
        by_base = paired_ratio([answer.ttft_s for answer in asked], base)
        moved = [answer for answer in asked if as_asked(answer.record, path)]
        early = early_median(moved) if path == "push" and moved else None
        report.row(
            *(str(cell.tokens), rate, path, f"{len(moved)}/{len(asked)}"),
            *(f"{medians.ttft:.3f}", f"{by_base:.2f}"),
            *(f"{medians.parts[part]:.3f}" for part in PARTS),
            f"{medians.beyond:.3f}",
            "" if early is None else f"{early:.3f}",
        )
        report.details.append(
            medians.detail(asked, tokens=cell.tokens, rate=cell.rate, path=path, early=early)
        )


def add_path_goals(
    report: Report, cell: Cell, chunk: int, answers: Mapping[Path, Sequence[Answer]], *, longest: bool
) -> None:
    """What lone requests of this length should show."""
    early = early_goal(cell.tokens, chunk, answers["push"])
    if early is not None:
        report.goals.append(early)
    if longest:
        report.goals.append(wait_goal(cell.tokens, answers["pull"], answers["push"]))


def return_report(setup: Setup, rounds: int) -> Report:
    """An empty table of next turns."""
    return Report(
        name="return",
        title="TTFT of a conversation's second turn, and where it goes; in s, medians.\n"
        "returned: tokens read from the decode engine that kept them; computed: on the prefill engine.",
        columns=(
            "history",
            "return",
            "requests",
            "TTFT",
            "off by on",
            *PARTS,
            "beyond",
            "returned",
            "computed",
        ),
        conditions=setup.conditions()
        | COMMON
        | {
            "rounds": rounds,
            "forward_path": "pull",
            "first_turn": f"pull, {ANSWER_TOKENS} tokens answered; its history is in the decode engine's "
            "prefix cache with return on and off, so that new blocks alone move forward",
            "second_turn": f"history and {NEW_TOKENS} new tokens; off and on after the same first turn",
        },
    )


def add_return(
    report: Report, history: int, answers: Mapping[Return, Sequence[Answer]], *, longest: bool
) -> None:
    """A line for `off` and one for `on`; the goal for the longest history."""
    off, on = (answers[choice] for choice in RETURNS)
    ratio = return_goal(history, off, on)
    for choice, asked in answers.items():
        medians, record = Medians.of(asked), asked[-1].record
        report.row(
            *(str(history), choice, str(len(asked)), f"{medians.ttft:.3f}"),
            f"{ratio.value:.2f}" if choice == "on" else "",
            *(f"{medians.parts[part]:.3f}" for part in PARTS),
            f"{medians.beyond:.3f}",
            *(str(record.reused_tokens.returned), str(record.computed_tokens.prefill)),
        )
        report.details.append(medians.detail(asked, history=history, path="pull", **{"return": choice}))
    if longest:
        report.goals.append(ratio)
