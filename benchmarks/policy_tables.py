"""The tables of `make bench-policies`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.deployment import Setup
from benchmarks.policy_costs import ANSWER_TOKENS, BUSY_ANSWER, PATHS, Verdict, cost_goals, errors_under_load
from benchmarks.policy_figures import (
    COVERAGE,
    Measure,
    early_share,
    fallbacks,
    goals,
    mean_parts,
    others_tpots,
    over_scenes,
    ratio,
    records,
    slowest_tenth,
    tpots,
    ttfts,
    unused_bytes,
    why_unequal,
)
from benchmarks.policy_runs import WAYS, Binding, Play
from benchmarks.policy_trace import Load
from benchmarks.report import Report
from kvhandoff.core.phases import Phase

BASE: Binding = "early"
"""The others are compared with it: it is what a deployment that pushes does without re-binding."""


def binding_report(setup: Setup, load: Load, scenes: int, seed: int) -> Report:
    """An empty table of the bindings."""
    conditions: dict[str, Any] = {
        "load": load.conditions(),
        "scenes": scenes,
        "seed": seed,
        "paths": {binding: way.path for binding, way in WAYS.items()},
        "return": "off",
        "sampling": "greedy",
        "alternating": "each scene is played under every binding, from idle to idle, in turning order",
        "intervals": f"{COVERAGE:.0%}, bootstrap over scenes",
    }
    return Report(
        name="bindings",
        title="One prefill and several decode engines under load that shifts between the decode engines.\n"
        "TTFT in s, TPOT in ms; by early: the p99 by that of early binding, with its interval; moved and "
        "unused:\nKV that was used, and that was written for nothing, in MB; full/mean: blocks in use on the "
        "fullest decode engine, by the mean.",
        columns=(
            *("binding", "probes", "TTFT p50", "p99", "by early", "TPOT p50", "p99", "by early"),
            *("re-binds", "local", "fell back", "moved", "unused", "early", "D queue", "full/mean"),
            "others' TPOT p99",
        ),
        conditions=setup.conditions() | conditions,
    )


def add_bindings(report: Report, plays: Mapping[Binding, Sequence[Play]]) -> None:
    """A line for each binding, and the goals."""
    for binding, played in plays.items():
        report.row(*_binding_row(binding, played, plays[BASE]))
        report.details.append(_detail(binding, played, why_unequal(played, plays[BASE])))
    report.goals += goals(plays)


def _binding_row(binding: Binding, played: Sequence[Play], base: Sequence[Play]) -> list[str]:
    kept = records(played)
    fell = sum(fallbacks(played).values())
    early = early_share(played)
    imbalance = [value for play in played for value in play.imbalance]
    queued = statistics.mean(record.phases.get(Phase.DECODE_QUEUE, 0.0) for record in kept)
    return [
        *(binding, str(len(kept)), f"{over_scenes(played, ttfts, 50):.3f}"),
        *(f"{over_scenes(played, ttfts, 99):.3f}", _by(binding, played, base, ttfts)),
        *(_ms(over_scenes(played, tpots, 50)), _ms(over_scenes(played, tpots, 99))),
        _by(binding, played, base, tpots),
        str(sum(record.rebound for record in kept)),
        str(sum(record.path == "local" for record in kept)),
        str(fell),
        f"{sum(record.bytes for record in kept) / 1e6:.0f}",
        f"{unused_bytes(played) / 1e6:.0f}",
        "" if early is None else f"{early:.2f}",
        f"{queued:.3f}",
        f"{statistics.mean(imbalance):.2f}" if imbalance else "",
        _ms(over_scenes(played, others_tpots, 99)),
    ]


def _by(binding: Binding, played: Sequence[Play], base: Sequence[Play], measure: Measure) -> str:
    if binding == BASE:
        return ""
    return "not compared" if why_unequal(played, base) else str(ratio(played, base, measure, 99))


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.2f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _detail(binding: Binding, played: Sequence[Play], unequal: str | None) -> dict[str, Any]:
    return {
        "binding": binding,
        "not_compared": unequal,
        "failures": [failure for play in played for failure in play.failures],
        "fell_back": {reason.value: count for reason, count in fallbacks(played).items()},
        "probes": [
            {
                "scene": play.scene,
                "ttft_s": round(probe.ttft_s, 6),
                "tpot_s": round(probe.tpot_s, 6),
                "path": probe.record.path,
                "rebound": probe.record.rebound,
                "reasons": probe.record.reasons,
                "decode": probe.record.decode.engine_id if probe.record.decode else None,
                "phases": {name: round(value, 6) for name, value in probe.record.phases.items()},
                "beside": {name: round(value, 6) for name, value in probe.record.prefill_phases.items()},
            }
            for play in played
            for probe in play.probes
        ],
    }


def parts_report(setup: Setup, plays: Mapping[Binding, Sequence[Play]]) -> Report:
    """Where the seconds of each binding went."""
    report = Report(
        name="costs of bindings",
        title="What each binding costs: where a probe's TTFT goes, in ms; means, which add up.\n"
        "prefill: queue and computing on the prefill engine, or waiting for it; moved: with a decode engine "
        "that was left, while\nprefill went on; slowest: the tenth of the probes with the longest TTFT.",
        columns=("binding", "probes", "TTFT", *mean_parts(slowest_tenth(plays[BASE]))),
        conditions=setup.conditions(),
    )
    for binding, played in plays.items():
        every = [probe for play in played for probe in play.probes]
        for name, probes in (("all", every), ("slowest", slowest_tenth(played))):
            means = mean_parts(probes)
            cells = [_ms(seconds) for seconds in means.values()]
            report.row(f"{binding}, {name}", str(len(probes)), _ms(sum(means.values())), *cells)
    return report


def learned_report(
    setup: Setup, verdicts: Sequence[Verdict], rounds: int, under_load: Sequence[Play]
) -> Report:
    """Whether the cost model has learned right figures."""
    errors = {path: each for path, each in errors_under_load(under_load).items() if each}
    report = Report(
        name="learned costs",
        title="What the cost model expects of each path, and what it takes when forced: TTFT in ms, less "
        "what all paths have in common; medians.\nprior: with nothing learned; cost: measured, with the harm "
        "of computing on the decode engine; regret: cost of auto's paths by the cheapest.",
        columns=(
            *("regime", "tokens", "path", "prior", "expected", "measured", "error", "prior's", "cost"),
            *("auto", "regret"),
        ),
        conditions=setup.conditions()
        | {
            "rounds": rounds,
            "answer_tokens": ANSWER_TOKENS,
            "answer_tokens_of_busy_requests": BUSY_ANSWER,
            "regimes": {
                each.regime.name: {
                    "ahead": each.regime.ahead,
                    "busy": each.regime.busy,
                    "ended_too_early": each.ended,
                }
                for each in verdicts
            },
            "median_relative_error_under_shifting_load": {
                path: round(statistics.median(each), 3) for path, each in errors.items()
            },
        },
    )
    for each in verdicts:
        for path in PATHS:
            best = path == each.cheapest
            report.row(
                *(each.regime.name, str(each.regime.tokens), path),
                *(_ms(each.prior_s[path]), _ms(each.expected_s[path]) if path in each.expected_s else ""),
                _ms(each.measured_s[path]),
                *(_error(each.error(path, known)) for known in (each.expected_s, each.prior_s)),
                f"{_ms(each.cost_s[path])}{' *' if best else ''}",
                str(each.chosen.count(path)),
                f"{each.regret:.2f}" if best else "",
            )
    report.goals += cost_goals(verdicts)
    return report
