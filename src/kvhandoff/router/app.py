"""The router's HTTP front: endpoints, start and stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence

from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.records import LegRecord
from kvhandoff.router import wire
from kvhandoff.router.access import CALLER
from kvhandoff.router.admission import Admission
from kvhandoff.router.config import RouterConfig
from kvhandoff.router.conversations import Conversations
from kvhandoff.router.drain import drain
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.engine import Engine
from kvhandoff.router.fleet import Fleet
from kvhandoff.router.guard import guarded, serve_guarded
from kvhandoff.router.index import open_index
from kvhandoff.router.limits import open_limits
from kvhandoff.router.member_dns import NamedMembers
from kvhandoff.router.member_file import FileMembers
from kvhandoff.router.members import MemberSource
from kvhandoff.router.merging import merge_metrics, merge_ready, merge_running
from kvhandoff.router.pages import PROMETHEUS, Answering, Pages
from kvhandoff.router.ready import describe_engine, describe_fleet
from kvhandoff.router.rebind import read_rebind, rebind
from kvhandoff.router.rebinder import Rebinder
from kvhandoff.router.records import Draft, RequestRecord
from kvhandoff.router.registrations import Registrations
from kvhandoff.router.relay import Relay
from kvhandoff.router.session import engine_session, leg_client
from kvhandoff.router.told import WORKER_PAGE, read_told, told_by
from kvhandoff.router.traced import traced
from kvhandoff.router.wire import Server, json_response, read_body
from kvhandoff.router.worker import Siblings
from kvhandoff.web import no_endpoint

log = logging.getLogger(__name__)

_LEG_POLL_S = 0.02
"""Between two looks for an engine's account that is about to come in."""
_MAX_ORDER_BYTES = 4096


class Front(Pages):
    """The endpoints of one router."""

    OWNER = "kvhandoff"

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        super().__init__(config.max_records)
        self._config = config
        self._clock = clock
        self._index = open_index(
            config.index,
            limit=config.max_conversations,
            ttl_s=config.index_ttl_s,
            deadline_s=config.timeouts.index_s,
            connect_s=config.timeouts.connect_s,
            on_lost_turns=self._metrics.lost_turns.inc,
        )
        self._conversations = Conversations(self._index, config.max_conversations)
        self._registrations = Registrations(config.cluster_key, clock) if config.registration else None
        self._siblings = Siblings(config.worker)
        self._fleet: Fleet
        self._relay: Relay

    def routes(self) -> list[wire.RouteDef]:
        """All endpoints."""
        registrations, siblings = self._registrations, self._siblings
        told = None if registrations is None else siblings.told(registrations.post)
        return [
            *([wire.post("/internal/engines", told)] if told is not None else []),
            wire.post("/v1/engines/drain", siblings.told(self.drain)),
            wire.post(Endpoint.CHAT.path, self.chat_completions),
            wire.post(Endpoint.COMPLETIONS.path, self.completions),
            wire.post(Endpoint.RESPONSES.path, self.responses),
            wire.get("/v1/models", self.models),
            wire.get("/v1/models/{id:.+}", self.model),
            wire.get("/v1/handoffs", siblings.merged(self.running, merge_running)),
            wire.get("/v1/handoffs/{id}", siblings.found(self.handoff)),
            wire.post("/v1/handoffs/{id}/rebind", siblings.found(self.rebind)),
            wire.get("/health", self.health),
            wire.get("/ready", siblings.merged(self.ready, merge_ready)),
            wire.get("/metrics", siblings.merged(self.metrics, merge_metrics)),
        ]

    async def lifespan(self, site: wire.Site) -> AsyncIterator[None]:
        """Connections and background work, while the server runs."""
        config = self._config
        connect_s, security = config.timeouts.connect_s, config.security
        async with (
            traced(config.traces, self._records, self._metrics.spans),
            engine_session(connect_s, security) as session,
            leg_client(connect_s, security) as client,
            self._siblings.reachable(),
        ):
            told = await read_told(self._siblings)
            if self._registrations is not None:
                self._registrations.take_over(told.registrations)
            sources = members_of(self._config)
            if self._registrations is not None:
                sources.append(self._registrations)
            self._fleet = fleet = Fleet(self._config, session, self._clock, self._add_legs, sources)
            admission = Admission(self._config, fleet, self._conversations, self._clock)
            self._relay = Relay(self._config, fleet, admission, client, self._records, self._clock)
            try:
                await asyncio.gather(self._fleet.start(), self._index.start())
                told.drain(self._fleet)
                if self._config.policies.binding == "rebind":
                    rebinder = Rebinder(fleet, self._config.policies, self._relay.running)
                    fleet.spawn(rebinder.run(self._config.poll_interval_s))
                yield
            finally:
                await self._fleet.close()
                await self._index.close()

    def _add_legs(self, legs: Sequence[LegRecord]) -> None:
        """Engines' accounts."""
        for leg in legs:
            self._conversations.account(leg)
        self._records.add_legs(legs)

    def _settled(self, draft: Draft, record: RequestRecord) -> None:
        super()._settled(draft, record)
        self._fleet.learn(record, draft.weighed)

    def _served(self) -> Mapping[str, int | None]:
        return self._fleet.models()

    def _carry(self, request: wire.Request, endpoint: Endpoint) -> Answering:
        return self._relay.answer(request, endpoint)

    async def handoff(self, request: wire.Request) -> wire.Response:
        """A request's record; waits a moment for accounts that the engines have not given yet."""
        draft = self._draft(request)
        await self._settle(draft)
        return json_response(draft.record())

    async def running(self, request: wire.Request) -> wire.Response:
        """The records of the requests under way, as far as they are known: which there are to be moved."""
        drafts = (x.draft for x in self._relay.running.values())
        return json_response({"running": [d.record() for d in drafts if request[CALLER].sees(d.tenant)]})

    async def rebind(self, request: wire.Request) -> wire.Response:
        """Move a request to another decode engine before its answer begins. For operators."""
        draft = self._draft(request)
        order = read_rebind(await read_body(request, _MAX_ORDER_BYTES, self._config.timeouts.body_s))
        running = self._relay.running.get(draft.handoff_id)
        return json_response(await rebind(draft, running, self._fleet, self._config.policies, order))

    async def _settle(self, draft: Draft) -> None:
        try:
            async with asyncio.timeout(self._config.timeouts.record_s):
                while draft.status is not None and (awaited := self._awaited(draft)):
                    await self._fleet.poll(awaited)
                    if draft.missing():
                        await asyncio.sleep(_LEG_POLL_S)
        except TimeoutError:
            log.info("%s: accounts of %s are not in", draft.handoff_id, draft.missing())

    def _awaited(self, draft: Draft) -> list[Engine]:
        """Engines that still may give their accounts; one that has died takes its own along."""
        missing = draft.missing()
        return [engine for engine in self._fleet.engines if engine.healthy and engine.identity in missing]

    async def worker(self, request: wire.Request) -> wire.Response:
        """What this worker has been told, for a sibling that has just started."""
        if not request.from_sibling:
            raise no_endpoint(f"GET {WORKER_PAGE}")
        return json_response(told_by(self._fleet, self._registrations))

    async def ready(self, request: wire.Request) -> wire.Response:
        """Whether requests can be answered, and each engine's state; 503 when no decode engine is healthy."""
        status, body = describe_fleet(self._fleet)
        return json_response(body, status=status)

    async def drain(self, request: wire.Request) -> wire.Response:
        """Give an engine no new legs, or give it some again. For operators."""
        raw = await read_body(request, _MAX_ORDER_BYTES, self._config.timeouts.body_s)
        return json_response(describe_engine(drain(raw, self._fleet)))

    async def metrics(self, request: wire.Request) -> wire.Response:
        self._metrics.show_fleet(
            self._fleet.pairs.report(), sum(engine.draining for engine in self._fleet.engines)
        )
        return wire.Response(body=self._metrics.text(self._fleet.engines), headers=PROMETHEUS)


def members_of(config: RouterConfig) -> list[MemberSource]:
    """Where the members come from that the configuration does not name itself."""
    sources: list[MemberSource] = [NamedMembers("prefill", name) for name in config.prefill_names]
    sources += [NamedMembers("decode", name) for name in config.decode_names]
    if config.fleet_file is not None:
        sources.append(FileMembers(config.fleet_file))
    return sources


def create_app(config: RouterConfig, *, clock: Clock = monotonic) -> wire.Site:
    """The router as a site."""
    front = Front(config, clock)
    site = guarded(
        front.routes(),
        front.lifespan,
        config.security,
        max_body_bytes=config.max_body_bytes,
        clock=clock,
        on_refused=front.refused,
        limits=open_limits(
            config.index,
            config.cluster_key,
            deadline_s=config.timeouts.index_s,
            connect_s=config.timeouts.connect_s,
        ),
        worker=config.worker,
    )
    if config.worker.count > 1:
        site.add(wire.get(WORKER_PAGE, front.worker))
    return site


async def serve(config: RouterConfig) -> Server:
    """Start to listen. The engines have been asked for their state once when this returns.

    Raises ConfigError when the address can't be had, or a file of `config.security` can't be used.
    """
    return await serve_guarded(
        create_app(config), config.host, config.port, config.security, config.shutdown_s, config.worker
    )
