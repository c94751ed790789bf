"""From plays to figures: percentiles, what they are worth, and where the seconds went.

A binding's percentiles are over all its probes. Two bindings are compared by the ratio of their percentiles,
with an interval from a bootstrap over scenes: the scenes are drawn again with replacement, the same ones for
both, since requests of one scene share its load and are not independent (Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993, chapters 8 and 13: resampling the independent units, percentile
intervals). Nothing is compared that was not asked the same, or not answered as often.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.policy_runs import Binding, Play, Probe
from benchmarks.report import Goal, at_least, at_most
from kvhandoff.core.phases import Phase
from kvhandoff.core.reasons import Reason, ReasonKind
from kvhandoff.router.records import RequestRecord

RESAMPLES = 2000
COVERAGE = 0.9

Measure = Callable[[Play], Sequence[float]]
"""Seconds of each probe (or other request) of a play."""
Part = Literal["router", "moved", "prefill", "D queue", "handoff", "first", "network", "client"]

PARTS: Mapping[Part, tuple[Phase, ...]] = {
    "router": (Phase.ROUTE, Phase.BIND),
    "moved": (Phase.RETRY,),
    "prefill": (
        Phase.PREFILL_TOKENIZE,
        Phase.PREFILL_QUEUE,
        Phase.PREFILL_COMPUTE,
        Phase.PREFILL_OFFER,
        Phase.AWAIT_PREFILL,
    ),
    "D queue": (Phase.DECODE_TOKENIZE, Phase.DECODE_QUEUE),
    "handoff": (Phase.WRITE_TAIL, Phase.POST, Phase.WIRE, Phase.CLAIM, Phase.DETECT, Phase.RETURN),
    "first": (Phase.RECOMPUTE, Phase.FIRST_STEP),
    "network": (Phase.PREFILL_NETWORK, Phase.DECODE_NETWORK),
}
"""`moved`: with a decode engine that was left while prefill went on, or in an attempt that failed. Of a
pushed prompt, `prefill` is what its decode engine waits for it after having queued for blocks; of a
local one it is nothing, and `first` is all of its computing."""


def ttfts(play: Play) -> list[float]:
    return [probe.ttft_s for probe in play.probes]


def tpots(play: Play) -> list[float]:
    return [probe.tpot_s for probe in play.probes]


def others_tpots(play: Play) -> list[float]:
    return [other.tpot_s for other in play.others]


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank: the least value that at least `percent` of them don't exceed; no value is made up
    between two. Raises ValueError for none."""
    if not values:
        raise ValueError("a percentile of nothing")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def over_scenes(plays: Sequence[Play], measure: Measure, percent: float) -> float:
    """The percentile of all probes."""
    return percentile([value for play in plays for value in measure(play)], percent)


@dataclass(frozen=True)
class Ratio:
    """One binding's percentile by another's."""

    value: float
    low: float
    high: float
    """The interval that holds COVERAGE of the resampled ratios."""

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


def ratio(
    ours: Sequence[Play], theirs: Sequence[Play], measure: Measure, percent: float, seed: int = 0
) -> Ratio:
    """Raises ValueError where the two may not be compared (`why_unequal`)."""
    why = why_unequal(ours, theirs)
    if why is not None:
        raise ValueError(f"not compared: {why}")

    def by(drawn: Iterable[int]) -> float:
        scenes = list(drawn)
        return over_scenes([ours[i] for i in scenes], measure, percent) / over_scenes(
            [theirs[i] for i in scenes], measure, percent
        )

    generator = np.random.default_rng(seed)
    draws = generator.integers(len(ours), size=(RESAMPLES, len(ours)))
    resampled = [by(row) for row in draws.tolist()]
    outside = 100 * (1 - COVERAGE) / 2
    low, high = percentile(resampled, outside), percentile(resampled, 100 - outside)
    return Ratio(by(range(len(ours))), low, high)


def why_unequal(ours: Sequence[Play], theirs: Sequence[Play]) -> str | None:
    """Why two bindings may not be compared; None: they may."""
    for play in (*ours, *theirs):
        if play.failures:
            return f"scene {play.scene}: {len(play.failures)} without an answer, e.g. {play.failures[0]}"
    if not ours:
        return "no scenes"
    if [play.scene for play in ours] != [play.scene for play in theirs]:
        return "not the same scenes"
    for mine, other in zip(ours, theirs, strict=True):
        if (len(mine.probes), len(mine.others)) != (len(other.probes), len(other.others)):
            return f"scene {mine.scene}: not the same number of answers"
        if _lengths(mine) != _lengths(other):
            return f"scene {mine.scene}: not the same prompts"
    return None


def _lengths(play: Play) -> list[int]:
    return [probe.record.prompt_tokens for probe in play.probes]


def other_answers(plays: Mapping[Binding, Sequence[Play]], base: Binding) -> int:
    """How many probes were answered otherwise than under `base`; greedy answers depend on nothing else."""
    return sum(
        mine.token_ids != theirs.token_ids
        for binding, played in plays.items()
        if binding != base
        for play, same in zip(played, plays[base], strict=True)
        for mine, theirs in zip(play.probes, same.probes, strict=True)
    )


def records(plays: Iterable[Play]) -> list[RequestRecord]:
    return [probe.record for play in plays for probe in play.probes]


def fallbacks(plays: Sequence[Play]) -> Counter[Reason]:
    """Reasons of probes that did without what they were to get: declines and failures."""
    reasons = [reason for record in records(plays) for reason in record.reasons]
    return Counter(reason for reason in reasons if reason.kind is not ReasonKind.CHOICE)


def unused_bytes(plays: Sequence[Play]) -> int:
    """Written by the prefill engine, to an engine that did not answer: what moving requests cost."""
    used = sum(record.bytes for record in records(plays) if record.path == "push")
    return sum(play.written_bytes for play in plays) - used


def early_share(plays: Sequence[Play]) -> float | None:
    """The part of pushed bytes that had landed before the prompt's last chunk was computed; None: none."""
    pushed = [record for record in records(plays) if record.path == "push" and record.bytes]
    total = sum(record.bytes for record in pushed)
    return sum(record.early_bytes for record in pushed) / total if total else None


def parts(probe: Probe) -> dict[Part, float]:
    """Seconds of the client's TTFT by part; they add up to it."""
    phases = probe.record.phases
    seconds = {part: sum(phases.get(phase, 0.0) for phase in names) for part, names in PARTS.items()}
    return {**seconds, "client": probe.ttft_s - sum(phases.values())}


def mean_parts(probes: Sequence[Probe]) -> dict[Part, float]:
    """Means, which add up to the mean TTFT. Raises ValueError for none."""
    if not probes:
        raise ValueError("means of nothing")
    each = [parts(probe) for probe in probes]
    return {part: sum(seconds[part] for seconds in each) / len(each) for part in each[0]}


def slowest_tenth(plays: Sequence[Play]) -> list[Probe]:
    """The probes with the longest TTFT, one at least: those that a p99 is about."""
    probes = sorted((probe for play in plays for probe in play.probes), key=lambda probe: probe.ttft_s)
    return probes[-max(1, len(probes) // 10) :]


AUTO_FACTOR = 1.1
"""`auto` chooses more than the binding, and is compared with the best of three after the fact."""


def goals(plays: Mapping[Binding, Sequence[Play]]) -> list[Goal]:
    """What the study should show, stated before it was ever run. Comparisons only where they are allowed."""
    failures = sum(len(play.failures) for played in plays.values() for play in played)
    stated = [at_most("requests without a whole answer", failures, 0)]
    if any(why_unequal(played, plays["early"]) for played in plays.values()):
        return stated
    stated += [
        at_most("answers that differ from late binding's", other_answers(plays, "late"), 0),
        at_least("re-binds", sum(record.rebound for record in records(plays["rebind"])), 1),
    ]
    for name, measure in (("TTFT", ttfts), ("TPOT", tpots)):
        value = ratio(plays["rebind"], plays["early"], measure, 99).value
        stated.append(at_most(f"{name} p99: re-bound by early", value, 1.0))
    for percent in (50, 99):
        best = min(over_scenes(plays[name], ttfts, percent) for name in ("late", "early", "rebind"))
        value = over_scenes(plays["auto"], ttfts, percent) / best
        stated.append(at_most(f"TTFT p{percent}: auto by the best of the others", value, AUTO_FACTOR))
    return stated
