"""The two systems of `stale_references`, each asked as its router would ask it, but with any reference.

Upstream: the `kv_transfer_params` that its engines have answered. This one: a descriptor of an offer, or the
place of a kept turn, that its engines have answered, in tickets signed afresh: what a router with a wrong
memory would send. (A router that is not the cluster's own can't send any.)
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from benchmarks.vllm_engines import MODEL, Running
from benchmarks.vllm_pairs import HOST, Pair
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity, new_handoff_id
from kvhandoff.core.records import EngineState, LegRecord
from kvhandoff.handoff.messages import HistoryRef, OfferDescriptor
from kvhandoff.handoff.tickets import Ticket, TicketKey
from kvhandoff.router.upstream_bodies import PULL_PREFILL

Reference = Any
"""What a system answers about blocks: of upstream a dict, of this one a descriptor or the place of a turn."""

ANSWER_S = 120.0
"""For one answer; upstream's can hang."""
ACCOUNT_S = 10.0
POLL_S = 0.05
TICKET_S = 20.0


@dataclass(frozen=True)
class Served:
    """What came of a request."""

    status: int | None
    """HTTP status; None: nothing came in time."""
    text: str
    """Or the error's message."""
    reason: str = "not recorded"
    """What the engine has written down about the KV."""
    kept: Reference | None = None
    """Of the turn, for the next one."""


class System(ABC):
    """One pair of engines."""

    def __init__(self, pair: Pair, session: aiohttp.ClientSession, max_tokens: int) -> None:
        self.pair = pair
        self._session = session
        self._max_tokens = max_tokens

    @abstractmethod
    async def prefill(self, prompt: str, history: Reference | None = None) -> tuple[Reference, str]:
        """Compute a prompt on the prefill engine, with the history that it is told to read; the reference to
        its blocks, and what was used of the history. Raises RuntimeError when the engine answers an error."""

    @abstractmethod
    async def decode(self, prompt: str, reference: Reference) -> Served:
        """Answer a prompt on the decode engine with the KV that `reference` names."""

    async def alone(self, prompt: str) -> str:
        """The right text: of the decode engine without any reference."""
        status, answer = await self._post(self.pair.decode, prompt, self._max_tokens, None)
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {answer}")
        return _text(answer)

    async def compute(self, prompt: str) -> None:
        """Let the prefill engine compute something else, so that it uses blocks again."""
        await self._post(self.pair.prefill, prompt, 1, None)

    async def _post(
        self, engine: Running, prompt: str, max_tokens: int, params: Any, request_id: str | None = None
    ) -> tuple[int | None, dict[str, Any]]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {"X-Request-Id": request_id or new_handoff_id()}
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                self._session.post(f"{engine.url}/v1/completions", json=body, headers=headers) as answer,
            ):
                return answer.status, await answer.json()
        except TimeoutError:
            return None, {"error": {"message": f"no answer in {ANSWER_S:g} s"}}

    async def _prefilled(self, prompt: str, params: Any, request_id: str | None = None) -> dict[str, Any]:
        status, answer = await self._post(self.pair.prefill, prompt, 1, params, request_id)
        if status != 200 or not answer.get("kv_transfer_params"):
            raise RuntimeError(f"prefill leg: HTTP {status}: {answer}")
        read: dict[str, Any] = answer["kv_transfer_params"]
        return read


class Upstream(System):
    """vLLM's NixlConnector, with `bidirectional_kv_xfer`."""

    async def prefill(self, prompt: str, history: Reference | None = None) -> tuple[Reference, str]:
        params = msgspec.json.decode(PULL_PREFILL) if history is None else history
        return await self._prefilled(prompt, params), "not recorded"

    async def decode(self, prompt: str, reference: Reference) -> Served:
        status, answer = await self._post(self.pair.decode, prompt, self._max_tokens, reference)
        return Served(status, _text(answer), kept=answer.get("kv_transfer_params"))


class Ours(System):
    """KVHandoffConnector."""

    async def prefill(self, prompt: str, history: Reference | None = None) -> tuple[Reference, str]:
        key = HandoffKey(new_handoff_id(), 0)
        ticket = await self._ticket(self.pair.prefill, leg="prefill", key=key, history=history)
        params = await self._prefilled(prompt, {"ticket": ticket}, key.handoff_id)
        record = await self._record(self.pair.prefill, key)
        used = f"history: {record.transferred_tokens} of {record.prompt_tokens} tokens{_reasons(record)}"
        return msgspec.convert(params["offer"], OfferDescriptor), used

    async def decode(self, prompt: str, reference: Reference) -> Served:
        key, engine = HandoffKey(new_handoff_id(), 0), self.pair.decode
        ticket = await self._ticket(engine, leg="decode", key=key, offer=reference, retain="renewable")
        status, answer = await self._post(
            engine, prompt, self._max_tokens, {"ticket": ticket}, key.handoff_id
        )
        record = await self._record(engine, key)
        state = await self._state(engine)
        kept = HistoryRef(
            key=key,
            source=_identity(state),
            control_address=state.control_address,
            n_tokens=record.retained_tokens,
        )
        moved = f", {record.transferred_tokens} tokens" if record.transferred_tokens else ""
        return Served(status, _text(answer), f"{record.kv_source}{moved}{_reasons(record)}", kept)

    async def _ticket(self, engine: Running, **fields: Any) -> str:
        state = await self._state(engine)
        ticket = Ticket(audience=_identity(state), not_after=state.now + TICKET_S, **fields)
        return TicketKey(self.pair.cluster_key.encode()).sign(ticket)

    async def _state(self, engine: Running) -> EngineState:
        url = f"http://{HOST}:{engine.spec.side_port}/internal/state"
        async with self._session.get(url, params={"after": "0"}) as answer:
            return msgspec.json.decode(await answer.read(), type=EngineState)

    async def _record(self, engine: Running, key: HandoffKey) -> LegRecord:
        """The engine's account of a leg, when it has written it down. Raises TimeoutError."""
        async with asyncio.timeout(ACCOUNT_S):
            while True:
                for record in (await self._state(engine)).records:
                    if (record.handoff_id, record.attempt) == (key.handoff_id, key.attempt):
                        return record
                await asyncio.sleep(POLL_S)


def _identity(state: EngineState) -> Identity:
    return Identity(EngineId(state.engine_id), Epoch(state.epoch))


def _reasons(record: LegRecord) -> str:
    return "".join(f", {reason.value}" for reason in record.reasons)


def _text(answer: dict[str, Any]) -> str:
    choices = answer.get("choices")
    if choices:
        text: str = choices[0]["text"]
        return text
    return str(answer.get("error", {}).get("message", answer))
