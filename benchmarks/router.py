"""The router beside vllm-router, in front of the same mock engines.

All sides run in one run, alternating; figures are medians over the rounds, ratios those of the same round.
The router has a core for itself; mock engines and load generator share the others. One prefill and one decode
engine, streamed chats of about 2,000 bytes, keep-alive connections, every answer checked.

    lone        one request at a time: TTFT through the router less TTFT of the decode engine alone, in turns
    requests    answers of one token, as fast as they come
    paced       streams of 128 tokens, one every 20 ms
    tokens      streams of 256 tokens, as fast as they come

kvhandoff runs with all it has: tenants with keys and limits, policy, conversation index, records with the
engines' accounts, metrics. vllm-router runs in its P/D mode, with its defaults.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version

from benchmarks.report import Report, console, in_turn, progress_bar
from benchmarks.router_figures import (
    WINDOWS,
    Lone,
    Round,
    added,
    goals,
    growth_goal,
    workers_goal,
)
from benchmarks.router_load import Load
from benchmarks.router_systems import (
    Cores,
    System,
    kvhandoff,
    mocks,
    rust,
    set_pace,
    vllm_router,
    why_no_vllm_router,
)

OURS, THEIRS = "kvhandoff", "vllm-router"
PACE_MS = 20.0
PACED_TOKENS = 128
FAST_TOKENS = 256
WARM_UP_REQUESTS = 100_000
"""More than the router's index (50,000 names, two a turn) and records (10,000) hold. And more than 87,381: at
so many keys a table of the last 50,000, one of each request, is made anew at its lasting size, 10 MB at once.
"""
GROWTH_REQUESTS = WINDOWS * 50_000
GROWTH_STEP = 2_000
WORKERS = 2


@dataclass(frozen=True)
class Size:
    """How much of each is measured. A machine's state drifts by more than the routers differ, so they take
    turns often, for a short time each."""

    rounds: int
    lone: int
    """Requests, in each turn."""
    turns: int
    """Of lone requests and of paced streams, in each round."""
    seconds: float
    connections: int = 32
    streams: int = 64


WHOLE = Size(rounds=10, lone=400, turns=2, seconds=2.5)
QUICK = Size(rounds=2, lone=200, turns=1, seconds=2.0)


def measure_lone(systems: Mapping[str, System], direct: System, size: Size) -> dict[str, list[Lone]]:
    """Every contestant's lone requests in one round."""
    lone = Load(port=0, requests=size.lone, tokens=4)
    found: dict[str, list[Lone]] = {name: [] for name in systems}
    for turn in range(size.turns):
        for name in in_turn(list(systems), turn):
            through, alone = systems[name].run(lone), direct.run(lone)
            found[name].append(added(through.ttft_s, alone.ttft_s))
    return found


def measure_paced(systems: Mapping[str, System], urls: Mapping[str, str], size: Size) -> dict[str, float]:
    """Every contestant's CPU per paced token in one round, in seconds."""
    paced = Load(port=0, connections=size.streams, seconds=size.seconds, tokens=PACED_TOKENS)
    cpu_s, tokens = dict.fromkeys(systems, 0.0), dict.fromkeys(systems, 0)
    set_pace(urls, PACE_MS)
    for turn in range(size.turns):
        for name in in_turn(list(systems), turn):
            streamed, used_s = systems[name].run_metered(paced)
            tokens[name] += streamed.tokens
            cpu_s[name] += used_s
    set_pace(urls, 0.0)
    return {name: cpu_s[name] / tokens[name] for name in systems}


def measure(system: System, lone: Sequence[Lone], token_cpu_s: float, size: Size) -> Round:
    """One contestant's round: at saturation, beside what was measured in turns."""
    requests = Load(port=0, connections=size.connections, seconds=size.seconds, tokens=1)
    answered, request_cpu = system.run_metered(requests)
    fast = system.run(Load(port=0, connections=size.connections, seconds=size.seconds, tokens=FAST_TOKENS))
    return Round(
        lone=lone,
        requests_per_s=answered.requests / answered.seconds,
        busy=request_cpu / answered.seconds,
        request_cpu_s=request_cpu / answered.requests,
        token_cpu_s=token_cpu_s,
        tokens_per_s=fast.tokens / fast.seconds,
        rss=system.rss(),
    )


def grow(system: System, connections: int, warm_up: int, requests: int) -> list[tuple[int, int]]:
    """(requests answered, bytes in memory) after the warm-up."""
    system.run(Load(port=0, connections=connections, requests=warm_up, prompt_bytes=200))
    samples = []
    for answered in range(0, requests + 1, GROWTH_STEP):
        samples.append((answered, system.rss()))
        if answered < requests:
            system.run(Load(port=0, connections=connections, requests=GROWTH_STEP, prompt_bytes=200))
    return samples


def measure_workers(urls: Mapping[str, str], size: Size) -> tuple[float, float]:
    """Requests/s with two workers: those reached, and those of two cores by the workers' CPU time. The former
    are fewer where load and engines need the same cores."""
    cores = Cores.split(WORKERS)
    options = ("--workers", str(WORKERS), "--return", "off")
    with kvhandoff(urls, cores, *options) as system:
        load = Load(port=0, connections=2 * size.connections, seconds=size.seconds, tokens=1)
        system.run(load)  # connections and code are warm
        answered, cpu_s = system.run_metered(load)
    return answered.requests / answered.seconds, WORKERS * answered.requests / cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two short rounds, no growth of memory")
    parser.add_argument("--growth", choices=("auto", "on", "off", "only"), default="auto")
    parser.add_argument("--only", choices=(OURS, THEIRS), help="one of the two")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    size = QUICK if options.quick else WHOLE
    rounds = options.rounds or size.rounds
    if rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, allowed is 1 or more")
    with_growth = options.growth in ("on", "only") or (options.growth == "auto" and not options.quick)

    cores = Cores.split()
    command = vllm_router()
    report = Report(
        name="router",
        title=f"Routers on one core before mock engines; medians of {rounds} rounds",
        columns=(
            "router",
            *("added TTFT p50, ms", "p99, ms", "requests/s", "core busy", "CPU, µs/request"),
            *("CPU, µs/token, paced", "tokens/s", "RSS, MB"),
        ),
        conditions={
            "rounds": rounds,
            "turns": size.turns,
            "seconds": size.seconds,
            "connections": size.connections,
            "streams": size.streams,
            "pace_ms": PACE_MS,
            "cores": {"router": cores.router, "rest": cores.rest},
            "httptools": version("httptools"),
            "uvloop": version("uvloop"),
            "vllm_router": command or why_no_vllm_router(),
            "kvhandoff_options": "--binding late, tenants with limits, log level warning",
        },
    )
    results: dict[str, list[Round]] = {}
    with ExitStack() as stack:
        urls = stack.enter_context(mocks(cores))
        direct = System("direct", int(urls["decode"].rpartition(":")[2]), "", cores)
        makers: dict[str, Callable[[], System]] = {OURS: lambda: stack.enter_context(kvhandoff(urls, cores))}
        if command is None:
            console.print(f"[bold]{why_no_vllm_router()}: kvhandoff alone is measured[/]")
        else:
            makers[THEIRS] = lambda: stack.enter_context(rust(command, urls, cores))
        systems = {name: make() for name, make in makers.items() if options.only in (None, name)}
        for system in systems.values():  # connections and code are warm
            system.run(Load(port=0, connections=4, requests=200, tokens=8))
        if options.growth != "only":
            results = {name: [] for name in systems}
            with progress_bar("measuring", rounds * len(systems)) as advance:
                for turn in range(rounds):
                    lone = measure_lone(systems, direct, size)
                    paced = measure_paced(systems, urls, size)
                    for name in in_turn(list(systems), turn):
                        results[name].append(measure(systems[name], lone[name], paced[name], size))
                        advance()
        if with_growth and OURS in systems:
            samples = grow(systems[OURS], size.connections, WARM_UP_REQUESTS, GROWTH_REQUESTS)
            report.details.append({"memory": samples})
            report.goals.append(growth_goal(samples))
        add(report, results)
        if options.growth != "only" and OURS in systems:
            reached, of_cores = measure_workers(urls, size)
            console.print(f"--workers {WORKERS}: {reached:.0f} requests/s; {of_cores:.0f} by CPU time")
            workers = {"workers": WORKERS, "requests_per_s": reached, "requests_per_cores_s": of_cores}
            report.details.append(workers)
            if THEIRS in results:
                report.goals.append(workers_goal(of_cores, results[THEIRS], WORKERS, THEIRS))
    report.finish()


def add(report: Report, results: Mapping[str, Sequence[Round]]) -> None:
    """The table's lines and the goals that compare them."""
    for name, rounds in results.items():
        report.row(name, *cells(rounds))
        report.details.append({name: [asdict(r) for r in rounds]})
    if OURS in results and THEIRS in results:
        report.goals += goals(results, OURS, THEIRS)


def cells(rounds: Sequence[Round]) -> list[str]:
    """One contestant's medians."""

    def median(figure: str) -> float:
        return statistics.median(getattr(r, figure) for r in rounds)

    turns = [lone for r in rounds for lone in r.lone]
    return [
        f"{1e3 * statistics.median(lone.p50_s for lone in turns):.2f}",
        f"{1e3 * statistics.median(lone.p99_s for lone in turns):.2f}",
        f"{median('requests_per_s'):.0f}",
        f"{median('busy'):.2f}",
        f"{1e6 * median('request_cpu_s'):.0f}",
        f"{1e6 * median('token_cpu_s'):.1f}",
        f"{median('tokens_per_s'):.0f}",
        f"{median('rss') / 1e6:.0f}",
    ]


if __name__ == "__main__":
    main()
