"""References that are stale, stand for something else, or are used again: what comes of them, side by side.

Pairs of vLLM engines on one model, one after the other: upstream's NixlConnector as shipped, the same tuned
for few cores (see `tuned_upstream`), and this connector. All play the same scenes. In each, an engine is sent
a reference to KV that is not, or not any more, that of the prompt that comes with it, and the answer is
compared with the right text: the same engine's, alone.

    consumed        the reference has been read once; it is used again, for the same prompt
    recycled        the same, and the prefill engine has computed other prompts since
    another prompt  a reference that nobody has read yet is used for another prompt, of as many blocks
    longer prompt   the same, for a prompt of more blocks than the reference names
    expired         nobody came for the reference while its lease ran, and other prompts were computed
    edited history  the second turn of a conversation whose first message has been edited, with the reference
                    to the first turn

An engine that dies, or doesn't answer before the scene's deadline, has that in its row; both engines' output
is kept, the pair is started again, and the next scene is played. The exit code is 0 when this connector has
answered each scene with the right text, and its record says why it didn't use the KV; else 1.

The prefix caches are off, so that an answer shows what was read, and not what an engine had anyway; and the
prefill engine's cache is small, so that its blocks are soon used again. Greedy, float32. All engines'
processes sleep where they would spin while they wait for each other (`CALM`): else some kernels starve one of
two engines on two cores, whatever its connector.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
from rich.table import Table
from rich.text import Text

from benchmarks.report import console, machine, progress_bar
from benchmarks.stale_scenes import LEASE_S, SCENES, Played, play
from benchmarks.stale_systems import Ours, System, Upstream
from benchmarks.vllm_engines import PYTHON_ENV, VllmSettings, default_python, run_to_the_end
from benchmarks.vllm_pairs import KVHANDOFF, Pair, PairKind, pair
from kvhandoff.embedded.models import DEFAULT_MODEL, resolve_model

OUTPUT = Path("build/compare")
MAX_TOKENS = 8
MAX_MODEL_LEN = 1536
BLOCKS = 14
"""Of the prefill engine, 128 tokens each: few, so that they are soon used again."""
DEADLINE_S = 180.0
"""Of a scene. Upstream as shipped takes up to 20 s for a transfer on two cores."""
COLUMNS = ("scene", "system", "right text", "what came", "HTTP", "verdict", "what record or log says")
VERDICT = COLUMNS.index("verdict")


Report = Callable[[Played], None]


def systems() -> dict[str, tuple[PairKind, type[System]]]:
    """What is compared, by name."""
    theirs = {"kv_lease_duration": int(LEASE_S), "bidirectional_kv_xfer": True}
    own = {"offer_lease_s": LEASE_S}
    few = ("--num-gpu-blocks-override", str(BLOCKS))
    shipped = PairKind(name="upstream", connector="nixl", extra=theirs, prefill_arguments=few)
    tuned = replace(shipped, name="upstream-tuned", tuned=True)
    ours = PairKind(name=KVHANDOFF, connector="kvhandoff", extra=own, prefill_arguments=few)
    return {shipped.name: (shipped, Upstream), tuned.name: (tuned, Upstream), ours.name: (ours, Ours)}


async def run(
    settings: VllmSettings, chosen: Sequence[str], scenes: Sequence[str], deadline_s: float, report: Report
) -> None:
    """Play the scenes on each system in turn, and report each when it has been played. A pair that has lost
    an engine is started again. Raises EngineFailed when one doesn't start."""
    for name in chosen:
        kind, made = systems()[name]
        left = deque(scenes)
        while left:
            console.print(f"{name}: two vLLM engines are started")
            async with pair(settings, kind) as engines, _session() as session:
                await play_on(made(engines, session, MAX_TOKENS), left, deadline_s, report)


def _session() -> aiohttp.ClientSession:
    """The deadline is the scene's. No connection is used again: one that the server had just closed for being
    idle would look like a death."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(force_close=True)
    )


async def play_on(system: System, left: deque[str], deadline_s: float, report: Report) -> None:
    """Play what is left on one pair of engines, as long as they live."""
    while left:
        played = await play(system, left.popleft(), deadline_s)
        report(played)
        if played.engines_are_lost:
            keep_output(system.pair, played.scene)
            return


def keep_output(engines: Pair, scene: str) -> None:
    """Else the next start would overwrite it."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for engine in engines.engines:
        shutil.copy(engine.spec.log, OUTPUT / f"{engine.spec.name}-{scene.replace(' ', '-')}.log")


def cells(played: Sequence[Played]) -> list[tuple[str, ...]]:
    """Of the table, scene by scene."""
    return [
        (
            *(each.scene, each.system, _shown(each.right), _shown(each.came)),
            *("-" if each.status is None else str(each.status), each.verdict, each.reason),
        )
        for scene, system in product(SCENES, systems())
        for each in played
        if (each.scene, each.system) == (scene, system)
    ]


def _shown(text: str | None) -> str:
    return "-" if text is None else repr(text)


def table(played: Sequence[Played]) -> Table:
    """All of it, for a terminal."""
    made = Table(title="Stale and strange references", title_justify="left", show_lines=True)
    for column in COLUMNS:
        made.add_column(column, overflow="fold")
    for row in cells(played):
        style = "green" if row[VERDICT] == "right text" else "bold red"
        made.add_row(*(Text(cell, style if i == VERDICT else "") for i, cell in enumerate(row)))
    return made


def markdown(played: Sequence[Played]) -> str:
    """The same, for a document."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(map(_as_markdown, row) for row in cells(played))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _as_markdown(cell: str) -> str:
    escaped = cell.replace("|", "\\|")
    return f"`{escaped}`" if cell[0] in "'\"" else escaped


def write(played: Sequence[Played], conditions: dict[str, Any]) -> Path:
    """`build/compare/stale_references.json`, and the table as `.md` beside it."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / "stale_references.json"
    content = {"conditions": conditions, "played": [asdict(each) for each in played]}
    path.write_text(json.dumps(content, indent=2) + "\n")
    path.with_suffix(".md").write_text(markdown(played))
    return path


def shortcomings(played: Sequence[Played]) -> list[str]:
    """Where this connector has not answered with the right text, or its record doesn't say why it had to."""
    found = []
    for each in (each for each in played if each.system == KVHANDOFF):
        if each.verdict != "right text":
            found.append(f"{each.scene}: {each.verdict}")
        elif SCENES[each.scene].account not in each.reason:
            found.append(f"{each.scene}: its record says '{each.reason}', not '{SCENES[each.scene].account}'")
    return found


def main() -> None:
    options = _options()
    settings = VllmSettings(
        python=options.vllm_python,
        model_dir=resolve_model(options.model),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        threads=options.threads,
        prefix_cache=False,
        calm=True,  # no times are compared, and starved engines show nothing
    )
    conditions = machine() | settings.conditions() | _conditions(options)
    played: list[Played] = []
    total = len(options.systems) * len(options.scenes)
    with progress_bar("stale references: scenes", total) as advance:

        def report(each: Played) -> None:
            played.append(each)
            write(played, conditions)  # what has been played is not lost when a pair doesn't start again
            came = _shown(each.came)
            console.print(f"{each.system}: {each.scene}: {each.verdict}: {came}, {each.reason}", markup=False)
            advance()

        run_to_the_end(run(settings, options.systems, options.scenes, options.deadline, report))
    console.print(table(played))
    console.print(f"written to {write(played, conditions)}, and as a table beside it")
    if found := shortcomings(played):
        raise SystemExit(f"{KVHANDOFF} falls short: {'; '.join(found)}")


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "lease_s": LEASE_S,
        "deadline_of_a_scene_s": options.deadline,
        "max_tokens": MAX_TOKENS,
        "blocks_of_the_prefill_engine": BLOCKS,
    }


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--systems", nargs="+", default=list(systems()), choices=list(systems()))
    parser.add_argument("--scenes", nargs="+", default=list(SCENES), choices=list(SCENES))
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_S, help="seconds for a scene to be answered"
    )
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--vllm-python", default=default_python(), help=f"default: ${PYTHON_ENV}")
    options = parser.parse_args(arguments)
    if not options.deadline > LEASE_S:
        parser.error(f"--deadline: got {options.deadline:g}, allowed is more than a lease's {LEASE_S:g} s")
    return options


if __name__ == "__main__":
    main()
