"""When to bind the decode engine: late, early, early and re-bound, or as the router chooses; under load that
shifts. And whether the router's cost model has learned what paths cost.

One prefill and three decode engines, and two routers in front of them, are started as a user would. Scenes
of traffic (`policy_trace.py`), each the same for every binding, are played in turning order, from idle to
idle:

    late     path pull: the decode engine is chosen when the prompt is computed
    early    path push: it is chosen before
    rebind   path push, behind a router with --binding rebind: before, and again if another is clearly better
    auto     the router's default: path and binding by cost

Greedy answers may not depend on any of this: the engines run in exact mode, and every answer's token ids are
compared. Then, on one prefill and one decode engine, the paths are forced in some regimes beside `auto`
(`policy_costs.py`).

Written: build/bench/policies.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.deployment import BLOCK_SIZE, MODEL, Deployment, Question, Setup, deployment
from benchmarks.path_runs import Prompts
from benchmarks.policy_costs import CHOICES, REGIMES, measure_costs, verdict
from benchmarks.policy_plot import page, plot
from benchmarks.policy_runs import BINDINGS, ROUTERS, Binding, Play, play_all
from benchmarks.policy_tables import add_bindings, binding_report, learned_report, parts_report
from benchmarks.policy_trace import Load, make_scene
from benchmarks.report import OUTPUT, Report, console, finish_together, progress_bar
from benchmarks.small_model import small_model

DECODE_ENGINES = 3
LOAD = Load(
    scene_s=13.0,
    groups_per_s=0.35,
    group_probes=4,
    probe_tokens=(500, 900),
    probe_answer=16,
    burst_every_s=5.0,
    burst_s=1.0,
    burst_requests=12,  # more than twice the lead that re-binding asks for
    burst_tokens=400,
    burst_answer=24,
    engines=DECODE_ENGINES,
)
"""About two thirds of what two cores can do, so that what waits, waits for an engine and not for a core."""
WARM_UP_TOKENS = 600


@dataclass(frozen=True)
class Size:
    """How long the study is."""

    scenes: int
    scene_s: float
    rounds: int
    """Of each regime."""


WHOLE = Size(scenes=9, scene_s=13.0, rounds=4)
QUICK = Size(scenes=2, scene_s=8.0, rounds=1)


def main() -> None:
    options = _options()
    size = QUICK if options.quick else WHOLE
    model_dir = small_model()
    setup = Setup(
        model_dir=model_dir,
        transport=options.transport,
        threads=1,
        kv_gib=0.25,
        decode_kv_gib=0.125,
        chunk=512,
        prefill_cache=False,
        decode_cache=False,
        decode_engines=DECODE_ENGINES,
        exact=True,
    )
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    reports: list[Report] = []
    plays: Mapping[Binding, Sequence[Play]] = {}
    if "bindings" in options.tables:
        plays = _bindings(setup, vocab_size, size, options.seed, reports)
    if "costs" in options.tables:
        # An engine of each kind has a core of its own here, as the model takes it to have.
        alone = replace(setup, decode_engines=1)
        reports.append(_costs(alone, Prompts(vocab_size, options.seed), size, plays.get("auto", ())))
    finish_together("policies", reports)
    if plays:
        plot(plays, OUTPUT / "policies.svg")
    (OUTPUT / "policies.md").write_text(page(reports, "policies.svg" if plays else None))
    console.print(f"written to {OUTPUT}/policies.md{', with its picture policies.svg' if plays else ''}")


def _bindings(
    setup: Setup, vocab_size: int, size: Size, seed: int, reports: list[Report]
) -> dict[Binding, list[Play]]:
    """Adds two tables to the reports."""
    load = replace(LOAD, scene_s=size.scene_s)
    scenes = [make_scene(load, vocab_size, seed, index) for index in range(size.scenes)]
    report = binding_report(setup, load, size.scenes, seed)
    with (
        deployment(setup, ROUTERS) as served,
        progress_bar("bindings: scenes", len(scenes) * len(BINDINGS)) as advance,
    ):
        _warm_up(served, Prompts(vocab_size, seed))
        plays = play_all(served, scenes, advance)
    add_bindings(report, plays)
    reports += [report, parts_report(setup, plays)]
    return plays


def _costs(setup: Setup, prompts: Prompts, size: Size, under_load: Sequence[Play]) -> Report:
    with (
        deployment(setup, ROUTERS) as served,
        progress_bar("costs: requests", len(REGIMES) * len(CHOICES) * size.rounds) as advance,
    ):
        _warm_up(served, prompts)
        measured = measure_costs(served, prompts, REGIMES, size.rounds, advance)
    verdicts = [verdict(each, BLOCK_SIZE, MODEL) for each in measured]
    return learned_report(setup, verdicts, size.rounds, under_load)


def _warm_up(served: Deployment, prompts: Prompts) -> None:
    """Every pair of engines has moved KV both ways of going, and every engine has computed."""
    for path in ("pull", "push", "local"):
        # Requests at the same time go to one decode engine each.
        questions = [
            Question(prompt=prompts.fresh(WARM_UP_TOKENS), path=path, max_tokens=4)
            for _ in range(served.setup.decode_engines)
        ]
        served.train(questions, 0.0)


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=["bindings", "costs"], choices=("bindings", "costs"))
    parser.add_argument("--quick", action="store_true", help="a short run: its percentiles say little")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument("--transport", default="nixl", choices=("nixl", "shm"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
