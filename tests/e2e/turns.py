"""Conversations sent straight to the engines: turns that one of them retains, and what is read of them later.

The oracle is one engine serving alone: greedy token ids, in exact mode.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.events import Retention
from kvhandoff.handoff.messages import HistoryRef
from tests.cluster import Cluster, LiveEngine, cluster, until
from tests.gates import TransferGate
from tests.legs import MAX_TOKENS, Answered, Legs, history, new_key, random_prompt

BLOCK = 16
MIN_RETURN = 64
"""Tokens: with less to gain, an engine does not read a history."""
Forward = Literal["pull", "push"]

transports = pytest.mark.parametrize("transport", ["shm", "nixl"])
forwards = pytest.mark.parametrize("forward", ["pull", "push"])


def full(tokens: int) -> int:
    """Tokens in full blocks."""
    return tokens // BLOCK * BLOCK


def blocks_of(tokens: int) -> int:
    """Blocks that so many tokens need."""
    return -(-tokens // BLOCK)


@dataclass(frozen=True)
class Turn:
    """A turn that was answered and is retained."""

    engine: LiveEngine
    key: HandoffKey
    prompt: list[int]
    answer: list[int]
    transcript: list[int] = field(init=False)
    """Prompt and answer: what the next turn's prompt begins with, if nobody edits it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "transcript", self.prompt + self.answer)

    @property
    def kept(self) -> int:
        """Tokens whose KV is retained: those in full blocks; the answer's last one was sampled, and never
        computed."""
        return full(len(self.transcript) - 1)

    @property
    def history(self) -> HistoryRef:
        """What the router would tell the next turn's prefill engine."""
        return history(self.engine, self.key, self.kept)


@dataclass(frozen=True)
class Reply:
    """A turn's answer, with the accounts of both engines."""

    answered: Answered
    source: LegRecord
    """The prefill leg's: its `transferred_tokens` came back from a decode engine."""
    destination: LegRecord
    """The decode leg's."""

    @property
    def token_ids(self) -> list[int]:
        return self.answered.token_ids


class Talk:
    """What tests say to a deployment, turn by turn."""

    def __init__(self, deployment: Cluster, seed: int = 1) -> None:
        self.deployment = deployment
        self.legs = Legs(deployment)
        self.p, self.d = deployment.prefill[0], deployment.decode[0]
        self.rng = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        """Tokens that no engine has seen."""
        return random_prompt(self.rng, tokens)

    async def turn(
        self,
        prompt: list[int],
        max_tokens: int = MAX_TOKENS,
        *,
        salt: str = "",
        retain: Retention = "renewable",
        engine: LiveEngine | None = None,
    ) -> Turn:
        """A turn that `engine` (default: the first decode engine) answers alone, and retains."""
        engine = engine or self.d
        answer = await self.legs.local(engine, prompt, max_tokens=max_tokens, salt=salt, retain=retain)
        turn = Turn(engine, answer.key, prompt, answer.token_ids)
        assert engine.agent._running_node.offers.get(turn.key) is not None
        return turn

    async def reply(
        self,
        prompt: list[int],
        read: HistoryRef | None,
        forward: Forward = "pull",
        *,
        p: LiveEngine | None = None,
        d: LiveEngine | None = None,
        salt: str = "",
        max_tokens: int = MAX_TOKENS,
        retain: Retention | None = None,
    ) -> Reply:
        """A turn computed by `p`, which may read a history, and answered by `d`; the first ones by
        default."""
        p, d, key, legs = p or self.p, d or self.d, new_key(), self.legs
        if forward == "push":
            source, answered = await legs.push(
                p, d, prompt, key=key, salt=salt, max_tokens=max_tokens, retain=retain, history=read
            )
            assert source.status == 200, source.body
        else:
            offer = await legs.offer(p, prompt, key=key, salt=salt, history=read)
            answered = await legs.decode(
                d, offer, prompt, key=key, salt=salt, max_tokens=max_tokens, retain=retain
            )
        assert answered.status == 200, answered.body
        return Reply(answered, await legs.record(p, key), await legs.record(d, key))

    async def forget(self, *turns: Turn) -> None:
        """Nobody will come for these turns; then all pools are at their baseline."""
        for turn in turns:
            await self.legs.withdraw(turn.engine, turn.key)
        await self.deployment.settled()


@asynccontextmanager
async def talk(tiny: Path, *, seed: int = 1, **options: Any) -> AsyncIterator[Talk]:
    """A deployment whose prefill engines keep no prefix cache, unless told otherwise: what they don't compute
    has come from elsewhere."""
    prefill_options = {"prefix_cache": False, **options.pop("prefill_options", {})}
    async with cluster(tiny, prefill_options=prefill_options, **options) as deployment:
        yield Talk(deployment, seed)


@asynccontextmanager
async def gated_talk(tiny: Path, **options: Any) -> AsyncIterator[tuple[Talk, TransferGate]]:
    """The same, with a gate before the first prefill engine's reads."""
    gate = TransferGate()
    prefill_options = {"wrap_plane": gate.wrap, **options.pop("prefill_options", {})}
    async with talk(tiny, prefill_options=prefill_options, **options) as made:
        try:
            yield made, gate
        finally:
            gate.closed = False


def readers(engine: LiveEngine, turn: Turn) -> int:
    """How many have claimed a retained turn."""
    offer = engine.agent._running_node.offers.get(turn.key)
    return 0 if offer is None else len(offer.pins)


async def is_read(turn: Turn, gate: TransferGate, times: int = 1) -> None:
    """Wait until a turn is claimed, and its bytes are on their way behind a gate."""
    await until(lambda: gate.held == times and readers(turn.engine, turn) == times)
