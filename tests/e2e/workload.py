"""Mixed requests and conversations, each with the token ids that one engine alone gives for it.

All prompts are token ids, so that histories can be edited, truncated and branched to the token. A
conversation's turns are known before it runs: whatever serves it has to answer what the oracle answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

BLOCK = 16
CONCURRENCY = 8

Ask = Callable[[Sequence[int], int], Awaitable[list[int]]]
"""(prompt, max_tokens) → the oracle's token ids."""


@dataclass(slots=True)
class Turn:
    """One request, and its right answer."""

    prompt: list[int]
    max_tokens: int
    conversation: str | None = None
    edit: str = "none"
    """How its history differs from what was said."""
    expected: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of it."""

    requests: int
    conversations: int
    turns: int
    longest_request: int
    new_tokens: tuple[int, int]
    """Shortest and longest of what each turn adds."""


def singles(sizes: Sizes, rng: random.Random) -> list[Turn]:
    """Lengths from one token on, block boundaries among them, some with a shared beginning."""
    edges = [k * BLOCK + d for k in (1, 2, 5, 32) for d in (-1, 0, 1)]
    made = []
    for index in range(sizes.requests):
        length = edges[index % len(edges)] if index % 2 else round(sizes.longest_request ** rng.random())
        length = min(length, sizes.longest_request)
        shared = [5] * (3 * BLOCK) if index % 5 == 0 else []
        made.append(Turn((shared + _tokens(rng, length))[:length], rng.choice((1, 2, 8, 20))))
    return made


async def conversations(sizes: Sizes, rng: random.Random, ask: Ask) -> list[list[Turn]]:
    """Turns in their order, each made from what the oracle answered before."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(index: int, own: random.Random) -> list[Turn]:
        history: list[int] = []
        turns = []
        for number in range(sizes.turns):
            edit = "none" if number == 0 else own.choice(EDITS)
            prompt = _edited(edit, history, own) + _tokens(own, own.randint(*sizes.new_tokens))
            turn = Turn(prompt, own.choice((4, 20, 60)), f"conversation {index}", edit)
            async with gate:
                turn.expected = await ask(turn.prompt, turn.max_tokens)
            history = turn.prompt + turn.expected
            turns.append(turn)
        return turns

    seeds = [rng.randrange(2**32) for _ in range(sizes.conversations)]
    return await asyncio.gather(*(one(index, random.Random(seed)) for index, seed in enumerate(seeds)))


EDITS = ("none", "none", "none", "edited", "truncated", "branched", "stripped")


def _edited(edit: str, history: list[int], rng: random.Random) -> list[int]:
    """The history as a client sends it back."""
    somewhere = rng.randrange(len(history)) if history else 0
    match edit:
        case "edited":  # one token of it is another
            return [*history[:somewhere], 3 + (history[somewhere] + 1) % 240, *history[somewhere + 1 :]]
        case "truncated":  # the oldest part is left out
            return history[len(history) // 3 :]
        case "branched":  # an answer is asked for anew
            return history[:somewhere]
        case "stripped":  # a passage in the middle, as a thinking trace, is left out
            return history[:somewhere] + history[somewhere + rng.randrange(5, 60) :]
        case _:
            return list(history)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 250) for _ in range(count)]
