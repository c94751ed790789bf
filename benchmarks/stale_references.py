"""References that are stale, stand for something else, or are used again: what comes of them, side by side.

Two pairs of vLLM engines on one model, one after the other: upstream's NixlConnector as shipped, and this
connector. Both play the same five scenes. In each, an engine is sent a reference to KV that is not, or not
any more, that of the prompt that comes with it, and the answer is compared with the right text: the same
engine's, alone.

    consumed        the reference has been read once; it is used again, for the same prompt
    recycled        the same, and the prefill engine has computed other prompts since
    another prompt  a reference that nobody has read yet is used for another prompt
    expired         nobody came for the reference while its lease ran, and other prompts were computed
    edited history  the second turn of a conversation whose first message has been edited, with the reference
                    to the first turn

The prefix caches are off, so that an answer shows what was read, and not what an engine had anyway; and the
prefill engine's cache is small, so that its blocks are soon used again. Greedy, float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
from rich.table import Table
from rich.text import Text

from benchmarks.report import OUTPUT, console
from benchmarks.stale_systems import Ours, Reference, Served, System, Upstream
from benchmarks.vllm_engines import PYTHON_ENV, VllmSettings, default_python, run_to_the_end
from benchmarks.vllm_pairs import KVHANDOFF, PairKind, pair
from kvhandoff.embedded.models import DEFAULT_MODEL, resolve_model

LEASE_S = 6.0
"""Of what a prefill engine keeps, on both systems: `kv_lease_duration` and `offer_lease_s`."""
MAX_TOKENS = 8
MAX_MODEL_LEN = 1536
BLOCKS = 14
"""Of the prefill engine, 128 tokens each: few, so that they are soon used again."""
FILLING_WORDS = 900
FILLING_PROMPTS = 2
"""So many of so many words use every block of the prefill engine again."""

QUESTION = "Question: What is the secret word?\nAnswer: The secret word is"

Verdict = Literal["right text", "WRONG TEXT", "error", "no answer"]


@dataclass(frozen=True, kw_only=True)
class Played:
    """One scene on one system."""

    scene: str
    system: str
    right: str
    came: str
    status: int | None
    verdict: Verdict
    reason: str


Scene = Callable[[System], Awaitable[tuple[str, Served]]]
"""Returns the prompt that was asked last, and what came."""


def story(word: str, *, first: str = "") -> str:
    """A prompt of some 400 tokens that the model can answer from nothing but its beginning's middle."""
    filling = "The garden is quiet in the morning, and the birds sing in the old trees near the gate. "
    return f"{first}{filling * 9}The secret word is {word}. {filling * 9}\n\n{QUESTION}"


async def fill(system: System) -> None:
    """Have the prefill engine use all of its blocks for other prompts."""
    for number in range(FILLING_PROMPTS):
        await system.compute(f"{number} " + "river stone " * (FILLING_WORDS // 2))


async def _consumed(system: System, prompt: str) -> Reference:
    """A reference that has been read, by the request that it was made for."""
    reference, _ = await system.prefill(prompt)
    await system.decode(prompt, reference)
    return reference


async def consumed(system: System) -> tuple[str, Served]:
    prompt = story("apple")
    return prompt, await system.decode(prompt, await _consumed(system, prompt))


async def recycled(system: System) -> tuple[str, Served]:
    prompt = story("window")
    reference = await _consumed(system, prompt)
    await fill(system)
    return prompt, await system.decode(prompt, reference)


async def another_prompt(system: System) -> tuple[str, Served]:
    reference, _ = await system.prefill(story("silver"))
    prompt = story("dragon", first="Once more. ")  # not a token at the same place
    return prompt, await system.decode(prompt, reference)


async def expired(system: System) -> tuple[str, Served]:
    prompt = story("candle")
    reference, _ = await system.prefill(prompt)
    await asyncio.sleep(LEASE_S + 2.0)  # the scene is that nobody comes
    await fill(system)
    return prompt, await system.decode(prompt, reference)


async def edited_history(system: System) -> tuple[str, Served]:
    asked = story("monkey")
    reference, _ = await system.prefill(asked)
    first = await system.decode(asked, reference)
    answered = first.text.split(".")[0].replace("monkey", "bottle")
    edited = f"{story('bottle')}{answered}.\n\n{QUESTION}"
    reference, used = await system.prefill(edited, first.kept)
    second = await system.decode(edited, reference)
    reason = second.reason if used == second.reason else f"{used}; {second.reason}"
    return edited, Served(second.status, second.text, reason)


SCENES: dict[str, Scene] = {
    "consumed": consumed,
    "recycled": recycled,
    "another prompt": another_prompt,
    "expired": expired,
    "edited history": edited_history,
}


async def play(system: System, scene: str) -> Played:
    """Play one scene, and judge what came."""
    prompt, served = await SCENES[scene](system)
    right = await system.alone(prompt)
    return Played(
        scene=scene,
        system=system.pair.kind.name,
        right=right,
        came=served.text,
        status=served.status,
        verdict=judge(served, right),
        reason=served.reason,
    )


def judge(served: Served, right: str) -> Verdict:
    """Wrong is any text but the engine's own."""
    if served.status is None:
        return "no answer"
    if served.status != 200:
        return "error"
    return "right text" if served.text == right else "WRONG TEXT"


def systems() -> dict[str, tuple[PairKind, type[System]]]:
    """What is compared, by name."""
    lease = {"kv_lease_duration": int(LEASE_S), "bidirectional_kv_xfer": True}
    own = {"offer_lease_s": LEASE_S}
    few = ("--num-gpu-blocks-override", str(BLOCKS))
    upstream = PairKind(name="upstream", connector="nixl", extra=lease, prefill_arguments=few)
    ours = PairKind(name=KVHANDOFF, connector="kvhandoff", extra=own, prefill_arguments=few)
    return {"upstream": (upstream, Upstream), KVHANDOFF: (ours, Ours)}


async def run(settings: VllmSettings, chosen: Sequence[str], scenes: Sequence[str]) -> list[Played]:
    """Play the scenes on each system in turn."""
    played = []
    for name in chosen:
        kind, made = systems()[name]
        console.print(f"{name}: two vLLM engines are started")
        async with pair(settings, kind) as engines, aiohttp.ClientSession() as session:
            system = made(engines, session, MAX_TOKENS)
            for scene in scenes:
                played.append(await play(system, scene))
                console.print(f"{name}: {scene}: {played[-1].verdict}: {played[-1].came!r}", markup=False)
    return played


def table(played: Sequence[Played]) -> Table:
    """All of it, scene by scene."""
    made = Table(title="Stale and strange references", title_justify="left", show_lines=True)
    for column in ("scene", "system", "right text", "what came", "HTTP", "verdict", "what the record says"):
        made.add_column(column, overflow="fold")
    for scene in SCENES:
        for each in (each for each in played if each.scene == scene):
            style = "green" if each.verdict == "right text" else "bold red"
            made.add_row(
                *(each.scene, each.system, Text(repr(each.right)), Text(repr(each.came))),
                *("-" if each.status is None else str(each.status), Text(each.verdict, style), each.reason),
            )
    return made


def write(played: Sequence[Played], settings: VllmSettings) -> Path:
    """`build/bench/stale_references.json`."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / "stale_references.json"
    conditions: dict[str, Any] = settings.conditions() | {
        "lease_s": LEASE_S,
        "max_tokens": MAX_TOKENS,
        "blocks_of_the_prefill_engine": BLOCKS,
    }
    content = {"conditions": conditions, "played": [asdict(each) for each in played]}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def main() -> None:
    options = _options()
    settings = VllmSettings(
        python=options.vllm_python,
        model_dir=resolve_model(options.model),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        threads=options.threads,
        prefix_cache=False,
    )
    played = run_to_the_end(run(settings, options.systems, options.scenes))
    console.print(table(played))
    console.print(f"written to {write(played, settings)}")
    if any(each.system == KVHANDOFF and each.verdict != "right text" for each in played):
        raise SystemExit(f"{KVHANDOFF} has not answered every scene with the right text")


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--systems", nargs="+", default=list(systems()), choices=list(systems()))
    parser.add_argument("--scenes", nargs="+", default=list(SCENES), choices=list(SCENES))
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--vllm-python", default=default_python(), help=f"default: ${PYTHON_ENV}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
