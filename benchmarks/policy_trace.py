"""What is sent in the policy study, and when: a function of a seed, so that every binding gets the same.

A scene is some seconds of two kinds of traffic, each an open loop (sent at its time, answered or not):

    probes    clients' requests, to the router: long prompts, some at a time, as of an agent that asks several
              things at once; Poisson arrivals of such groups. They are what is measured
    others    requests that come to a decode engine from elsewhere, as from another router: in bursts. Each
              burst heats one engine, and the next one another, so that the engine which was the best choice
              when a probe's prefill began is often the worst one when it ends

The router learns of the others as it would in a fleet: by the engines' own reports, half a second apart.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Arrival(NamedTuple):
    """One request."""

    at_s: float
    """After the scene's beginning."""
    engine: int | None
    """Which decode engine it goes to; None: to the router, a probe."""
    prompt: Sequence[int]
    """Token ids, shared with no other request."""
    answer_tokens: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much of both comes."""

    scene_s: float
    groups_per_s: float
    group_probes: int
    """Probes that are sent at once; so the prefill engine takes one after the other, each longer bound."""
    probe_tokens: tuple[int, int]
    """Of a probe's prompt: at least, at most."""
    probe_answer: int
    burst_every_s: float
    """A burst on one engine, then on another."""
    burst_s: float
    """Its requests come within so much."""
    burst_requests: int
    burst_tokens: int
    burst_answer: int
    engines: int
    """Decode engines."""

    def conditions(self) -> dict[str, Any]:
        """All of it, for the report."""
        return asdict(self)


@dataclass(frozen=True)
class Scene:
    """The same for every binding."""

    index: int
    arrivals: tuple[Arrival, ...]
    """In the order of their times."""

    @property
    def probes(self) -> int:
        return sum(arrival.engine is None for arrival in self.arrivals)


def make_scene(load: Load, vocab_size: int, seed: int, index: int) -> Scene:
    """Scene number `index` of a study."""
    rng = random.Random(f"{seed}, scene {index}")
    ids = range(vocab_size // 50, vocab_size)  # special tokens come first
    arrivals = [
        Arrival(at_s, None, rng.choices(ids, k=rng.randint(*load.probe_tokens)), load.probe_answer)
        for at_s in _poisson(rng, load.groups_per_s, load.scene_s)
        for _ in range(load.group_probes)
    ]
    heated = rng.randrange(load.engines)
    for start in _steps(load.burst_every_s, load.scene_s):
        arrivals += [
            Arrival(
                start + rng.uniform(0, load.burst_s),
                heated,
                rng.choices(ids, k=load.burst_tokens),
                load.burst_answer,
            )
            for _ in range(load.burst_requests)
        ]
        heated = (heated + rng.randrange(1, load.engines)) % load.engines
    return Scene(index, tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)))


def _poisson(rng: random.Random, rate: float, until_s: float) -> list[float]:
    """Times of a Poisson process; one at least."""
    times: list[float] = []
    now = rng.expovariate(rate)
    while now < until_s:
        times.append(now)
        now += rng.expovariate(rate)
    return times or [rng.uniform(0, until_s)]


def _steps(every_s: float, until_s: float) -> list[float]:
    return [step * every_s for step in range(math.ceil(until_s / every_s))]
