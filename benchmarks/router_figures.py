"""The figures of the router's benchmark: pure functions of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Goal, at_least, at_most, paired_ratio

TTFT_RATIO = 1.0
TOKEN_RATIO = 1.4
REQUESTS_RATIO = 0.6
WORKERS_RATIO = 1.0
GROWTH_BYTES = 64.0
"""Per request, after the warm-up: 3 MB in 50,000 requests, about what an allocator's pages wander by."""
WINDOWS = 3
"""Growth is the median of so many stretches': memory that is lost grows in each of them, an allocator that
takes another megabyte does so in one."""


@dataclass(frozen=True, kw_only=True)
class Lone:
    """What one contestant adds to the TTFT of lone requests, in one turn: less the decode engine's own
    without a router, of the same turn."""

    p50_s: float
    p99_s: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """One contestant's figures of one round."""

    lone: Sequence[Lone]
    """One for each turn."""
    requests_per_s: float
    """At saturation, answers of one token."""
    busy: float
    """The part of its core that it used then."""
    request_cpu_s: float
    """CPU of such a request."""
    token_cpu_s: float
    """CPU of a paced streamed token, the request's own share of it included."""
    tokens_per_s: float
    """At saturation, long answers as fast as they come."""
    rss: int

    @property
    def requests_per_core_s(self) -> float:
        """Requests in a second of CPU: what one core can do, however fast the rest of the machine is."""
        return 1 / self.request_cpu_s


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` (0 to 1) of all values don't exceed."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * round(part * 1000) // 1000))
    return ordered[rank - 1]


def added(through: Sequence[float], direct: Sequence[float]) -> Lone:
    """TTFT of requests through a router, less those without one."""
    return Lone(
        p50_s=percentile(through, 0.5) - percentile(direct, 0.5),
        p99_s=percentile(through, 0.99) - percentile(direct, 0.99),
    )


def growth(samples: Sequence[tuple[int, int]]) -> float:
    """Bytes per request: the slope (least squares) of memory over requests answered, (requests, bytes) each;
    median of `WINDOWS` equal stretches. Raises ValueError for fewer than two samples in one."""
    size = len(samples) // WINDOWS
    slopes = []
    for start in range(0, size * WINDOWS, size):
        requests, rss = zip(*samples[start : start + size], strict=True)
        slopes.append(statistics.linear_regression(requests, rss).slope)
    return statistics.median(slopes)


def goals(rounds: Mapping[str, Sequence[Round]], ours: str, theirs: str) -> list[Goal]:
    """Ours by theirs, of the same round or turn."""
    a, b = rounds[ours], rounds[theirs]
    ttft = paired_ratio([x.p50_s for r in a for x in r.lone], [x.p50_s for r in b for x in r.lone])

    def ratio(figure: str) -> float:
        return paired_ratio([getattr(r, figure) for r in a], [getattr(r, figure) for r in b])

    return [
        at_most(f"added TTFT p50, by {theirs}'s", ttft, TTFT_RATIO),
        at_most(f"CPU per streamed token, by {theirs}'s", ratio("token_cpu_s"), TOKEN_RATIO),
        at_least(f"requests/s of one core, by {theirs}'s", ratio("requests_per_core_s"), REQUESTS_RATIO),
    ]


def workers_goal(of_cores: float, theirs: Sequence[Round], workers: int, name: str) -> Goal:
    """Requests/s of as many cores as there are workers, by those of the other router's one."""
    ratio = of_cores / statistics.median(r.requests_per_core_s for r in theirs)
    return at_least(
        f"requests/s of {workers} cores with --workers {workers}, by {name}'s of one", ratio, WORKERS_RATIO
    )


def growth_goal(samples: Sequence[tuple[int, int]]) -> Goal:
    """No growth after the warm-up."""
    return at_most("growth of memory after the warm-up, bytes/request", growth(samples), GROWTH_BYTES)
