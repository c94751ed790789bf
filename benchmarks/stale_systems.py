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

from benchmarks.vllm_deaths import cause_of_death, is_dead
from benchmarks.vllm_engines import MODEL, Running
from benchmarks.vllm_pairs import HOST, ROLES, Pair
from kvhandoff.core.errors import KVHandoffError
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity, new_handoff_id
from kvhandoff.core.records import EngineState, LegRecord
from kvhandoff.handoff.messages import HistoryRef, OfferDescriptor
from kvhandoff.handoff.tickets import Ticket, TicketKey
from kvhandoff.router.upstream_bodies import PULL_PREFILL

Reference = Any
"""What a system answers about blocks: of upstream a dict, of this one a descriptor or the place of a turn."""

ACCOUNT_S = 10.0
POLL_S = 0.05
TICKET_S = 20.0

PREFILL_LEG = "the prefill leg"
DECODE_LEG = "the decode leg"
ALONE = "the decode engine alone"
OTHERS = "other prompts on the prefill engine"


class StepFailed(KVHandoffError):
    """A request of a scene was not answered as it should be. The message names the step."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status that came; None: the connection ended without any."""


@dataclass(frozen=True)
class Served:
    """What a decode engine has answered, with HTTP 200."""

    text: str
    reason: str = "not recorded"
    """What the engine has written down about the KV."""
    kept: Reference | None = None
    """Of the turn, for the next one."""


class System(ABC):
    """One pair of engines. Whatever asks an engine raises StepFailed, and waits for as long as it takes: the
    deadline is the scene's."""

    step = "nothing"
    """What is being waited for."""

    def __init__(self, pair: Pair, session: aiohttp.ClientSession, max_tokens: int) -> None:
        self.pair = pair
        self._session = session
        self._max_tokens = max_tokens
        self._read: dict[str, int] = {}

    @abstractmethod
    async def prefill(self, prompt: str, history: Reference | None = None) -> tuple[Reference, str]:
        """Compute a prompt on the prefill engine, with the history that it is told to read; the reference to
        its blocks, and what was used of the history."""

    @abstractmethod
    async def decode(self, prompt: str, reference: Reference) -> Served:
        """Answer a prompt on the decode engine with the KV that `reference` names."""

    async def alone(self, prompt: str) -> str:
        """The right text: of the decode engine without any reference."""
        return _text(await self._post(ALONE, self.pair.decode, prompt, self._max_tokens, None))

    async def compute(self, prompt: str) -> None:
        """Let the prefill engine compute something else, so that it uses blocks again."""
        await self._post(OTHERS, self.pair.prefill, prompt, 1, None)

    def begin(self) -> None:
        """A scene begins: what the engines have written so far is not of it."""
        self._read = {engine.spec.name: engine.spec.log.stat().st_size for engine in self.pair.engines}

    async def death(self) -> str | None:
        """Which engine has died in this scene, and of what, by its own output."""
        for role, engine in zip(ROLES, self.pair.engines, strict=True):
            if await is_dead(engine, self._session):
                cause = cause_of_death(engine.spec.log, self._read[engine.spec.name])
                return f"the {role} engine died: {cause}"
        return None

    async def _post(
        self,
        step: str,
        engine: Running,
        prompt: str,
        max_tokens: int,
        params: Any,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        self.step = step
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {"X-Request-Id": request_id or new_handoff_id()}
        url = f"{engine.url}/v1/completions"
        try:
            async with self._session.post(url, json=body, headers=headers) as answer:
                status, content = answer.status, await answer.read()
        except aiohttp.ClientError as error:
            raise StepFailed(f"{step}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise StepFailed(f"{step}: {_message(content)}", status)
        read: dict[str, Any] = msgspec.json.decode(content)
        return read

    async def _prefilled(self, prompt: str, params: Any, request_id: str | None = None) -> dict[str, Any]:
        answer = await self._post(PREFILL_LEG, self.pair.prefill, prompt, 1, params, request_id)
        if not answer.get("kv_transfer_params"):
            raise StepFailed(f"{PREFILL_LEG}: answered without a reference", 200)
        read: dict[str, Any] = answer["kv_transfer_params"]
        return read


class Upstream(System):
    """vLLM's NixlConnector, with `bidirectional_kv_xfer`."""

    async def prefill(self, prompt: str, history: Reference | None = None) -> tuple[Reference, str]:
        params = msgspec.json.decode(PULL_PREFILL) if history is None else history
        return await self._prefilled(prompt, params), "not recorded"

    async def decode(self, prompt: str, reference: Reference) -> Served:
        answer = await self._post(DECODE_LEG, self.pair.decode, prompt, self._max_tokens, reference)
        return Served(_text(answer), kept=answer.get("kv_transfer_params"))


class Ours(System):
    """KVHandoffConnector."""

    async def prefill(self, prompt: str, history: Reference | None = None) -> tuple[Reference, str]:
        key = HandoffKey(new_handoff_id(), 0)
        ticket = await self._ticket(self.pair.prefill, leg="prefill", key=key, history=history)
        params = await self._prefilled(prompt, {"ticket": ticket}, key.handoff_id)
        if "offer" not in params:
            raise StepFailed(f"{PREFILL_LEG}: answered {params} and no offer", 200)
        record = await self._record(self.pair.prefill, key)
        used = f"history: {record.transferred_tokens} of {record.prompt_tokens} tokens{_reasons(record)}"
        return msgspec.convert(params["offer"], OfferDescriptor), used

    async def decode(self, prompt: str, reference: Reference) -> Served:
        key, engine = HandoffKey(new_handoff_id(), 0), self.pair.decode
        ticket = await self._ticket(engine, leg="decode", key=key, offer=reference, retain="renewable")
        params = {"ticket": ticket}
        answer = await self._post(DECODE_LEG, engine, prompt, self._max_tokens, params, key.handoff_id)
        record = await self._record(engine, key)
        state = await self._state(engine)
        kept = HistoryRef(
            key=key,
            source=_identity(state),
            control_address=state.control_address,
            n_tokens=record.retained_tokens,
        )
        moved = f", {record.transferred_tokens} tokens" if record.transferred_tokens else ""
        return Served(_text(answer), f"{record.kv_source}{moved}{_reasons(record)}", kept)

    async def _ticket(self, engine: Running, **fields: Any) -> str:
        state = await self._state(engine)
        ticket = Ticket(audience=_identity(state), not_after=state.now + TICKET_S, **fields)
        return TicketKey(self.pair.cluster_key.encode()).sign(ticket)

    async def _state(self, engine: Running) -> EngineState:
        self.step = f"the state of {engine.spec.name}"
        url = f"http://{HOST}:{engine.spec.side_port}/internal/state"
        try:
            async with self._session.get(url, params={"after": "0"}) as answer:
                status, content = answer.status, await answer.read()
        except aiohttp.ClientError as error:
            raise StepFailed(f"{self.step}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise StepFailed(f"{self.step}: {_message(content)}", status)
        return msgspec.json.decode(content, type=EngineState)

    async def _record(self, engine: Running, key: HandoffKey) -> LegRecord:
        """The engine's account of a leg, when it has written it down."""
        try:
            async with asyncio.timeout(ACCOUNT_S):
                while True:
                    for record in (await self._state(engine)).records:
                        if (record.handoff_id, record.attempt) == (key.handoff_id, key.attempt):
                            return record
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise StepFailed(f"{engine.spec.name} gave no account in {ACCOUNT_S:g} s") from error


def _identity(state: EngineState) -> Identity:
    return Identity(EngineId(state.engine_id), Epoch(state.epoch))


def _reasons(record: LegRecord) -> str:
    return "".join(f", {reason.value}" for reason in record.reasons)


def _text(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def _message(content: bytes) -> str:
    """Of an error's body, whatever it is."""
    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return content.decode(errors="replace")[:200]
