"""Time to the first token by path, and of a conversation's next turn with and without return.

Two experiments with conditions of their own, on processes that a user would start; their figures are never
combined.

    paths    pull, push and local: lone requests, and trains at fixed rates; no decode prefix cache
    return   second turns of conversations, return off and on; no prefill prefix cache

A lone request is sent when the engines are idle. A train is an open loop: its requests are sent at their
times, answered or not. On a CPU most prompts come faster than one engine computes them, so that trains are
short, and their times those of a queue. Each engine may use all cores: of a lone request's long parts, one
runs at a time.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace

from rich.progress import Progress

from benchmarks.deployment import Setup, deployment
from benchmarks.path_runs import (
    ANSWER_TOKENS,
    MAX_TOKENS,
    NEW_TOKENS,
    PATHS,
    RETURNS,
    Cell,
    Prompts,
    measure_paths,
    measure_return,
    warm_up,
)
from benchmarks.path_tables import add_path_goals, add_paths, add_return, path_report, return_report
from benchmarks.report import Report, finish_together, progress_bar
from kvhandoff.embedded.models import DEFAULT_MODEL, resolve_model

TOKENS = (1000, 2000, 4000, 8000)
RATES = (1.0, 4.0)
HISTORIES = (2000, 4000, 7900)
CHUNK = 512
WARM_UP_TOKENS = 2 * CHUNK


def main() -> None:
    options = _options()
    with Progress(transient=True) as progress:
        model_dir = resolve_model(options.model, progress)
    facts = json.loads((model_dir / "config.json").read_text())
    _check_lengths(options, facts["max_position_embeddings"])
    setup = Setup(
        model_dir=model_dir,
        transport=options.transport,
        threads=options.threads,
        kv_gib=options.kv_memory,
        chunk=CHUNK,
        prefill_cache=True,
        decode_cache=True,
    )
    prompts = Prompts(facts["vocab_size"])
    reports: list[Report] = []
    if "paths" in options.tables:
        reports.append(_paths(replace(setup, decode_cache=False), prompts, options))
    if "return" in options.tables:
        reports.append(_return(replace(setup, prefill_cache=False), prompts, options))
    finish_together("paths", reports)


def _paths(setup: Setup, prompts: Prompts, options: argparse.Namespace) -> Report:
    lengths = sorted(options.tokens, reverse=True)  # a machine that is too slow for them fails at once
    cells = [Cell(tokens, rate) for tokens in lengths for rate in (None, *options.rates)]
    report = path_report(setup, cells, options.rounds, options.trains)
    rounds = {cell: options.rounds if cell.rate is None else options.trains for cell in cells}
    with (
        deployment(setup) as served,
        progress_bar("paths: requests and trains", len(PATHS) * sum(rounds.values())) as advance,
    ):
        warm_up(served, prompts, WARM_UP_TOKENS)
        for cell in cells:
            answers = measure_paths(served, prompts, cell, rounds[cell], advance)
            add_paths(report, cell, answers)
            if cell.rate is None:
                add_path_goals(report, cell, CHUNK, answers, longest=cell.tokens == lengths[0])
    return report


def _return(setup: Setup, prompts: Prompts, options: argparse.Namespace) -> Report:
    report = return_report(setup, options.rounds)
    histories = sorted(options.histories, reverse=True)
    with (
        deployment(setup) as served,
        progress_bar("return: second turns", len(RETURNS) * options.rounds * len(histories)) as advance,
    ):
        warm_up(served, prompts, WARM_UP_TOKENS)
        for history in histories:
            answers = measure_return(served, prompts, history, options.rounds, advance)
            add_return(report, history, answers, longest=history == histories[0])
    return report


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tables", nargs="+", default=["paths", "return"], choices=("paths", "return"))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="prompt lengths")
    parser.add_argument(
        "--rates", nargs="*", type=float, default=RATES, help="requests/s, beside lone requests"
    )
    parser.add_argument("--histories", nargs="+", type=int, default=HISTORIES, help="tokens of first turns")
    parser.add_argument("--rounds", type=int, default=3, help="of lone requests, and of conversations")
    parser.add_argument("--trains", type=int, default=1, help="of each path, length and rate")
    parser.add_argument("--transport", default="nixl", choices=("nixl", "shm"))
    cores = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=cores, help="of each engine; default: the cores")
    parser.add_argument("--kv-memory", type=float, default=2.0, help="GiB for each engine")
    options = parser.parse_args(arguments)
    for name in ("rounds", "trains", "threads", "kv_memory"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}, allowed is more than 0")
    if any(rate <= 0 for rate in options.rates):
        parser.error(f"--rates: got {options.rates}, allowed is more than 0")
    return options


def _check_lengths(options: argparse.Namespace, context: int) -> None:
    """Ends the process with a message when a prompt and its answer are more than the model can have."""
    bounds = {
        "tokens": (1, context - MAX_TOKENS),
        "histories": (ANSWER_TOKENS + 1, context - NEW_TOKENS - MAX_TOKENS),
    }
    for name, (least, most) in bounds.items():
        wrong = [tokens for tokens in getattr(options, name) if not least <= tokens <= most]
        if wrong:
            raise SystemExit(f"--{name}: got {wrong[0]}, allowed is {least} to {most}")


if __name__ == "__main__":
    main()
