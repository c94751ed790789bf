"""The fleet: all engines, polled concurrently, and introduced to each other as they come.

Members come and go while the router runs. One that goes is drained: it gets no new legs, is asked for its
state until the legs that it has have ended and their accounts are in, and is then forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
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
from kvhandoff.router.members import FixedMembers, Member, MemberSource, merge
from kvhandoff.router.pairs import PairTests
from kvhandoff.router.policy import EngineView, Estimate, FleetView, Weighed, learn_leg
from kvhandoff.router.policy.costs import MIN_TOKENS
from kvhandoff.router.probe import Probe
from kvhandoff.router.records import RequestRecord
from kvhandoff.router.side import SidePages

log = logging.getLogger(__name__)

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
        sources: Sequence[MemberSource] = (),
    ) -> None:
        """`sources`: of members, beside the configuration's URLs."""
        self._interval = config.poll_interval_s
        self._on_miss = config.on_miss
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        self.sources: tuple[MemberSource, ...] = (
            FixedMembers(config.prefill_addresses, config.decode_addresses),
            *sources,
        )
        self._wanted: list[tuple[Member, ...]] = [() for _ in self.sources]
        """What each of them said last."""
        key = TicketKey(config.cluster_key)
        probe = Probe(session, config.timeouts)
        self.pairs = PairTests(probe.test, lambda: (self.prefill, self.decode), clock, config.pair_tests)

        def take(legs: Sequence[LegRecord]) -> None:
            probe.take(legs)
            on_legs(legs)

        def engine(address: EngineAddress, role: Role) -> Engine:
            pages = SidePages(address, session)
            return Engine(address, role, pages, key, config.timeouts, clock, take, self._vet, self._introduce)

        self._make = engine
        self.prefill: list[Engine] = []
        self.decode: list[Engine] = []
        self.leaving: list[Engine] = []
        """Those that are no members any more, until their legs have ended."""
        self._by_url: dict[str, Engine] = {}
        self._tokens_per_byte = Estimate(1.0, above=1.0)

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode, *self.leaving]

    def set_members(self, members: Iterable[Member]) -> None:
        """From now on these are the engines. Those that are not among them are drained."""
        before = self._by_url
        now: dict[str, Engine] = {}
        for member in members:
            url = member.address.url
            engine = before.get(url) or next((e for e in self.leaving if e.url == url), None)
            if engine is None or (engine.role, engine.address) != (member.role, member.address):
                engine = self._make(member.address, member.role)
                log.info("%s engine at %s joins", engine.role, url)
                if self._started:
                    self.spawn(self._join(engine))
            engine.wanted_drain = member.drain
            now[url] = engine
        members_now = set(now.values())
        for engine in [*before.values(), *self.leaving]:
            gone = engine not in members_now
            if gone and not engine.leaving:
                log.info("%s leaves, with %d legs under way", engine, engine.reserved)
            engine.leaving = gone
        self.leaving = [engine for engine in self.engines if engine.leaving]
        self._by_url = now
        self.prefill = [engine for engine in now.values() if engine.role == "prefill"]
        self.decode = [engine for engine in now.values() if engine.role == "decode"]
        self.pairs.wake()

    async def start(self) -> None:
        """Ask every engine once, then go on asking in the background.

        Introductions are waited for too, so that a wrong cluster key shows before the first request. Raises
        ConfigError when the engines that have answered can't do what the router is told, or a source of
        members can't be used.
        """
        answers = [source.members() for source in self.sources]
        self._wanted = await asyncio.gather(*(anext(answer) for answer in answers))
        self.set_members(merge(self._wanted))
        await self.poll(self.engines)
        await asyncio.gather(*self._tasks)
        if self._on_miss == "error" and any(engine.integration == "vllm" for engine in self.engines):
            raise ConfigError(_NO_ERRORS)
        self._started = True
        for engine in self.engines:
            self.spawn(self._follow(engine))
        for index, answer in enumerate(answers):
            self.spawn(self._obey(index, answer))
        self.spawn(self.pairs.run())

    async def close(self) -> None:
        """End the background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def poll(self, engines: Iterable[Engine]) -> None:
        """A fresh state report of each, concurrently; one that fails shows in its health."""
        await asyncio.gather(*(engine.poll() for engine in engines))

    def view(self) -> FleetView:
        """What the policies see, without prefill engines that are known to hand over to nobody."""
        prefill = self.prefill
        if not self.pairs.all_hand_over:
            prefill = [p for p in prefill if self._has_partner(p)]
        return self._view(prefill, self.decode)

    def partners(self, of: Engine | None) -> FleetView:
        """The same for a handoff: without the engines that are known not to hand over with `of`, or with
        anyone when it is None."""
        return self._view(*self._partners(of))

    def decoders(self, of: Engine | None) -> FleetView:
        """The decode engines of `partners` alone."""
        return self._view((), self._partners(of)[1])

    def _partners(self, of: Engine | None) -> tuple[Sequence[Engine], Sequence[Engine]]:
        if self.pairs.all_hand_over:
            return self.prefill, self.decode
        hands_over = self.pairs.hands_over
        if of is not None:
            return [p for p in self.prefill if hands_over(p, of)], [
                d for d in self.decode if hands_over(of, d)
            ]
        prefill = [p for p in self.prefill if self._has_partner(p)]
        return prefill, [d for d in self.decode if any(hands_over(p, d) for p in prefill)]

    def _view(self, prefill: Iterable[Engine], decode: Iterable[Engine]) -> FleetView:
        return FleetView([p.view() for p in prefill], [d.view() for d in decode], self._tokens_per_byte.value)

    def _has_partner(self, p: Engine) -> bool:
        usable = [d for d in self.decode if d.obstacle is None]
        return not usable or any(self.pairs.hands_over(p, d) for d in usable)

    def resting(self) -> set[str]:
        """URLs of engines whose legs have failed of late: to be avoided."""
        return {engine.url for engine in self._by_url.values() if engine.circuit.rests}

    def learn(self, record: RequestRecord, weighed: Weighed | None) -> None:
        """What only the router's own account of a request shows: its legs' ways, and its prompt's length."""
        if weighed is not None and weighed.text_bytes and record.prompt_tokens >= MIN_TOKENS:
            ratio = record.prompt_tokens / weighed.text_bytes
            self._tokens_per_byte = self._tokens_per_byte.observe(ratio)
        if record.attempts != 1 or record.rebound or record.prefill is None:
            return
        beside = record.prefill_phases if record.path == "push" else None
        if beside is not None and record.kv_source != "transferred":
            return  # the decode engine did not wait for it
        for engine in self.prefill:
            if engine.identity == record.prefill:
                engine.costs = learn_leg(engine.costs, record.phases, beside)

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

    def decodes(self, model: str) -> bool:
        """Whether a decode engine of the model gets legs."""
        for engine in self.decode:
            if engine.state is not None and engine.state.model == model and engine.obstacle is None:
                return True
        return False

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
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work has failed", exc_info=error)

    async def _obey(self, index: int, answers: AsyncIterator[tuple[Member, ...]]) -> None:
        """Follow a source of members."""
        async for members in answers:
            self._wanted[index] = members
            self.set_members(merge(self._wanted))

    async def _join(self, engine: Engine) -> None:
        await engine.poll()
        await self._follow(engine)

    async def _follow(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._interval)
            ended = engine.leaving and not engine.reserved
            await engine.poll()  # a last time, for the accounts of legs that have ended
            if ended and engine.leaving and not engine.reserved:
                self.leaving.remove(engine)
                log.info("%s has left", engine)
                return

    def _vet(self, engine: Engine, state: EngineState) -> str | None:
        if engine.leaving:
            return None  # it goes on with what it has
        if self._on_miss == "error" and state.integration == "vllm":
            return _NO_ERRORS
        for other in (*self.prefill, *self.decode):
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
        self.pairs.wake()
        self._connect(newcomer, others)
        if newcomer.healthy:
            for other in others:
                if other.healthy:
                    self._connect(other, [newcomer])

    def _connect(self, engine: Engine, peers: Sequence[Engine]) -> None:
        addresses = tuple(peer.state.control_address for peer in peers if peer.healthy and peer.state)
        self.spawn(engine.introduce(addresses))
