"""How the router's HTTP connections to engines are kept: those for legs, and those to their pages for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from kvhandoff.router.security import Security, engine_tls
from kvhandoff.router.wire.client import KEEP_IDLE_S, Client


def engine_session(connect_s: float, security: Security) -> aiohttp.ClientSession:
    """A session for the pages of all engines: no time limits but for connecting (each wait has its own),
    nothing unpacked, nothing taken from the environment or remembered. Raises ConfigError."""
    tls = engine_tls(security) or True
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S, ssl=tls),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        auto_decompress=False,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


@asynccontextmanager
async def leg_client(connect_s: float, security: Security) -> AsyncIterator[Client]:
    """A client for the legs on all engines. Raises ConfigError."""
    client = Client(connect_s, engine_tls(security))
    try:
        yield client
    finally:
        await client.close()
