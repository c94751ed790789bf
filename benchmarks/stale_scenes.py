"""The scenes of `stale_references`: what is sent, in which order, and how what came is judged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.stale_systems import Reference, Served, StepFailed, System
from kvhandoff.core.reasons import Reason

LEASE_S = 30.0
"""Of what a prefill engine keeps, on both systems: upstream's own default of `kv_lease_duration`."""
FILLING_WORDS = 900
FILLING_PROMPTS = 2
"""So many of so many words use every block of the prefill engine again."""
LONGER = 12
"""Sentences of a story of one block more: 40 tokens for each beyond the usual 8."""

QUESTION = "Question: What is the secret word?\nAnswer: The secret word is"

Verdict = Literal["right text", "WRONG TEXT", "error", "no answer", "the engine died"]


@dataclass(frozen=True, kw_only=True)
class Played:
    """One scene on one system."""

    scene: str
    system: str
    verdict: Verdict
    reason: str
    """What the engines have written down about the KV; of a failure, which step failed and why."""
    right: str | None = None
    """None: no engine was left to ask."""
    came: str | None = None
    """The answer's text; None: there was none."""
    status: int | None = None
    """HTTP status that the client got; None: none came."""

    @property
    def engines_are_lost(self) -> bool:
        """Nothing more can be played on this pair."""
        return self.verdict in ("no answer", "the engine died")


Asked = Callable[[System], Awaitable[tuple[str, Served]]]
"""Returns the prompt that was asked last, and what came. Raises StepFailed."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One kind of reference that doesn't stand for the prompt's KV."""

    ask: Asked
    account: str
    """What this connector's record must say of it."""


def story(word: str, *, first: str = "", sentences: int = 8) -> str:
    """A prompt of three blocks that the model can answer from nothing but its middle."""
    filling = "The garden is quiet in the morning, and the birds sing in the old trees near the gate. "
    return f"{first}{filling * sentences}The secret word is {word}. {filling * sentences}\n\n{QUESTION}"


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
    reference, _ = await system.prefill(story("silver", first="Good day. "))
    prompt = story("dragon", first="Once more. ")  # as long, and another one from its first token on
    return prompt, await system.decode(prompt, reference)


async def longer_prompt(system: System) -> tuple[str, Served]:
    reference, _ = await system.prefill(story("copper"))
    prompt = story("forest", first="Once more. ", sentences=LONGER)
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
    return edited, Served(second.text, reason)


SCENES: dict[str, Scene] = {
    "consumed": Scene(ask=consumed, account=Reason.OFFER_CONSUMED),
    "recycled": Scene(ask=recycled, account=Reason.OFFER_CONSUMED),
    "another prompt": Scene(ask=another_prompt, account=Reason.CHAIN_MISMATCH),
    "longer prompt": Scene(ask=longer_prompt, account=Reason.CHAIN_MISMATCH),
    "expired": Scene(ask=expired, account=Reason.OFFER_EXPIRED),
    "edited history": Scene(ask=edited_history, account="history: 128 of "),  # the first block is unedited
}


async def play(system: System, scene: str, deadline_s: float) -> Played:
    """Play one scene, and judge what came: wrong is any text but the same engine's own, alone."""
    came = right = status = None
    verdict: Verdict
    system.begin()
    try:
        async with asyncio.timeout(deadline_s):
            prompt, served = await SCENES[scene].ask(system)
            came, status, reason = served.text, 200, served.reason
            right = await system.alone(prompt)
        verdict = "right text" if came == right else "WRONG TEXT"
    except TimeoutError:
        verdict, reason = "no answer", f"no answer in {deadline_s:g} s, of {system.step}"
    except StepFailed as error:
        verdict, reason, status = "error", str(error), status or error.status
    if death := await system.death():
        verdict, reason = "the engine died", death
    return Played(
        scene=scene,
        system=system.pair.kind.name,
        verdict=verdict,
        reason=reason,
        right=right,
        came=came,
        status=status,
    )
