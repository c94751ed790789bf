"""An application behind its guards: keys are asked for, errors answered, connections encrypted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable

from aiohttp import web

from kvhandoff.core.clock import Clock
from kvhandoff.router.access import Access
from kvhandoff.router.openapi import with_description
from kvhandoff.router.security import Security, listener_tls
from kvhandoff.router.watched import watching
from kvhandoff.web import Server, errors, is_loopback
from kvhandoff.web import serve as listen

log = logging.getLogger(__name__)


def guarded(
    routes: Iterable[web.RouteDef],
    lifespan: Callable[[web.Application], AsyncIterator[None]],
    security: Security,
    *,
    max_body_bytes: int,
    clock: Clock,
    on_refused: Callable[[str], None],
) -> web.Application:
    """The application of a router. `on_refused` gets the error code of each request refused for its key.
    Raises ConfigError when the file of tenants can't be used."""
    access = Access(security, clock, on_refused)
    app = web.Application(client_max_size=max_body_bytes, middlewares=[errors, access.middleware])
    app.add_routes(with_description(routes, keys=security.tenants is not None))
    if access.file is not None:
        app.cleanup_ctx.append(watching(access.file))
    app.cleanup_ctx.append(lifespan)
    return app


async def serve_guarded(app: web.Application, host: str, port: int, security: Security) -> Server:
    """Start to listen. Raises ConfigError when the address, or the certificate, can't be used."""
    tls = listener_tls(security)
    if tls is not None:
        app.cleanup_ctx.append(watching(tls))
    if not is_loopback(host):
        if security.tenants is None:
            log.warning("host %s without --tenants: whoever reaches this port may use all of it", host)
        elif tls is None:
            log.warning("host %s without --tls-cert: keys and prompts travel in the clear", host)
    return await listen(app, host, port, tls=None if tls is None else tls.value)
