"""One prefill and one decode engine, the legs that a router would send them, and the oracle.

The oracle is vLLM itself: the decode engine serving the same prompt alone, without a ticket and under a salt
of its own, so that it shares no KV with any other request. All is greedy, in float32; where the two best
tokens are so close that another shape of a batch might swap them, another prompt is taken.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity, new_handoff_id
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.events import Retention
from kvhandoff.handoff.messages import HistoryRef, OfferDescriptor, OfferRef
from kvhandoff.handoff.tickets import Ticket, TicketKey
from tests.vllm.engines import DEADLINE, MODEL, VllmEngine, eventually

MAX_TOKENS = 8
DECISIVE = 1e-3
"""Nats between the best two tokens, at least: far more than float32 loses by another order of sums."""
FLOOD = 900
"""Tokens of a prompt that is there to take memory."""
PATIENCE = 60.0
"""Seconds after which a leg without an answer fails its test."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def new_key() -> HandoffKey:
    """The first attempt of a new handoff."""
    return HandoffKey(new_handoff_id(), 0)


@dataclass(frozen=True)
class Question:
    """A prompt, and the tokens that the engine alone answers it with."""

    prompt: list[int]
    expected: list[int]

    @property
    def max_tokens(self) -> int:
        return len(self.expected)

    @property
    def transcript(self) -> list[int]:
        """What the next turn's prompt begins with, if nobody edits it."""
        return self.prompt + self.expected


@dataclass(frozen=True)
class Answered:
    """How an engine answered a leg."""

    key: HandoffKey
    status: int
    body: dict[str, Any]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The answer's choices, in the order of their index."""
        assert self.status == 200, self.body
        return sorted(self.body["choices"], key=lambda choice: choice["index"])

    @property
    def token_ids(self) -> list[int]:
        """What was generated as the first choice."""
        ids: list[int] = self.choices[0]["token_ids"]
        return ids

    @property
    def offer(self) -> OfferDescriptor:
        """A prefill leg's."""
        assert self.status == 200, self.body
        return msgspec.convert(self.body["kv_transfer_params"]["offer"], OfferDescriptor)


@dataclass(frozen=True)
class Streamed:
    """A streamed answer, put together again."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    usage: dict[str, Any] | None


def greedy(prompt: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A completion's body whose token ids can be compared."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, **fields}


@dataclass
class Pair:
    """Talks to two engines as their router does."""

    p: VllmEngine
    d: VllmEngine
    session: aiohttp.ClientSession
    cluster_key: bytes = field(repr=False)
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    prefix_cache: bool = True
    """Whether vLLM finds again what it has computed; its CPU build does not for latent attention."""
    restarted: bool = False
    """This test has killed an engine, and started it again."""

    @property
    def engines(self) -> tuple[VllmEngine, VllmEngine]:
        return self.p, self.d

    # -------------------------------------------------------------------------------------- the oracle

    def tokens(self, count: int) -> list[int]:
        """Token ids that no engine has seen; none of them is special."""
        return [self.rng.randrange(3, 250) for _ in range(count)]

    async def question(
        self, tokens: int, max_tokens: int = MAX_TOKENS, *, begins: Sequence[int] = ()
    ) -> Question:
        """A prompt of so many tokens that nobody has seen, but for its beginning, and its right answer."""
        while True:
            prompt = [*begins, *self.tokens(tokens - len(begins))]
            question, margin = await self.alone(prompt, max_tokens)
            if margin >= DECISIVE:
                return question

    async def alone(
        self, prompt: Sequence[int], max_tokens: int = MAX_TOKENS, engine: VllmEngine | None = None
    ) -> tuple[Question, float]:
        """What an engine (default: the decode engine) answers by itself, and the least margin, in nats, by
        which it preferred one of the answer's tokens to the next best."""
        body = greedy(prompt, max_tokens, logprobs=2, cache_salt=f"alone {new_handoff_id()}")
        answer = await self.post(engine or self.d, body)
        choice = answer.choices[0]
        best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        # Two tokens that decode to equal text are one entry; they have been told apart by their ids.
        margin = min((top[0] - top[1] for top in best if len(top) > 1), default=float("inf"))
        return Question(list(prompt), choice["token_ids"]), margin

    # ------------------------------------------------------------------------------------------ legs

    async def ticket(self, engine: VllmEngine, leg: Any, **fields: Any) -> str:
        """A ticket that `engine` may obey now, but for what `fields` change."""
        state = await engine.state()
        audience = Identity(EngineId(state.engine_id), Epoch(state.epoch))
        usual = {"audience": audience, "not_after": state.now + 20, "key": new_key()}
        return TicketKey(self.cluster_key).sign(Ticket(leg=leg, **{**usual, **fields}))

    async def prefill(
        self,
        prompt: Sequence[int],
        *,
        key: HandoffKey | None = None,
        salt: str = "",
        push: bool = False,
        history: HistoryRef | None = None,
        engine: VllmEngine | None = None,
        **fields: Any,
    ) -> Answered:
        """A prefill leg: the prompt, or what `history` lacks of it, is computed, and its blocks offered."""
        key, engine = key or new_key(), engine or self.p
        peers = ((await self.d.state()).control_address,) if push else ()
        signed = await self.ticket(
            engine, "prefill", key=key, cache_salt=salt, push=push, peers=peers, history=history
        )
        body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, **fields}
        return await self.post(engine, body, key=key, ticket=signed, salt=salt)

    async def decode(
        self,
        prompt: Sequence[int],
        offer: OfferDescriptor | None,
        *,
        max_tokens: int = MAX_TOKENS,
        key: HandoffKey | None = None,
        salt: str = "",
        push_from: OfferRef | None = None,
        retain: Retention | None = None,
        **fields: Any,
    ) -> Answered:
        """A decode leg: it reads `offer`, or is written to, and answers the prompt, whether they belong
        together or not."""
        key = key or new_key()
        signed = await self.ticket(
            self.d, "decode", key=key, cache_salt=salt, offer=offer, push_from=push_from, retain=retain
        )
        body = greedy(prompt, max_tokens, **fields)
        return await self.post(self.d, body, key=key, ticket=signed, salt=salt)

    async def pull(self, prompt: Sequence[int], max_tokens: int = MAX_TOKENS, **options: Any) -> Answered:
        """Both legs of a pull, one after the other."""
        key, salt = options.pop("key", None) or new_key(), options.pop("salt", "")
        prefilled = await self.prefill(prompt, key=key, salt=salt, history=options.pop("history", None))
        return await self.decode(
            prompt, prefilled.offer, max_tokens=max_tokens, key=key, salt=salt, **options
        )

    async def push(self, prompt: Sequence[int], max_tokens: int = MAX_TOKENS, **options: Any) -> Answered:
        """Both legs of a push, at once."""
        key, salt = options.pop("key", None) or new_key(), options.pop("salt", "")
        history = options.pop("history", None)
        prefilled, answered = await asyncio.gather(
            self.prefill(prompt, key=key, salt=salt, push=True, history=history),
            self.decode_push(prompt, max_tokens, key=key, salt=salt, **options),
        )
        assert prefilled.status == 200, prefilled.body
        return answered

    async def decode_push(
        self, prompt: Sequence[int], max_tokens: int = MAX_TOKENS, *, key: HandoffKey, **options: Any
    ) -> Answered:
        """The decode leg of a push."""
        ref = await self.offer_ref(key)
        return await self.decode(prompt, None, max_tokens=max_tokens, key=key, push_from=ref, **options)

    async def offer_ref(self, key: HandoffKey) -> OfferRef:
        """An offer that the prefill engine makes, or will make."""
        state = await self.p.state()
        return OfferRef(key=key, source=await self.p.identity(), control_address=state.control_address)

    async def local(
        self,
        prompt: Sequence[int],
        max_tokens: int = MAX_TOKENS,
        *,
        salt: str = "",
        retain: Retention | None = "renewable",
        history: HistoryRef | None = None,
        **fields: Any,
    ) -> Answered:
        """A local leg: the decode engine answers alone, and retains the turn."""
        key = new_key()
        signed = await self.ticket(self.d, "local", key=key, cache_salt=salt, retain=retain, history=history)
        return await self.post(
            self.d, greedy(prompt, max_tokens, **fields), key=key, ticket=signed, salt=salt
        )

    async def history(self, turn: Answered) -> HistoryRef:
        """Where to read what the decode engine retained of a turn."""
        state, record = await self.d.state(), await self.d.record(turn.key.handoff_id)
        assert record.retained_tokens > 0, record
        return HistoryRef(
            key=turn.key,
            source=await self.d.identity(),
            control_address=state.control_address,
            n_tokens=record.retained_tokens,
        )

    async def withdraw(self, engine: VllmEngine, offer: HandoffKey) -> None:
        """Have `engine` end an offer."""
        body = {"ticket": await self.ticket(engine, "withdraw", key=offer)}
        async with self.session.post(f"{engine.side_url}/internal/withdraw", json=body) as answer:
            assert (answer.status, await answer.json()) == (200, {})

    async def flood(self, engine: VllmEngine) -> None:
        """Run other prompts through `engine`, as many as its whole pool has room for."""
        total, size = (await engine.blocks()).total, (await engine.state()).block_size
        for _ in range(total * size // FLOOD + 1):
            await self.alone(self.tokens(FLOOD), 1, engine)

    # ------------------------------------------------------------------------------------------ HTTP

    async def post(
        self,
        engine: VllmEngine,
        body: dict[str, Any],
        *,
        endpoint: str = COMPLETIONS,
        key: HandoffKey | None = None,
        ticket: str | None = None,
        salt: str = "",
    ) -> Answered:
        """One request that is not streamed."""
        key = key or new_key()
        async with (
            asyncio.timeout(PATIENCE),
            self.session.post(
                engine.url + endpoint, json=_sealed(body, ticket, salt), headers=_named(key)
            ) as answer,
        ):
            return Answered(key, answer.status, await answer.json())

    async def stream(
        self,
        engine: VllmEngine,
        body: dict[str, Any],
        *,
        endpoint: str = COMPLETIONS,
        key: HandoffKey | None = None,
        ticket: str | None = None,
        salt: str = "",
    ) -> Streamed:
        """One streamed request with one choice."""
        sealed = _sealed({**body, "stream": True}, ticket, salt)
        async with (
            asyncio.timeout(PATIENCE),
            self.session.post(engine.url + endpoint, json=sealed, headers=_named(key or new_key())) as answer,
        ):
            return await read_stream(answer)

    # ---------------------------------------------------------------------------------- what is left

    async def records(self, key: HandoffKey) -> tuple[LegRecord, LegRecord]:
        """Both engines' accounts of a handoff."""
        return await self.p.record(key.handoff_id), await self.d.record(key.handoff_id)

    async def settled(self, within: float = DEADLINE) -> None:
        """Wait until both engines are at rest: nothing runs, and nothing is owed."""

        async def at_rest() -> bool:
            return all([await engine.at_rest() for engine in self.engines])

        await eventually(at_rest, within, self.where)

    async def where(self) -> str:
        """Both pools."""
        return "; ".join([f"{engine.role}: {await engine.state()}" for engine in self.engines])


def _sealed(body: dict[str, Any], ticket: str | None, salt: str) -> dict[str, Any]:
    """The body with its ticket. vLLM keeps its own prefix cache apart by the body's salt."""
    params = dict(body.get("kv_transfer_params", {}))
    if ticket is not None:
        params["ticket"] = ticket
    sealed = {"model": MODEL, **body}
    if params:
        sealed["kv_transfer_params"] = params
    if salt:
        sealed["cache_salt"] = salt
    return sealed


def _named(key: HandoffKey) -> dict[str, str]:
    return {"X-Request-Id": key.handoff_id}


async def read_stream(answer: aiohttp.ClientResponse) -> Streamed:
    """A whole stream of one choice."""
    assert answer.status == 200, await answer.text()
    text, finish_reason, usage = "", None, None
    token_ids: list[int] = []
    async for event in _events(answer):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            token_ids += choice.get("token_ids") or []
            finish_reason = choice["finish_reason"] or finish_reason
    return Streamed(text, token_ids, finish_reason, usage)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream up to `[DONE]`, which must come."""
    async for line in answer.content:
        data = line.strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if data:
            event: dict[str, Any] = json.loads(data)
            assert "choices" in event, event
            yield event
    raise AssertionError("the stream ended without [DONE]")
