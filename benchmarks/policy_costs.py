"""Whether the router's cost model knows what paths cost: each path forced beside `auto`, in some regimes.

A regime is a prompt's length and what else there is to do. In each round the same situation is made anew for
`local`, `pull`, `push` and `auto`, in turning order. What `auto` expected of each path, by its record, is
compared with what that path took when it was forced; and the path that it chose, with the cheapest one.

What the model leaves out as common to all paths is left out of the measured times too (`modelled`). Harm is
put down as the model does (`options.py`): computing on the decode engine counts again for each request that
runs there, one at least.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.deployment import POLL_S, Deployment
from benchmarks.path_runs import Prompts
from benchmarks.policy_figures import records
from benchmarks.policy_runs import Client, Play, Seen, body_of, headers_of
from benchmarks.report import Goal, at_most, in_turn
from kvhandoff.core.phases import Phase
from kvhandoff.router.policy import EngineView, FleetView, Path, PathChoice, expected_costs
from kvhandoff.router.policy.options import Expected
from kvhandoff.router.records import RequestRecord

PATHS: tuple[Path, ...] = ("local", "pull", "push")
CHOICES: tuple[PathChoice, ...] = (*PATHS, "auto")
COMMON = (Phase.ROUTE, Phase.DECODE_TOKENIZE, Phase.DECODE_NETWORK, Phase.FIRST_STEP)
"""What the model leaves out: every path has it."""
ANSWER_TOKENS = 4
BUSY_TOKENS = 64
BUSY_ANSWER = 160
"""Of a request that keeps a decode engine busy: more steps than the measured prompt takes."""
ERROR_GOAL = 0.25
REGRET_GOAL = 1.1
ROUTER = "default"
UNDER_WAY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A situation."""

    name: str
    tokens: int
    """Of the measured prompt."""
    ahead: int = 0
    """Prompts of `tokens` that the prefill engine has to compute before it."""
    busy: int = 0
    """Requests that each decode engine answers meanwhile."""


REGIMES = (
    Regime(name="short", tokens=32),
    Regime(name="medium", tokens=400),
    Regime(name="long", tokens=1600),
    Regime(name="medium, P loaded", tokens=400, ahead=6),
    Regime(name="long, P loaded", tokens=1600, ahead=3),
    Regime(name="long, D busy", tokens=1600, busy=4),
    Regime(name="medium, both", tokens=400, ahead=6, busy=4),
)


@dataclass(frozen=True)
class Measured:
    """What came of a regime's requests."""

    regime: Regime
    records: Mapping[PathChoice, Sequence[RequestRecord]]
    """By what was asked for, in the order of the rounds."""
    ended: int
    """Companions, of all rounds, that had ended before the request beside them was sent: at 0 each situation
    was what it was to be."""


def measure_costs(
    served: Deployment, prompts: Prompts, regimes: Sequence[Regime], rounds: int, advance: Callable[[], None]
) -> list[Measured]:
    """Raises RuntimeError when a request was not answered, or took another path than it was to take."""
    measured = []
    for regime in regimes:
        taken: dict[PathChoice, list[RequestRecord]] = {choice: [] for choice in CHOICES}
        ended = 0
        for turn in range(rounds):
            for choice in in_turn(CHOICES, turn):
                record, gone = served.run(_measure(served, prompts, regime, choice))
                taken[choice].append(record)
                ended += gone
                advance()
        measured.append(Measured(regime, taken, ended))
    return measured


async def _measure(
    served: Deployment, prompts: Prompts, regime: Regime, choice: PathChoice
) -> tuple[RequestRecord, int]:
    """The request's record, and how many of its companions had ended when it was sent."""
    client, url = Client(served), served.routers[ROUTER]

    async def ask(tokens: int, path: PathChoice, answer_tokens: int) -> Seen:
        seen = await client.ask(
            url, body_of(prompts.fresh(tokens), answer_tokens), headers_of(path), answer_tokens
        )
        if isinstance(seen, str):
            raise RuntimeError(seen)
        return seen

    busy = regime.busy * (len(served.engines) - 1)
    async with asyncio.TaskGroup() as group:
        companions = [group.create_task(ask(BUSY_TOKENS, "local", BUSY_ANSWER)) for _ in range(busy)]
        await _under_way(served, url, companions, answering=True)
        companions += [group.create_task(ask(regime.tokens, "pull", 2)) for _ in range(regime.ahead)]
        await _under_way(served, url, companions, answering=False)
        ended = sum(companion.done() for companion in companions)
        seen = await ask(regime.tokens, choice, ANSWER_TOKENS)
    record = await served.record(seen.name, ROUTER)
    await served.idle()
    if choice != "auto" and (record.path, record.attempts) != (choice, 1):
        raise RuntimeError(f"{choice} was asked for, and this came of it: {record}")
    return record, ended


class _Running(msgspec.Struct):
    running: list[RequestRecord]


_running = msgspec.json.Decoder(_Running)


async def _under_way(
    served: Deployment, router: str, companions: Sequence[asyncio.Task[Seen]], *, answering: bool
) -> None:
    """Wait until the router carries all companions that have not ended, and if `answering`, all of them have
    content. Raises TimeoutError."""
    async with asyncio.timeout(UNDER_WAY_S):
        while True:
            async with served.session.get(f"{router}/v1/handoffs") as answer:
                running = _running.decode(await answer.read()).running
            ready = [record for record in running if record.ttft_s is not None or not answering]
            if len(ready) >= sum(not companion.done() for companion in companions):
                return
            await asyncio.sleep(POLL_S)


def modelled(record: RequestRecord) -> float:
    """Seconds of a request's TTFT that the cost model speaks of. Raises ValueError when it has none."""
    if record.ttft_s is None:
        raise ValueError(f"a record without TTFT: {record}")
    return record.ttft_s - sum(record.phases.get(phase, 0.0) for phase in COMMON)


def harm(record: RequestRecord, busy: int) -> float:
    """Seconds by which requests on the decode engine got their tokens later: `busy` of them, one at least."""
    return record.phases.get(Phase.RECOMPUTE, 0.0) * max(1, busy) if record.path == "local" else 0.0


@dataclass(frozen=True)
class Verdict:
    """What a regime showed, in seconds; medians over the rounds."""

    regime: Regime
    measured_s: Mapping[Path, float]
    """By path, forced."""
    cost_s: Mapping[Path, float]
    """With its harm."""
    expected_s: Mapping[Path, float]
    """By the records of `auto`; without a path that it could never take, since the decode engine had reported
    a queue."""
    prior_s: Mapping[Path, float]
    """What would be expected with nothing learned."""
    chosen: Sequence[Path]
    """By `auto`, in the order of the rounds."""
    ended: int
    """As in `Measured`."""

    @property
    def cheapest(self) -> Path:
        return min(self.cost_s, key=lambda path: self.cost_s[path])

    @property
    def regret(self) -> float:
        """The cost of what was chosen, by that of the cheapest: the mean over the rounds; 1 is best."""
        return statistics.mean(self.cost_s[path] for path in self.chosen) / self.cost_s[self.cheapest]

    def error(self, path: Path, expected: Mapping[Path, float]) -> float | None:
        """|expected − measured| by measured; None: it was not expected to be taken."""
        if path not in expected:
            return None
        return abs(expected[path] - self.measured_s[path]) / self.measured_s[path]


def verdict(measured: Measured, block_size: int, model: str) -> Verdict:
    """Raises ValueError when `auto` did not decide by the cost model."""
    regime = measured.regime
    expected = [_expected(record) for record in measured.records["auto"]]
    forced = {path: measured.records[path] for path in PATHS}
    return Verdict(
        regime,
        {path: statistics.median(map(modelled, taken)) for path, taken in forced.items()},
        {
            path: statistics.median(modelled(record) + harm(record, regime.busy) for record in taken)
            for path, taken in forced.items()
        },
        {
            path: statistics.median(each.ttft_s[path] for each in expected if path in each.ttft_s)
            for path in PATHS
            if any(path in each.ttft_s for each in expected)
        },
        prior(regime, block_size, model),
        [record.path for record in measured.records["auto"] if record.path is not None],
        measured.ended,
    )


def _expected(record: RequestRecord) -> Expected:
    if record.expected is None:
        raise ValueError(f"auto did not decide by the cost model: {record}")
    return record.expected


def prior(regime: Regime, block_size: int, model: str) -> dict[Path, float]:
    """What a router that has measured nothing expects of the regime."""
    p, d = (_unmeasured(url, block_size, model) for url in ("prefill", "decode"))
    costs = expected_costs(FleetView([p], [d]), p, d, regime.tokens)
    return {path: costs[path].ttft for path in PATHS}


def _unmeasured(url: str, block_size: int, model: str) -> EngineView:
    return EngineView(
        url=url,
        model=model,
        healthy=True,
        block_size=block_size,
        load=0,
        chosen=0,
        waiting=0,
        room=1 << 20,
    )


def errors_under_load(plays: Sequence[Play]) -> dict[Path, list[float]]:
    """Of probes of `auto`: the relative errors of what was expected of the path that was taken."""
    errors: dict[Path, list[float]] = {path: [] for path in PATHS}
    for record in records(plays):
        if record.expected is not None and record.path is not None and record.attempts == 1:
            taken = modelled(record)
            errors[record.path].append(abs(record.expected.ttft_s[record.path] - taken) / taken)
    return errors


def cost_goals(verdicts: Sequence[Verdict]) -> list[Goal]:
    """What the model should show, stated before it was measured: by path over the regimes, and the worst
    choice."""
    stated = []
    for path in PATHS:
        found = (each.error(path, each.expected_s) for each in verdicts)
        errors = [error for error in found if error is not None]
        name = f"expected TTFT of {path}, median relative error over the regimes"
        if errors:
            stated.append(at_most(name, statistics.median(errors), ERROR_GOAL))
    worst = max(verdicts, key=lambda each: each.regret)
    name = f"cost of auto's path by the cheapest, worst regime ({worst.regime.name})"
    return [*stated, at_most(name, worst.regret, REGRET_GOAL)]
