"""A site: its pages behind the guard that lets callers in, errors answered in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable

from kvhandoff.core.errors import RequestError
from kvhandoff.router.wire.messages import Handler, Request, Response, StreamResponse, error_response
from kvhandoff.router.wire.routes import RouteDef, Routes
from kvhandoff.web import CLIENT_LEFT, INTERNAL_ERROR, ClientGone

log = logging.getLogger(__name__)

Lifespan = Callable[["Site"], AsyncIterator[None]]
"""What runs while the site is served: up to its `yield` before, the rest after."""


class Site:
    """What a server serves."""

    def __init__(
        self, routes: Iterable[RouteDef], admit: Callable[[Request], None], *, max_body_bytes: int
    ) -> None:
        """`admit`: called with each request before anything else; raises RequestError for one that may not
        come in."""
        self.max_body_bytes = max_body_bytes
        self.lifespans: list[Lifespan] = []
        """Entered in this order, left in the reverse one."""
        self._routes = Routes(routes)
        self._admit = admit

    def add(self, route: RouteDef) -> None:
        """One more page, of which clients hear nothing."""
        self._routes.add(route)

    async def answer(self, request: Request) -> Response | StreamResponse:
        """Every error is an OpenAI error body, and none ends the service: nothing is raised."""
        try:
            return await self._handler(request)(request)
        except RequestError as error:
            return error_response(error)
        except ClientGone:
            return Response(status=CLIENT_LEFT)  # nobody receives it
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return error_response(INTERNAL_ERROR)

    def _handler(self, request: Request) -> Handler:
        """Of the page, for who may have it. Raises RequestError."""
        try:
            found = self._routes.find(request.method, request.path)
        except RequestError:
            self._admit(request)  # who may not come in learns nothing of what there is
            raise
        request.page, request.match_info = found.page, found.parts
        self._admit(request)
        return found.handler
