"""Time to the first token on vLLM engines: monolithic, with upstream's connectors, and with this one.

One machine, one vLLM, one model, one run. All requests are lone ones: the next is sent when the last has been
answered. Prompts are random token ids, and share nothing.

    monolithic        one engine without a connector
    upstream pull     NixlConnector behind this project's router, as shipped and tuned
    upstream push     NixlPushConnector, the same
    upstream return   a second turn with `bidirectional_kv_xfer`; the first one's answer is not streamed
    kvhandoff         pull, push and return; the engines of all three are started alike

**How they take turns.** Two engines are as many as a small machine runs, and a connector is that of a whole
engine, so that cases can't take turns request by request. They do in blocks: the deployment of a case is
started, warmed up, measured and ended, then the next; and in the next round the same the other way round
(A B C, C B A), so that what slowly changes falls on all alike. Rivals follow each other.

No prefill engine has a prefix cache: a second turn would find its history there. The decode engines do.

Upstream *tuned*: as shipped, each worker's thread is bound to the machine's last core, and NIXL's progress
thread spins. On a few cores that costs seconds. Tuned, neither is so (`tuned_upstream`), and the comparison
is one of protocols.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from benchmarks.light_model import LIGHT_MODEL, light_model
from benchmarks.path_runs import Prompts
from benchmarks.report import Report, progress_bar
from benchmarks.vllm_cases import (
    ANSWER_TOKENS,
    MAX_TOKENS,
    NEW_TOKENS,
    Case,
    Client,
    Sample,
    cases,
)
from benchmarks.vllm_engines import (
    PYTHON_ENV,
    EngineSpec,
    VllmSettings,
    default_python,
    engines,
    run_to_the_end,
)
from benchmarks.vllm_figures import COLUMNS, add_rows, goals, median_ttft
from benchmarks.vllm_pairs import pair, router
from kvhandoff.embedded.models import DEFAULT_MODEL, resolve_model

CHUNK = 512
LONGEST_S = 300.0
"""For one answer."""
QUICK = {"tokens": 512, "requests": 2, "blocks": 1}


@asynccontextmanager
async def served(settings: VllmSettings, case: Case) -> AsyncIterator[Client]:
    """A deployment, and a client of it."""
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=LONGEST_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        if case.kind is None:
            spec = EngineSpec(name=case.name, transfer=None)
            [engine] = await stack.enter_async_context(engines(settings, [spec]))
            yield Client(session, engine.url, routed=False)
        else:
            made = await stack.enter_async_context(pair(settings, case.kind))
            url = await stack.enter_async_context(router(made))
            yield Client(session, url, routed=True)


async def block(
    client: Client, case: Case, prompts: Prompts, tokens: int, numbers: range, advance: Callable[[], None]
) -> list[Sample]:
    """Warm a deployment up, and take the case's samples of these numbers."""
    await client.measure(case, prompts, 2 * CHUNK)
    found = []
    for number in numbers:
        found.append(await client.measure(case, prompts, tokens, number))
        advance()
    return found


async def run(settings: VllmSettings, options: argparse.Namespace) -> dict[str, list[Sample]]:
    """The samples of every case, by its name."""
    facts = json.loads((settings.model_dir / "config.json").read_text())
    prompts, chosen = Prompts(facts["vocab_size"]), _cases(options)
    samples: dict[str, list[Sample]] = {case.name: [] for case in chosen}
    with progress_bar("vllm: requests", options.requests * len(chosen)) as advance:
        for turn, numbers in enumerate(_split(options.requests, options.blocks)):
            for case in chosen if turn % 2 == 0 else reversed(chosen):
                async with served(settings, case) as client:
                    samples[case.name] += await block(client, case, prompts, options.tokens, numbers, advance)
    return samples


def report_on(
    settings: VllmSettings, options: argparse.Namespace, samples: dict[str, list[Sample]], report: Report
) -> None:
    """Fill the table, and hold the goals against it."""
    chosen = _cases(options)
    monolithic = median_ttft(samples["monolithic"])
    add_rows(report, chosen, samples, monolithic)
    report.goals += goals(chosen, samples, monolithic)


def _split(requests: int, blocks: int) -> list[range]:
    """The numbers of so many requests in so many blocks, none of them empty."""
    blocks = min(blocks, requests)
    return [range(requests * i // blocks, requests * (i + 1) // blocks) for i in range(blocks)]


def _cases(options: argparse.Namespace) -> list[Case]:
    found = cases(shipped="shipped" in options.upstream, tuned="tuned" in options.upstream)
    return [each for each in found if options.only is None or each.name in ("monolithic", *options.only)]


def main() -> None:
    options = _options()
    settings = VllmSettings(
        python=options.vllm_python,
        model_dir=light_model() if options.model == LIGHT_MODEL else resolve_model(options.model),
        dtype=options.dtype,
        max_model_len=options.tokens + max(ANSWER_TOKENS) + NEW_TOKENS + MAX_TOKENS + 2 * CHUNK,
        chunk=CHUNK,
        threads=options.threads,
        kv_gib=options.kv_memory,
        calm=options.calm,
    )
    report = Report(
        name="vllm",
        title=f"TTFT of prompts of {options.tokens} tokens on vLLM engines; in s, medians.\n"
        "wait: TTFT less the monolithic one's; prefill leg, and what comes after it: at the router.\n"
        f"return: a second turn, after about as many tokens of history and with {NEW_TOKENS} new ones.",
        columns=COLUMNS,
        conditions=_conditions(settings, options),
    )
    samples = run_to_the_end(run(settings, options))
    report_on(settings, options, samples, report)
    report.finish()


def _conditions(settings: VllmSettings, options: argparse.Namespace) -> dict[str, Any]:
    return settings.conditions() | {
        "prefix_cache": "decode engines only",
        "prompt_tokens": options.tokens,
        "requests_of_each_case": options.requests,
        "blocks": options.blocks,
        "upstream": options.upstream,
        "sampling": f"greedy, {MAX_TOKENS} tokens",
        "prompts": "random token ids, nothing shared",
        "second_turn": f"{options.tokens} tokens, an answer of {min(ANSWER_TOKENS)} to {max(ANSWER_TOKENS)}, "
        f"{NEW_TOKENS} new tokens",
        "engines": "1 prefill, 1 decode, 1 router: processes of this host; monolithic: 1 engine, no router",
    }


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"{LIGHT_MODEL}: the default's KV, little to compute"
    )
    parser.add_argument("--calm", action="store_true", help="all engines' processes sleep where they spin")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt")
    parser.add_argument("--requests", type=int, default=20, help="of each case")
    parser.add_argument("--blocks", type=int, default=2, help="times that each deployment is started")
    parser.add_argument("--upstream", nargs="+", default=["shipped", "tuned"], choices=("shipped", "tuned"))
    parser.add_argument("--only", nargs="+", help="cases to measure, beside monolithic")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="per engine")
    parser.add_argument("--kv-memory", type=int, default=2, help="GiB for each engine")
    parser.add_argument("--quick", action="store_true", help="a few short requests, to try it out")
    parser.add_argument("--vllm-python", default=default_python(), help=f"default: ${PYTHON_ENV}")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    for name in ("tokens", "requests", "blocks", "threads", "kv_memory"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}, allowed is more than 0")
    known = [each.name for each in cases(shipped=True, tuned=True)]
    unknown = [name for name in options.only or () if name not in known]
    if unknown:
        parser.error(f"--only: got {unknown[0]!r}, allowed is {', '.join(known)}")
    return options


if __name__ == "__main__":
    main()
