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
compared. Then the paths are forced in some regimes, beside `auto` (`policy_costs.py`).

Written: build/bench/policies.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.deployment import BLOCK_SIZE, MODEL, Deployment, Question, Setup, deployment
from benchmarks.path_runs import Prompts
from benchmarks.policy_costs import CHOICES, REGIMES, measure_costs, verdict
from benchmarks.policy_plot import page, plot
from benchmarks.policy_runs import BINDINGS, ROUTERS, play_all
from benchmarks.policy_tables import add_bindings, binding_report, learned_report, parts_report
from benchmarks.policy_trace import Load, make_scene
from benchmarks.report import OUTPUT, console, finish_together, progress_bar
from benchmarks.small_model import small_model

DECODE_ENGINES = 3
LOAD = Load(
    scene_s=12.0,
    probes_per_s=1.5,
    probe_tokens=(600, 1200),
    probe_answer=24,
    burst_every_s=2.5,
    burst_s=0.8,
    burst_requests=5,
    burst_tokens=500,
    burst_answer=48,
    engines=DECODE_ENGINES,
)
WARM_UP_TOKENS = 600


@dataclass(frozen=True)
class Size:
    """How long the study is."""

    scenes: int
    scene_s: float
    rounds: int
    """Of each regime."""


WHOLE = Size(scenes=9, scene_s=12.0, rounds=4)
QUICK = Size(scenes=2, scene_s=7.5, rounds=1)


def main() -> None:
    options = _options()
    size: Size = QUICK if options.quick else WHOLE
    load = replace(LOAD, scene_s=size.scene_s)
    model_dir = small_model()
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    setup = Setup(
        model_dir=model_dir,
        transport=options.transport,
        threads=1,
        kv_gib=0.25,
        decode_kv_gib=0.06,
        chunk=512,
        prefill_cache=False,
        decode_cache=False,
        decode_engines=DECODE_ENGINES,
        exact=True,
    )
    scenes = [make_scene(load, vocab_size, options.seed, index) for index in range(size.scenes)]
    prompts = Prompts(vocab_size, options.seed)
    bindings = binding_report(setup, load, size.scenes, options.seed)
    with deployment(setup, ROUTERS) as served:
        _warm_up(served, prompts)
        with progress_bar("bindings: scenes", len(scenes) * len(BINDINGS)) as advance:
            plays = play_all(served, scenes, advance)
        with progress_bar("costs: requests", len(REGIMES) * len(CHOICES) * size.rounds) as advance:
            measured = measure_costs(served, prompts, REGIMES, size.rounds, advance)
    add_bindings(bindings, plays)
    verdicts = [verdict(each, BLOCK_SIZE, MODEL) for each in measured]
    reports = [
        bindings,
        parts_report(setup, plays),
        learned_report(setup, verdicts, size.rounds, plays["auto"]),
    ]
    finish_together("policies", reports)
    plot(plays, OUTPUT / "policies.svg")
    (OUTPUT / "policies.md").write_text(page(reports, "policies.svg"))
    console.print(f"written to {OUTPUT / 'policies.md'} and {OUTPUT / 'policies.svg'}")


def _warm_up(served: Deployment, prompts: Prompts) -> None:
    """Every pair of engines has moved KV both ways of going, and every engine has computed."""
    for path in ("pull", "push", "local"):
        # Requests at the same time go to one decode engine each.
        questions = [
            Question(prompt=prompts.fresh(WARM_UP_TOKENS), path=path, max_tokens=4)
            for _ in range(DECODE_ENGINES)
        ]
        served.train(questions, 0.0)


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short run: its percentiles say little")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument("--transport", default="nixl", choices=("nixl", "shm"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
