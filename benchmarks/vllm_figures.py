"""The table and the goals of `make bench-vllm`, from its samples.

TTFT          at the client
wait          TTFT less the monolithic one's median: what handing over costs, wherever it is spent
prefill leg   as the router sees it; pushed, it runs beside the decode leg
after it      the rest of the TTFT, route excepted: of a pull, from the prefill leg's answer on
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.report import Goal, Report, at_most
from benchmarks.vllm_cases import Case, Sample
from kvhandoff.core.phases import Phase

WAIT_GOAL = 0.7
PREFILL_LEG = (
    Phase.PREFILL_NETWORK,
    Phase.PREFILL_TOKENIZE,
    Phase.PREFILL_QUEUE,
    Phase.RETURN,
    Phase.PREFILL_COMPUTE,
    Phase.PREFILL_OFFER,
)
COLUMNS = ("case", "requests", "TTFT", "from", "to", "wait", "prefill leg", "after it")

Samples = Mapping[str, Sequence[Sample]]
"""By the case's name."""


def median_ttft(samples: Sequence[Sample]) -> float:
    """In seconds."""
    return statistics.median(sample.ttft_s for sample in samples)


def spread(samples: Sequence[Sample]) -> float:
    """Half of the range that the middle half of the TTFTs lies in, by their median: the noise of one run."""
    times = [sample.ttft_s for sample in samples]
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(times)


def prefill_leg(sample: Sample) -> float:
    """Seconds of the prefill leg, as the router sees it."""
    beside = {name: value for name, value in sample.phases.items() if name.startswith("beside.")}
    if beside:
        return sum(beside.values())
    return sum(sample.phases.get(phase, 0.0) for phase in PREFILL_LEG)


def after_prefill(sample: Sample) -> float:
    """Seconds from the prefill leg's end to the first content, at the router. Nobody waits for a pushed
    prompt's leg, so that it may be less than nothing."""
    waited = {name: value for name, value in sample.phases.items() if not name.startswith("beside.")}
    return sum(waited.values()) - waited.get(Phase.ROUTE, 0.0) - prefill_leg(sample)


def add_rows(report: Report, cases: Sequence[Case], samples: Samples, monolithic: float) -> None:
    """A line for each case, and all of its samples for the file."""
    for case in cases:
        of_case = samples[case.name]
        times = [sample.ttft_s for sample in of_case]
        ttft = median_ttft(of_case)
        legs = ("", "") if case.path == "local" else _legs(of_case)
        wait = "" if case.path == "local" or case.second_turn else f"{ttft - monolithic:.3f}"
        shown = (f"{each:.3f}" for each in (ttft, min(times), max(times)))
        report.row(case.name, str(len(times)), *shown, wait, *legs)
        names = dict.fromkeys(name for sample in of_case for name in sample.phases)
        report.details.append(
            {
                "case": case.name,
                "second_turn": case.second_turn,
                "ttft_s": [round(each, 6) for each in times],
                "median_s": {
                    "ttft": ttft,
                    **{n: statistics.median(each.phases.get(n, 0.0) for each in of_case) for n in names},
                },
            }
        )


def _legs(samples: Sequence[Sample]) -> tuple[str, str]:
    leg, after = (statistics.median(map(part, samples)) for part in (prefill_leg, after_prefill))
    return f"{leg:.3f}", f"{after:.3f}"


def goals(cases: Sequence[Case], samples: Samples, monolithic: float) -> list[Goal]:
    """Each case against upstream's of the same mode, as shipped and tuned."""
    found = []
    for case in cases:
        for rival in _rivals(case, samples):
            mine, theirs = samples[case.name], samples[rival]
            if not case.second_turn:
                found.append(_wait_goal(case.name, rival, mine, theirs, monolithic))
            ratio = median_ttft(mine) / median_ttft(theirs)
            noise = max(spread(mine), spread(theirs))
            found.append(at_most(f"TTFT, {case.name} by {rival}: no slower beyond noise", ratio, 1 + noise))
    return found


def _wait_goal(
    name: str, rival: str, mine: Sequence[Sample], theirs: Sequence[Sample], monolithic: float
) -> Goal:
    """By what upstream's costs; a rival that costs nothing leaves nothing to compare with."""
    wait, other = median_ttft(mine) - monolithic, median_ttft(theirs) - monolithic
    title = f"handoff wait, {name} by {rival}"
    if other <= 0:
        return at_most(f"{title} (which is none): wait in s", wait, 0.0)
    return at_most(title, wait / other, WAIT_GOAL)


def _rivals(case: Case, samples: Samples) -> list[str]:
    named = [] if case.rival is None else [case.rival, f"{case.rival} tuned"]
    return [name for name in named if name in samples]
