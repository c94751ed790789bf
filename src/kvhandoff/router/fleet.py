"""The fleet: all engines, polled concurrently, and introduced to each other as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import aiohttp

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import Identity
from kvhandoff.core.records import EngineState, LegRecord
from kvhandoff.handoff.tickets import TicketKey
from kvhandoff.router.address import EngineAddress
from kvhandoff.router.config import RouterConfig
from kvhandoff.router.engine import Engine, Role
from kvhandoff.router.policy import EngineView, Estimate, FleetView, learn_leg
from kvhandoff.router.policy.costs import MIN_TOKENS
from kvhandoff.router.records import RequestRecord
from kvhandoff.router.side import SidePages

_NO_ERRORS = (
    "on_miss: got 'error', allowed with vLLM engines is recompute: their requests can't be ended from inside"
)


class Fleet:
    """The engines of one router. `start` and `close` it on the event loop that uses it."""

    def __init__(
        self,
        config: RouterConfig,
        session: aiohttp.ClientSession,
        clock: Clock,
        on_legs: Callable[[Sequence[LegRecord]], None],
    ) -> None:
        self._interval = config.poll_interval_s
        self._on_miss = config.on_miss
        self._tasks: set[asyncio.Task[None]] = set()
        key = TicketKey(config.cluster_key)

        def engine(address: EngineAddress, role: Role) -> Engine:
            pages = SidePages(address, session)
            return Engine(
                address, role, pages, key, config.timeouts, clock, on_legs, self._vet, self._introduce
            )

        self.prefill = [engine(address, "prefill") for address in config.prefill_addresses]
        self.decode = [engine(address, "decode") for address in config.decode_addresses]
        self._by_url = {engine.url: engine for engine in self.engines}
        self._tokens_per_byte = Estimate(1.0, above=1.0)

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    async def start(self) -> None:
        """Ask every engine once, then go on asking in the background.

        Introductions are waited for too, so that a wrong cluster key shows before the first request. Raises
        ConfigError when the engines that have answered can't do what the router is told.
        """
        await self.poll(self.engines)
        await asyncio.gather(*self._tasks)
        if self._on_miss == "error" and any(engine.integration == "vllm" for engine in self.engines):
            raise ConfigError(_NO_ERRORS)
        for engine in self.engines:
            self.spawn(self._follow(engine))

    async def close(self) -> None:
        """End the background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def poll(self, engines: Iterable[Engine]) -> None:
        """A fresh state report of each, concurrently; one that fails shows in its health."""
        await asyncio.gather(*(engine.poll() for engine in engines))

    def view(self) -> FleetView:
        """What the policies see."""
        return FleetView(
            [engine.view() for engine in self.prefill],
            [engine.view() for engine in self.decode],
            self._tokens_per_byte.value,
        )

    def resting(self) -> set[str]:
        """URLs of engines whose legs have failed of late: to be avoided."""
        return {engine.url for engine in self.engines if engine.circuit.rests}

    def learn(self, record: RequestRecord) -> None:
        """What only the router's own account of a request shows: its legs' ways, and its prompt's length."""
        expected = record.expected
        if expected is not None and expected.text_bytes and record.prompt_tokens >= MIN_TOKENS:
            ratio = record.prompt_tokens / expected.text_bytes
            self._tokens_per_byte = self._tokens_per_byte.observe(ratio)
        if record.path == "pull" and record.attempts == 1 and record.prefill is not None:
            for engine in self.prefill:
                if engine.identity == record.prefill:
                    engine.costs = learn_leg(engine.costs, record.phases)

    def engine(self, view: EngineView) -> Engine:
        """The engine behind a policy's choice."""
        return self._by_url[view.url]

    def models(self) -> dict[str, int]:
        """Names of the models that a decode engine serves, or served when last seen, and their context."""
        models: dict[str, int] = {}
        for engine in self.decode:
            if engine.state is not None:
                name, longest = engine.state.model, engine.state.max_model_len
                models[name] = min(longest, models.get(name, longest))
        return models

    def serves_responses(self, model: str) -> bool:
        """Whether the model's decode engines have the Responses API."""
        states = (engine.state for engine in self.decode)
        return any(state.model == model and state.integration == "vllm" for state in states if state)

    def life(self, identity: Identity) -> Engine | None:
        """The healthy decode engine that lives this life."""
        living = (engine for engine in self.decode if engine.healthy and engine.identity == identity)
        return next(living, None)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it in the background, until it ends or the fleet closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _follow(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await engine.poll()

    def _vet(self, engine: Engine, state: EngineState) -> str | None:
        if self._on_miss == "error" and state.integration == "vllm":
            return _NO_ERRORS
        for other in self.engines:
            if other is not engine and other.identity == engine.identity:
                return (
                    f"its state report is that of the engine at {other.url}: where several engines of a host "
                    "have pages for the router apart from their servers, each needs URL,internal=URL"
                )
        return None

    def _introduce(self, newcomer: Engine) -> None:
        """Have prefill and decode engines shake hands, each with the others, ahead of the first request
        (field case 51): a decode engine reads what it pulls; a prefill engine writes what it pushes, and
        reads the history of a conversation.

        The newcomer hears from the router in any case, so that its cluster key is checked.
        """
        others = self.prefill if newcomer.role == "decode" else self.decode
        self._connect(newcomer, others)
        if newcomer.healthy:
            for other in others:
                if other.healthy:
                    self._connect(other, [newcomer])

    def _connect(self, engine: Engine, peers: Sequence[Engine]) -> None:
        addresses = tuple(peer.state.control_address for peer in peers if peer.healthy and peer.state)
        self.spawn(engine.introduce(addresses))
