"""A site behind its guards: keys are asked for, errors answered, connections encrypted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable

from kvhandoff.core.clock import Clock
from kvhandoff.router import wire
from kvhandoff.router.access import Access
from kvhandoff.router.limits import SharedCounts
from kvhandoff.router.openapi import with_description
from kvhandoff.router.security import Security, listener_tls
from kvhandoff.router.watched import watching
from kvhandoff.router.worker import Worker
from kvhandoff.web import is_loopback

log = logging.getLogger(__name__)

_ALONE = Worker()


def guarded(
    routes: Iterable[wire.RouteDef],
    lifespan: wire.Lifespan,
    security: Security,
    *,
    max_body_bytes: int,
    clock: Clock,
    on_refused: Callable[[str], None],
    limits: SharedCounts | None = None,
    worker: Worker = _ALONE,
) -> wire.Site:
    """The site of a router. `on_refused` gets the error code of each request refused for its key; `limits`:
    what tenants use of all routers, where these count together. Raises ConfigError when the file of tenants
    can't be used."""
    access = Access(security, clock, on_refused, limits, share=worker.count)
    site = wire.Site(
        with_description(routes, keys=security.tenants is not None),
        access.admit,
        max_body_bytes=max_body_bytes,
    )
    if access.file is not None:
        site.lifespans.append(watching(access.file))
        if limits is not None:
            site.lifespans.append(_sharing(limits))
    site.lifespans.append(lifespan)
    return site


async def serve_guarded(
    site: wire.Site, host: str, port: int, security: Security, shutdown_s: float, worker: Worker = _ALONE
) -> wire.Server:
    """Start to listen. Raises ConfigError when the address, or the certificate, can't be used."""
    tls = listener_tls(security)
    if tls is not None:
        site.lifespans.append(watching(tls))
    if not is_loopback(host) and worker.index == 0:  # of several workers, the first says it for all
        if security.tenants is None:
            log.warning("host %s without --tenants: whoever reaches this port may use all of it", host)
        elif tls is None:
            log.warning("host %s without --tls-cert: keys and prompts travel in the clear", host)
    certificate = None if tls is None else tls.value
    return await wire.serve(site, host, port, shutdown_s=shutdown_s, tls=certificate, door=worker.door())


def _sharing(limits: SharedCounts) -> wire.Lifespan:
    """They count while a site is served."""

    async def lifespan(_: wire.Site) -> AsyncIterator[None]:
        await limits.start()
        try:
            yield
        finally:
            await limits.close()

    return lifespan
