"""The fleet: all engines, polled concurrently, and introduced to each other as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import aiohttp

from kvhandoff.core.clock import Clock
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.tickets import TicketKey
from kvhandoff.router.config import RouterConfig
from kvhandoff.router.engine import Engine, Role
from kvhandoff.router.policy import EngineView, FleetView


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
        self._tasks: set[asyncio.Task[None]] = set()
        key = TicketKey(config.cluster_key)

        def engine(url: str, role: Role) -> Engine:
            return Engine(url, role, session, key, config.timeouts, clock, on_legs, self._introduce)

        self.prefill = [engine(url, "prefill") for url in config.prefill]
        self.decode = [engine(url, "decode") for url in config.decode]
        self._by_url = {engine.url: engine for engine in self.engines}

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    async def start(self) -> None:
        """Ask every engine once, then go on asking in the background.

        Introductions are waited for too, so that a wrong cluster key shows before the first request.
        """
        await self.poll(self.engines)
        await asyncio.gather(*self._tasks)
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
        )

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

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in the background, until it ends or the fleet closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await engine.poll()

    def _introduce(self, newcomer: Engine) -> None:
        """Have decode engines shake hands with the prefill engines they'll read from (field case 51).

        The newcomer hears from the router in any case, so that its cluster key is checked.
        """
        self._connect(newcomer, self.prefill if newcomer.role == "decode" else [])
        if newcomer.role == "prefill" and newcomer.healthy:
            for reader in self.decode:
                if reader.healthy:
                    self._connect(reader, [newcomer])

    def _connect(self, reader: Engine, sources: Sequence[Engine]) -> None:
        peers = tuple(engine.state.control_address for engine in sources if engine.healthy and engine.state)
        self.spawn(reader.introduce(peers))
