"""What the router and the operator ask of an engine, beside completions."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from kvhandoff.core.errors import RequestError, invalid, unavailable
from kvhandoff.engine.api import EngineControl, HandoffSide
from kvhandoff.handoff.tickets import BadTicket
from kvhandoff.web import decode_json, json_response, read_body


class Internal:
    """Health, metrics, blocks, state, and the router's tickets that are no request of a client."""

    def __init__(
        self,
        agent: HandoffSide,
        engine: EngineControl,
        *,
        body_bytes: int = 2**20,
        read_s: float = 10.0,
    ) -> None:
        """`body_bytes`, `read_s`: how much and how long a caller's body may be."""
        self._agent = agent
        self._engine = engine
        self._body_bytes = body_bytes
        self._read_s = read_s

    def routes(self) -> list[web.RouteDef]:
        """Where each page is."""
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/debug/kv", self.blocks),
            web.get("/internal/state", self.state),
            web.get("/internal/about", self.about),
            web.post("/internal/withdraw", self.withdraw),
            web.post("/internal/yield", self.yield_leg),
            web.post("/internal/peers", self.peers),
        ]

    async def health(self, _: web.Request) -> web.Response:
        """200 while requests are taken, and KV can be handed over."""
        self._check_health()
        return json_response({"status": "ok"})

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text format."""
        return web.Response(
            body=self._agent.metrics(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def blocks(self, _: web.Request) -> web.Response:
        """`BlockCounts`."""
        return json_response(self._agent.blocks())

    async def state(self, request: web.Request) -> web.Response:
        """`EngineState`, with the legs that ended after the cursor `after` (default 0).

        503 when the engine, or its data plane, has ended, so that the router sends nothing more.
        """
        raw = request.query.get("after", "0")
        if not (raw.isascii() and raw.isdecimal() and len(raw) < 20):
            raise invalid("after", raw, "a cursor: 0, or one that an earlier answer gave")
        self._check_health()
        return json_response(self._agent.state(int(raw)))

    async def about(self, _: web.Request) -> web.Response:
        """A flat object of texts: what is in use here."""
        return json_response(self._agent.about())

    async def withdraw(self, request: web.Request) -> web.Response:
        """End an offer, or the leg that would make it."""
        return await self._obey(request, self._agent.withdraw)

    async def yield_leg(self, request: web.Request) -> web.Response:
        """End a decode leg, unless it has begun."""
        return await self._obey(request, self._agent.yield_leg)

    async def peers(self, request: web.Request) -> web.Response:
        """Connect to peers ahead of the first request."""
        return await self._obey(request, self._agent.connect_peers)

    def _check_health(self) -> None:
        if not self._engine.healthy:
            raise unavailable("the engine has stopped", code="engine_stopped")
        if not self._agent.healthy:
            raise unavailable("the data plane has ended: no KV can be handed over", code="data_plane_ended")

    async def _obey(self, request: web.Request, act: Callable[[object], None]) -> web.Response:
        """`act` on the body's `ticket`; it checks the ticket itself. Answers `{}`."""
        raw = await read_body(request, self._body_bytes, self._read_s)
        body = decode_json(raw)
        if not isinstance(body, dict) or "ticket" not in body:
            raise invalid("body", body, 'an object {"ticket": …}')
        try:
            act(body["ticket"])
        except BadTicket as error:
            # It names the field of a completion's body.
            why = error.message.removeprefix(f"{error.param}: ")
            raise RequestError(
                f"ticket: {why}", status=error.status, param="ticket", code=error.code, kind=error.kind
            ) from error
        return json_response({})
