"""The router's HTTP front for stock vLLM engines with upstream's NIXL connectors.

The same API as in front of kvhandoff's engines, as far as such engines allow: no state reports, no tickets,
no re-binding, and no verification of what is handed over. Records show the legs as the router sees them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.errors import RequestError
from kvhandoff.router import wire
from kvhandoff.router.access import CALLER
from kvhandoff.router.body import unknown_model
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.guard import guarded, serve_guarded
from kvhandoff.router.metrics import RouterMetrics
from kvhandoff.router.records import Records
from kvhandoff.router.session import engine_session, leg_client
from kvhandoff.router.traced import traced
from kvhandoff.router.upstream_config import UpstreamConfig
from kvhandoff.router.upstream_engine import UpstreamFleet
from kvhandoff.router.upstream_relay import UpstreamRelay
from kvhandoff.router.wire import Server, json_response


class UpstreamFront:
    """The endpoints of one router."""

    def __init__(self, config: UpstreamConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._started = int(time.time())
        self._metrics = RouterMetrics()
        self._records = Records(
            config.max_records,
            on_reason=self._metrics.count_reason,
            on_closed=self._metrics.count_request,
            on_settled=self._metrics.observe,
        )
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

    def refused(self, code: str) -> None:
        """A request had no key, or none for its page."""
        self._metrics.count_refused(code)

    async def lifespan(self, site: wire.Site) -> AsyncIterator[None]:
        """Connections and background work, while the server runs."""
        config = self._config
        connect_s, security = config.timeouts.connect_s, config.security
        async with (
            traced(config.traces, self._records, self._metrics.spans),
            engine_session(connect_s, security) as session,
            leg_client(connect_s, security) as client,
        ):
            self._fleet = UpstreamFleet(
                config.prefill, config.decode, session, config.timeouts, config.poll_interval_s, self._clock
            )
            self._relay = UpstreamRelay(config, self._fleet, client, self._records, self._clock)
            await self._fleet.start()
            try:
                yield
            finally:
                await self._fleet.close()

    async def chat_completions(self, request: wire.Request) -> wire.Response | wire.StreamResponse:
        return await self._answer(request, Endpoint.CHAT)

    async def completions(self, request: wire.Request) -> wire.Response | wire.StreamResponse:
        return await self._answer(request, Endpoint.COMPLETIONS)

    async def _answer(self, request: wire.Request, endpoint: Endpoint) -> wire.Response | wire.StreamResponse:
        with self._metrics.in_flight:
            return await self._relay.answer(request, endpoint)

    async def models(self, request: wire.Request) -> wire.Response:
        """What the decode engines serve, as OpenAI lists it."""
        served = request[CALLER].models(self._fleet.models())
        data = [self._model(name, served[name]) for name in sorted(served)]
        return json_response({"object": "list", "data": data})

    async def model(self, request: wire.Request) -> wire.Response:
        """One of them; its name may have slashes."""
        name, served = request.match_info["id"], request[CALLER].models(self._fleet.models())
        request[CALLER].check_model(name)
        if name not in served:
            raise unknown_model(name, served)
        return json_response(self._model(name, served[name]))

    def _model(self, name: str, longest: int | None) -> dict[str, object]:
        facts: dict[str, object] = {"id": name, "object": "model", "created": self._started}
        return facts | {"owned_by": "vllm"} | ({} if longest is None else {"max_model_len": longest})

    async def handoff(self, request: wire.Request) -> wire.Response:
        """A request's record. It is `incomplete`: the engines give no account."""
        identifier = request.match_info["id"]
        draft = self._records.get(identifier)
        if draft is None or not request[CALLER].sees(draft.tenant):  # no word of others' requests
            why = (
                f"id: got {identifier[:80]!r}, allowed is the id of one of the last "
                f"{self._config.max_records} responses"
            )
            raise RequestError(why, status=404, param="id", code="handoff_not_found")
        return json_response(draft.record())

    async def health(self, request: wire.Request) -> wire.Response:
        """The router itself runs."""
        return json_response({"status": "ok"})

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
            }
            for engine in self._fleet.engines
        ]
        status = "ready" if ready else "no decode engine is healthy"
        body = {"status": status, "connector": self._config.connector, "verified": False, "engines": engines}
        return json_response(body, status=200 if ready else 503)

    async def metrics(self, request: wire.Request) -> wire.Response:
        return wire.Response(
            body=self._metrics.text(self._fleet.engines),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


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
    return await serve_guarded(app, config.host, config.port, config.security)
