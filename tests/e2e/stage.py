"""One prefill and one decode engine with a gate at everything that can be held, and a look at what is left.

All leases and deadlines of a handoff are a minute long, so that whatever is back at its baseline was given
back, not timed out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhandoff.handoff.peers import PeerState
from kvhandoff.handoff.settings import HandoffSettings
from tests.cluster import Cluster, LiveEngine, cluster, until
from tests.gates import StepGate, TransferGate

BLOCK = 16
CHUNK = 2 * BLOCK
PATIENT = HandoffSettings(
    offer_lease_s=60.0, claim_lease_s=60.0, rendezvous_s=60.0, progress_s=60.0, write_s=60.0, fence_s=60.0
)


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(tokens)]


def greedy(tokens: list[int], max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """The body of a completion whose token ids can be compared."""
    body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, **fields}


class Errors(logging.Handler):
    """What is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@dataclass
class Stage:
    """A prefill and a decode engine with a gate at everything that can be held."""

    cluster: Cluster
    prefill: LiveEngine
    decode: LiveEngine
    prefill_steps: StepGate
    decode_steps: StepGate
    transfers: TransferGate
    """The decode engine's: reads."""
    writes: TransferGate
    """The prefill engine's."""
    on_open: Callable[[], None] = lambda: None
    errors: Errors = field(default_factory=Errors)

    async def introduced(self) -> None:
        """Wait for the handshake that the router asks for when an engine comes up."""
        peers = self.decode.agent._running_node.peers
        await until(lambda: any(peer.state is PeerState.UP for peer in peers._peers.values()))

    async def alone(self, tokens: list[int], max_tokens: int = 8) -> list[int]:
        """What an engine says without anybody's help."""
        url = self.prefill.url
        return await self.cluster.tokens(tokens, max_tokens, url=url, body={"cache_salt": "alone"})

    def request(self, tokens: list[int], max_tokens: int = 8, **options: Any) -> asyncio.Task[list[int]]:
        """A client; cancelled, it closes its connection."""
        return asyncio.create_task(self.cluster.tokens(tokens, max_tokens, **options))

    def ask(
        self, tokens: list[int], max_tokens: int = 8, **fields: Any
    ) -> asyncio.Task[tuple[int, dict[str, Any]]]:
        """As `request`, for (status, body), whatever they are."""
        return asyncio.create_task(self.cluster.post(greedy(tokens, max_tokens, **fields)))

    async def idle(self) -> None:
        """Wait until both engines and the router have forgotten everything but cached blocks; none of them
        may have met with anything that it calls an error."""
        await until(lambda: idle(self.prefill) and idle(self.decode), describe=self.where)
        async with self.cluster.session.get(f"{self.cluster.url}/metrics") as answer:
            assert "kvhandoff_router_in_flight 0.0" in await answer.text()
        assert self.errors.messages == []

    def where(self) -> str:
        return f"prefill: {leftovers(self.prefill)}; decode: {leftovers(self.decode)}"

    def reset(self) -> None:
        """Count steps anew."""
        self.prefill_steps.reset()
        self.decode_steps.reset()

    def open(self) -> None:
        """Let everything go on."""
        self.prefill_steps.open()
        self.decode_steps.open()
        self.transfers.closed = self.writes.closed = False
        self.on_open()


@asynccontextmanager
async def stage(model_dir: Path, **options: Any) -> AsyncIterator[Stage]:
    transfers, writes = TransferGate(), TransferGate()
    prefill_options = {"wrap_plane": writes.wrap, **options.pop("prefill_options", {})}
    decode_options = {"wrap_plane": transfers.wrap, **options.pop("decode_options", {})}
    options = {"settings": PATIENT, "max_step_tokens": CHUNK, **options}
    engines = {"prefill_options": prefill_options, "decode_options": decode_options}
    async with cluster(model_dir, **engines, **options) as deployment:
        (prefill,), (decode,) = deployment.prefill, deployment.decode
        steps = StepGate(prefill), StepGate(decode)
        made = Stage(deployment, prefill, decode, *steps, transfers, writes)
        logger = logging.getLogger("kvhandoff")
        logger.addHandler(made.errors)
        try:
            yield made
        finally:
            logger.removeHandler(made.errors)
            made.open()


def leftovers(engine: LiveEngine) -> dict[str, Any]:
    """What an engine still holds of any request, by where it holds it."""
    agent, core = engine.agent, engine.core
    counts, node = engine.blocks(), agent._running_node
    held = {
        "blocks": counts.total - counts.free - counts.cached,
        "lent": core._scheduler.lent.total(),
        "live": len(core.live()),
        "samplers": len(core._stepper._samplers),
        "legs": len(agent._legs),
        "requests": len(agent._by_request),
        "offers": len(node.offers),
        "reads": len(node.reads._reads),
        "quarantine": len(node.reads.quarantined()),
        "writes": len(node.writes),
        "pushes": len(node.grants._pushes),
        "fences": len(node.grants.quarantined()),
    }
    return {name: count for name, count in held.items() if count}


def idle(engine: LiveEngine) -> bool:
    return not leftovers(engine)


async def leave(*clients: asyncio.Task[Any]) -> None:
    """The clients close their connections."""
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)
    assert all(client.cancelled() for client in clients), "an answer came first"


def news(engine: LiveEngine) -> int:
    """How much waits for the engine's thread: behind a held step, all that came meanwhile."""
    return len(engine.core._inbox)


def claims(engine: LiveEngine) -> int:
    """Readers that have a claim on one of the engine's offers."""
    return sum(len(offer.pins) for offer in engine.agent._running_node.offers._offers.values())


def mute(engine: LiveEngine) -> Callable[[], None]:
    """Lose whatever the engine sends to its peers, until the returned function is called."""
    control = engine.agent._control
    send = control.send
    control.send = lambda address, message: True  # type: ignore[method-assign]

    def unmute() -> None:
        control.send = send  # type: ignore[method-assign]

    return unmute
