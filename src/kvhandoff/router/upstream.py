"""The router's HTTP front for stock vLLM engines with upstream's NIXL connectors.

The same API as in front of kvhandoff's engines, as far as such engines allow: no state reports, no tickets,
no re-binding, and no verification of what is handed over. Records show the legs as the router sees them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.router import wire
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.guard import guarded, serve_guarded
from kvhandoff.router.pages import PROMETHEUS, Pages
from kvhandoff.router.session import engine_session, leg_client
from kvhandoff.router.traced import traced
from kvhandoff.router.upstream_config import UpstreamConfig
from kvhandoff.router.upstream_engine import UpstreamFleet
from kvhandoff.router.upstream_relay import UpstreamRelay
from kvhandoff.router.wire import Server, json_response


class UpstreamFront(Pages):
    """The endpoints of one router."""

    OWNER = "vllm"

    def __init__(self, config: UpstreamConfig, clock: Clock) -> None:
        super().__init__(config.max_records)
        self._config = config
        self._clock = clock
        self._fleet: UpstreamFleet
        self._relay: UpstreamRelay

    def routes(self) -> list[wire.RouteDef]:
        """All endpoints."""
        return [
            wire.post(Endpoint.CHAT.path, self.chat_completions),
            wire.post(Endpoint.COMPLETIONS.path, self.completions),
            wire.get("/v1/models", self.models),
            wire.get("/v1/models/{id:.+}", self.model),
            wire.get("/v1/handoffs/{id}", self.handoff),
            wire.get("/health", self.health),
            wire.get("/ready", self.ready),
            wire.get("/metrics", self.metrics),
        ]

    async def lifespan(self, site: wire.Site) -> AsyncIterator[None]:
        """Connections and background work, while the server runs."""
        config = self._config
        connect_s, security = config.timeouts.connect_s, config.security
        async with (
            traced(config.traces, self._records, self._metrics.spans),
            engine_session(connect_s, security) as session,
            leg_client(connect_s, security) as client,
        ):
            self._fleet = UpstreamFleet(config, session, self._clock)
            self._relay = UpstreamRelay(config, self._fleet, client, self._records, self._clock)
            await self._fleet.start()
            try:
                yield
            finally:
                await self._fleet.close()

    def _served(self) -> Mapping[str, int | None]:
        return self._fleet.models()

    async def _carry(self, request: wire.Request, endpoint: Endpoint) -> wire.Response | wire.StreamResponse:
        return await self._relay.answer(request, endpoint)

    async def handoff(self, request: wire.Request) -> wire.Response:
        """A request's record. It is `incomplete`: the engines give no account."""
        return json_response(self._draft(request).record())

    async def ready(self, request: wire.Request) -> wire.Response:
        """Whether requests can be answered, and each engine's health; 503 without a healthy decode engine."""
        ready = any(engine.healthy for engine in self._fleet.decode)
        engines = [
            {
                "url": engine.url,
                "role": engine.role,
                "healthy": engine.healthy,
                "problem": engine.problem,
                "rests": engine.circuit.rests,
                "transfer_mode": engine.transfer_mode,
            }
            for engine in self._fleet.engines
        ]
        status = "ready" if ready else "no decode engine takes requests"
        body = {"status": status, "connector": self._config.connector, "verified": False, "engines": engines}
        return json_response(body, status=200 if ready else 503)

    async def metrics(self, request: wire.Request) -> wire.Response:
        return wire.Response(body=self._metrics.text(self._fleet.engines), headers=PROMETHEUS)


def create_upstream_app(config: UpstreamConfig, *, clock: Clock = monotonic) -> wire.Site:
    """The router as a site."""
    front = UpstreamFront(config, clock)
    return guarded(
        front.routes(),
        front.lifespan,
        config.security,
        max_body_bytes=config.max_body_bytes,
        clock=clock,
        on_refused=front.refused,
    )


async def serve_upstream(config: UpstreamConfig, *, clock: Clock = monotonic) -> Server:
    """Start to listen. The engines have been asked for their health once when this returns.

    Raises ConfigError when the address can't be had, or a file of `config.security` can't be used.
    """
    app = create_upstream_app(config, clock=clock)
    return await serve_guarded(app, config.host, config.port, config.security, config.shutdown_s)
