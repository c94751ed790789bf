"""Legs sent straight to the engines, with the tests' own tickets: what a router sends, and what none would.

So a reference can be kept, sent again, and changed on the way.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.ids import HandoffKey, new_handoff_id
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import LegRecord
from kvhandoff.core.spans import to_blocks
from kvhandoff.handoff.events import Retention, Tick
from kvhandoff.handoff.messages import HistoryRef, OfferDescriptor, OfferRef
from kvhandoff.handoff.tickets import MissPolicy, Ticket, TicketKey
from tests.cluster import CLUSTER_KEY, Cluster, LiveEngine, until
from tests.e2e.stage import greedy

MAX_TOKENS = 6
PATIENCE = 60.0
"""Seconds after which a leg without an answer fails its test."""
ROUTER = TicketKey(CLUSTER_KEY)
"""What the router signs with."""


def new_key() -> HandoffKey:
    """The first attempt of a new handoff."""
    return HandoffKey(new_handoff_id(), 0)


def ticket(engine: LiveEngine, leg: Any, *, signed_by: TicketKey = ROUTER, **fields: Any) -> str:
    """A ticket that `engine` may obey now, but for what `fields` and `signed_by` change."""
    usual = {"audience": engine.agent.me, "not_after": engine.agent.clock() + 20, "key": new_key()}
    return signed_by.sign(Ticket(leg=leg, **{**usual, **fields}))


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Token ids that none of the models here take for an end."""
    return [rng.randrange(3, 250) for _ in range(tokens)]


@dataclass(frozen=True)
class Answered:
    """How an engine answered a leg."""

    key: HandoffKey
    status: int
    body: dict[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """What was generated."""
        assert self.status == 200, self.body
        ids: list[int] = self.body["choices"][0]["token_ids"]
        return ids

    @property
    def error(self) -> dict[str, Any]:
        """The error, without any text beside it."""
        assert self.status != 200, self.body
        assert self.body.keys() == {"error"}, self.body
        error: dict[str, Any] = self.body["error"]
        return error


class Legs:
    """Talks to the engines of a deployment as its router does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def alone(self, engine: LiveEngine, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
        """The oracle: the engine's own answer, that shares no KV with any other request's."""
        body = {"cache_salt": f"alone {new_handoff_id()}"}
        return await self.cluster.tokens(prompt, max_tokens, url=engine.url, body=body)

    async def offer(
        self,
        engine: LiveEngine,
        prompt: list[int],
        *,
        salt: str = "",
        key: HandoffKey | None = None,
        history: HistoryRef | None = None,
        **fields: Any,
    ) -> OfferDescriptor:
        """A prefill leg: `engine` computes the prompt, or what `history` lacks of it, and offers its
        blocks."""
        signed = ticket(engine, "prefill", key=key or new_key(), cache_salt=salt, history=history)
        body = {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"ticket": signed},
            **fields,
        }
        async with asyncio.timeout(PATIENCE):
            status, answer = await self.cluster.post(body, url=engine.url)
        assert status == 200, answer
        return msgspec.convert(answer["kv_transfer_params"]["offer"], OfferDescriptor)

    async def decode(
        self,
        engine: LiveEngine,
        offer: OfferDescriptor,
        prompt: list[int],
        *,
        key: HandoffKey | None = None,
        salt: str = "",
        on_miss: MissPolicy = "recompute",
        max_tokens: int = MAX_TOKENS,
        retain: Retention | None = None,
        **fields: Any,
    ) -> Answered:
        """A decode leg: `engine` reads `offer` and answers `prompt`, whether they belong together or not."""
        key = key or new_key()
        signed = ticket(
            engine, "decode", key=key, cache_salt=salt, offer=offer, on_miss=on_miss, retain=retain
        )
        params = {"ticket": signed, "prompt_token_ids": prompt}
        body = greedy(prompt, max_tokens, kv_transfer_params=params, **fields)
        return await self._send(engine, key, body)

    async def local(
        self,
        engine: LiveEngine,
        prompt: list[int],
        *,
        salt: str = "",
        max_tokens: int = MAX_TOKENS,
        retain: Retention | None = "renewable",
        history: HistoryRef | None = None,
        **fields: Any,
    ) -> Answered:
        """A local leg: a turn that `engine` answers alone, or with what another one kept of the one before,
        and retains."""
        key = new_key()
        signed = ticket(engine, "local", key=key, cache_salt=salt, retain=retain, history=history)
        params = {"ticket": signed}
        body = greedy(prompt, max_tokens, kv_transfer_params=params, **fields)
        return await self._send(engine, key, body)

    async def push(
        self,
        source: LiveEngine,
        destination: LiveEngine,
        prompt: list[int],
        *,
        key: HandoffKey | None = None,
        salt: str = "",
        max_tokens: int = MAX_TOKENS,
        retain: Retention | None = None,
        history: HistoryRef | None = None,
    ) -> tuple[Answered, Answered]:
        """Both legs of a push, sent at once: the prefill engine's answer and the decode engine's."""
        key = key or new_key()
        source_leg = self.prefill_push(source, destination, prompt, key=key, salt=salt, history=history)
        destination_leg = self.decode_push(
            source, destination, prompt, key=key, salt=salt, max_tokens=max_tokens, retain=retain
        )
        return await asyncio.gather(source_leg, destination_leg)

    async def prefill_push(
        self,
        source: LiveEngine,
        destination: LiveEngine,
        prompt: list[int],
        *,
        key: HandoffKey,
        salt: str = "",
        history: HistoryRef | None = None,
        **fields: Any,
    ) -> Answered:
        """The prefill leg of a push."""
        peers = (destination.agent.control_address,)
        signed = ticket(source, "prefill", key=key, cache_salt=salt, push=True, peers=peers, history=history)
        body = {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"ticket": signed},
            **fields,
        }
        return await self._send(source, key, body)

    async def decode_push(
        self,
        source: LiveEngine,
        destination: LiveEngine,
        prompt: list[int],
        *,
        key: HandoffKey,
        offer: HandoffKey | None = None,
        salt: str = "",
        on_miss: MissPolicy = "recompute",
        max_tokens: int = MAX_TOKENS,
        retain: Retention | None = None,
        **fields: Any,
    ) -> Answered:
        """The decode leg of a push; `offer`: the prefill leg's key, if it is not the same."""
        agent = source.agent
        ref = OfferRef(key=offer or key, source=agent.me, control_address=agent.control_address)
        signed = ticket(
            destination, "decode", key=key, cache_salt=salt, push_from=ref, on_miss=on_miss, retain=retain
        )
        params = {"ticket": signed}
        body = greedy(prompt, max_tokens, kv_transfer_params=params, **fields)
        return await self._send(destination, key, body)

    async def _send(self, engine: LiveEngine, key: HandoffKey, body: dict[str, Any]) -> Answered:
        async with asyncio.timeout(PATIENCE):
            status, answer = await self.cluster.post(body, url=engine.url)
        return Answered(key, status, answer)

    async def withdraw(self, engine: LiveEngine, offer: HandoffKey) -> None:
        """Have `engine` end an offer, one that nobody reads."""
        body = {"ticket": ticket(engine, "withdraw", key=offer)}
        async with self.cluster.session.post(f"{engine.url}/internal/withdraw", json=body) as answer:
            assert (answer.status, await answer.json()) == (200, {})

    async def flood(self, engine: LiveEngine, rng: random.Random) -> None:
        """Run other prompts until each block that `engine` can give out has held KV of one of them."""
        size, total = engine.core.layout.block_size, engine.blocks().total
        for _ in range(total // 3 + 1):
            await self.alone(engine, random_prompt(rng, 3 * size), 1)

    async def record(self, engine: LiveEngine, key: HandoffKey) -> LegRecord:
        """The engine's account of a leg that has been answered."""
        name = (key.handoff_id, key.attempt)
        found: list[LegRecord] = []

        def given() -> bool:
            records = engine.agent.state(0).records
            found[:] = [record for record in records if (record.handoff_id, record.attempt) == name]
            return bool(found)

        await until(given)
        return found[0]

    async def debug_kv(self, engine: LiveEngine) -> dict[str, int]:
        """`GET /debug/kv`."""
        async with self.cluster.session.get(f"{engine.url}/debug/kv") as answer:
            counts: dict[str, int] = await answer.json()
            return counts

    async def reasons(self, engine: LiveEngine) -> Counter[tuple[str, str]]:
        """How often `/metrics` says that each (reason, kind) came up."""
        async with self.cluster.session.get(f"{engine.url}/metrics") as answer:
            page = await answer.text()
        counted: Counter[tuple[str, str]] = Counter()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "kvhandoff_engine_reasons_total":
                    counted[sample.labels["reason"], sample.labels["kind"]] += int(sample.value)
        return counted


def counted(reason: Reason, times: int = 1) -> Counter[tuple[str, str]]:
    """What `Legs.reasons` has more after `reason` came up so often."""
    return Counter({(reason.value, reason.kind.value): times})


def history(engine: LiveEngine, turn: HandoffKey, n_tokens: int) -> HistoryRef:
    """Where to read what `engine` retained of a turn, at most `n_tokens`."""
    agent = engine.agent
    return HistoryRef(key=turn, source=agent.me, control_address=agent.control_address, n_tokens=n_tokens)


def content(engine: LiveEngine, offer: OfferDescriptor) -> list[bytes]:
    """The bytes of an offer's blocks now, block by block."""
    size = engine.region.block_bytes
    return [bytes(engine.region.buffer[b * size : (b + 1) * size]) for b in to_blocks(offer.spans)]


def pass_time(engine: LiveEngine, seconds: float) -> None:
    """Let the time pass that an engine with a ManualClock knows of, and let what is due by then happen."""
    clock = engine.agent.clock
    assert isinstance(clock, ManualClock), "the engine's clock is not the test's"
    clock.advance(seconds)
    engine.agent.feed(Tick())
